#!/usr/bin/env python3
"""Draws the charts of the documents from the JSON of operators_bench.

    python3 charts.py [FOLDER]    writes every chart of CHARTS into FOLDER (default: deploy/docs/images)

A chart has a bar for each operator and M: the time of the unfused form divided by the time of the fused form. The output
depends on the JSON alone, so that a test compares it with the committed files.
"""
import html
import json
import pathlib
import sys

from operator_tables import NAMES, series_of

HERE = pathlib.Path(__file__).resolve().parent
IMAGES = HERE.parent.parent / "deploy" / "docs" / "images"
COLORS = {"ag_gemm": "#3b6ea8", "gemm_rs": "#c77d2e", "gemm_ar": "#5a8f4e"}
BASELINES = {"one": "cuBLAS followed by NCCL", "two": "cuBLAS followed by a pipelined collective over the same rails"}
# Chart: file of results, series, nodes, title.
CHARTS = {
    "one_node": ("operators_h100_x4", "wide", "one", "Four H100s of one node"),
    "two_nodes": ("operators_h100_2x2", "narrow", "two", "Two nodes of two H100s, 50 GB/s a rail"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 300, 46, 58, 62


def speedups(rows, series):
    """{operator: {M: speed-up}}; where the caller can leave AllGather's shard in place, the figure in place."""
    found = {}
    for row in rows:
        if series_of(row) == series and "speedup" in row:
            found.setdefault(row["op"], {})[row["m"]] = row.get("speedup_in_place", row["speedup"])
    return found


def text(x, y, words, anchor="middle", size=12, weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="#222">{html.escape(words)}</text>')


def draw(title, baseline, found):
    heights = sorted({m for of_op in found.values() for m in of_op})
    ops = [op for op in NAMES if op in found]
    top = max(2.0, max(value for of_op in found.values() for value in of_op.values()) * 1.08)
    plot_width, plot_height = WIDTH - LEFT - 12, HEIGHT - TOP - BOTTOM

    def at(value):
        return TOP + plot_height * (1 - value / top)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
           text(LEFT, 20, title, "start", 14, "bold"), text(LEFT, 38, f"speed-up over {baseline}", "start")]
    for step in range(int(top * 2) + 1):
        y = at(step / 2)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}" stroke="{"#444" if step == 2 else "#ddd"}"/>')
        out.append(text(LEFT - 6, y + 4, f"{step / 2:.1f}×", "end", 11))
    slot = plot_width / len(heights)
    bar = slot * 0.8 / len(ops)
    for column, m in enumerate(heights):
        left = LEFT + slot * column + slot * 0.1
        for number, op in enumerate(ops):
            if m not in found[op]:
                continue
            value, x = found[op][m], left + bar * number
            out.append(f'<rect x="{x:.1f}" y="{at(value):.1f}" width="{bar * 0.92:.1f}" height="{at(0) - at(value):.1f}" '
                       f'fill="{COLORS[op]}"/>')
            out.append(text(x + bar * 0.46, at(value) - 4, f"{value:.2f}", size=10))
        out.append(text(left + slot * 0.4, HEIGHT - BOTTOM + 18, f"M = {m}"))
    for number, op in enumerate(ops):
        x = LEFT + 190 * number
        out.append(f'<rect x="{x}" y="{HEIGHT - 26}" width="12" height="12" fill="{COLORS[op]}"/>')
        out.append(text(x + 18, HEIGHT - 15, NAMES[op], "start"))
    return "\n".join([*out, "</svg>"]) + "\n"


def chart(name):
    file, series, nodes, title = CHARTS[name]
    document = json.loads((HERE / "results" / f"{file}.json").read_text(encoding="utf-8"))
    return draw(title, BASELINES[nodes], speedups(document["rows"], series))


def main(arguments):
    folder = pathlib.Path(arguments[0]) if arguments else IMAGES
    for name in CHARTS:
        (folder / f"{name}.svg").write_text(chart(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
