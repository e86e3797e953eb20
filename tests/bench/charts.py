#!/usr/bin/env python3
"""Draws the charts of the documents from JSON in results/.

    python3 charts.py [FOLDER]    writes every chart of CHARTS into FOLDER (default: deploy/docs/images)

A chart has a bar for each workload: the time of its baseline divided by the time of the fused form. A chart of PARTITIONS
follows the launches of partition_bench. The output depends on the JSON alone, so that a test compares it with the committed files.
"""
import html
import math
import pathlib
import sys

import moe_figures
import ring_figures
from figures import load

HERE = pathlib.Path(__file__).resolve().parent
IMAGES = HERE.parent.parent / "deploy" / "docs" / "images"
COLORS = ("#3b6ea8", "#c77d2e", "#5a8f4e", "#8a6bb1")
WIDTH, HEIGHT, LEFT, TOP = 760, 330, 46, 34


def layers(name, baseline):
    """Stacks of Llama's layers: (label, speed-up)."""
    rows = load(name)["rows"]
    return [(row["shape"], row["ms"][baseline] / row["ms"]["mkernel"]) for row in rows]


def moe(name):
    """DeepSeek-V3's layer with even routing, by tokens of a rank."""
    cases = [case for case in moe_figures.load(name)["cases"]
             if case["model"] == "DeepSeek-V3" and case["routing"] == "uniform" and case["gated"] and case["tokens"] >= 4096]
    return [(f"{case['tokens'] // 1024}K", moe_figures.gain(case, "layer")) for case in cases]


def ring(name, causal):
    """16 sequences and 16 heads of 128, by rows, over the faster of both baselines."""
    found = []
    for case in ring_figures.load(name)["cases"]:
        if (case["batch"], case["query_heads"], case["key_heads"], case["dim"], case["causal"]) == (16, 16, 16, 128, causal):
            us = case["us"]
            faster = min(ring_figures.baseline_us(us, "gather_"), ring_figures.baseline_us(us, "ring_fa3"))
            found.append((f"{case['seq'] // 1024}K", faster / us["fused"]["median"]))
    return found


# Chart: title, and groups of bars: what they are, over what, and the bars.
def groups(name):
    if name == "one_node":
        return "Speed-up on one node of two H200s", [
            ("Llama layers", "DTensor with NCCL", layers("layer_stack_h200_x2", "dtensor")),
            ("MoE layer, by tokens", "NCCL and torch._grouped_mm", moe("moe_h200_1x2")),
            ("Ring Attention, by rows", "the faster of two with FlashAttention-3", ring("ring_h200_1x2", False)),
            ("the same, causal", "the same", ring("ring_h200_1x2", True))]
    return "Speed-up on two nodes of one H200, at 50 GB/s", [
        ("Llama layers", "our own unfused form", layers("layer_stack_h200_2x1", "unfused")),
        ("MoE layer, by tokens", "all-to-all on the same rails, torch._grouped_mm", moe("moe_h200_2x1")),
        ("Ring Attention, by rows", "the faster of two with FlashAttention-3", ring("ring_h200_2x1", False)),
        ("the same, causal", "the same", ring("ring_h200_2x1", True))]


# Adaptive partitions: of which file, operator and shape. Those without a file are not drawn.
PARTITIONS = {
    "partition_ring": ("partition_h200_1x2", "ring", [4096, 16, 128]),
    "partition_moe": ("partition_h200_1x2_hot", "moe", [2048, 4096, 1536]),
    "partition_combine": ("partition_h200_1x2_hot", "combine", [2048, 4096, 1536]),
}
CHARTS = ("one_node", "two_nodes", *(chart for chart, (file, _, _) in PARTITIONS.items() if (HERE / "results" / f"{file}.json").exists()))


def text(x, y, words, anchor="middle", size=12, weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="#222">{html.escape(words)}</text>')


def draw(title, found):
    bottom = 40 + 20 * len(found)
    top = max(2.0, max(value for _, _, bars in found for _, value in bars) * 1.08)
    plot_width, plot_height = WIDTH - LEFT - 12, HEIGHT - TOP - bottom

    def at(value):
        return TOP + plot_height * (1 - value / top)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', text(LEFT, 20, title, "start", 14, "bold")]
    for step in range(int(top * 2) + 1):
        y = at(step / 2)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}" stroke="{"#444" if step == 2 else "#ddd"}"/>')
        out.append(text(LEFT - 6, y + 4, f"{step / 2:.1f}×", "end", 11))
    slot = plot_width / (sum(len(bars) for _, _, bars in found) + 0.6 * (len(found) - 1))
    x = float(LEFT)
    for number, (what, baseline, bars) in enumerate(found):
        color = COLORS[number]
        for label, value in bars:
            out.append(f'<rect x="{x + slot * 0.1:.1f}" y="{at(value):.1f}" width="{slot * 0.8:.1f}" height="{at(0) - at(value):.1f}" '
                       f'fill="{color}"/>')
            out.append(text(x + slot / 2, at(value) - 4, f"{value:.2f}", size=10))
            out.append(text(x + slot / 2, at(0) + 15, label, size=11))
            x += slot
        x += 0.6 * slot
        y = HEIGHT - bottom + 32 + 20 * number
        out.append(f'<rect x="{LEFT}" y="{y}" width="12" height="12" fill="{color}"/>')
        out.append(text(LEFT + 18, y + 11, f"{what}: over {baseline}", "start"))
    return "\n".join([*out, "</svg>"]) + "\n"


def line(points, color, dashes="none"):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'


def draw_partition(title, row):
    """Launch by launch: above the SMs that communicate, below the time over that of the best static partition."""
    best = row["partitions"][row["best_static"]]
    paths = {name: side["sms_and_us_by_launch"] for name, side in row["partitions"].items() if "sms_and_us_by_launch" in side}
    launches = max(len(path) for path in paths.values())
    most = max(max(sms for sms, _ in path) for path in paths.values())
    middle, bottom, gap = 176, HEIGHT - 58, 22

    def x(launch):
        return LEFT + (WIDTH - LEFT - 12) * launch / max(1, launches - 1)

    def of_sms(sms):
        return middle - (middle - TOP) * math.log2(max(1, sms)) / math.log2(2 * most)

    def of_ratio(ratio):
        return bottom - (bottom - middle - gap) * (min(ratio, 2) - 0.9) / 1.1

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', text(LEFT, 20, title, "start", 14, "bold")]
    marks = [(of_sms(1 << power), f"{1 << power} SMs") for power in range(int(math.log2(2 * most)) + 1)]
    marks += [(of_ratio(ratio), f"{ratio:.1f}×") for ratio in (1, 1.5, 2)]
    for y, words in marks:
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(text(LEFT - 4, y + 4, words, "end", 9))
    best_y = of_sms(best["sms_that_communicate"])
    out.append(line([(x(0), best_y), (x(launches - 1), best_y)], "#444", "4 3"))
    for number, (name, path) in enumerate(paths.items()):
        color = COLORS[number]
        # A partition holds for a launch: steps.
        steps = [point for launch, (sms, _) in enumerate(path) for point in ((x(launch), of_sms(sms)), (x(min(launch + 1, launches - 1)), of_sms(sms)))]
        out.append(line(steps, color))
        out.append(line([(x(launch), of_ratio(us / best["us"]["median"])) for launch, (_, us) in enumerate(path)], color))
        at = LEFT + 175 * number
        out.append(f'<rect x="{at}" y="{HEIGHT - 30}" width="12" height="12" fill="{color}"/>')
        out.append(text(at + 18, HEIGHT - 19, name.replace("adaptive x1", "from the planned one").replace("adaptive ", "from "), "start"))
    out.append(text(WIDTH - 12, HEIGHT - 19, f"dashed: best static; {launches} launches", "end", 11))
    return "\n".join([*out, "</svg>"]) + "\n"


def partition(name):
    file, op, shape = PARTITIONS[name]
    row = next(row for row in load(file)["rows"] if row["op"] == op and row["shape"] == shape)
    what = {"ring": "Ring Attention", "moe": "MoE Dispatch+GEMM", "combine": "GEMM+Combine"}[op]
    load_of = " with skewed routing" if row.get("hot") else ""
    return draw_partition(f"An adaptive partition of {what}{load_of}: SMs that communicate, and a launch's time", row)


def chart(name):
    return partition(name) if name in PARTITIONS else draw(*groups(name))


def main(arguments):
    folder = pathlib.Path(arguments[0]) if arguments else IMAGES
    for name in CHARTS:
        (folder / f"{name}.svg").write_text(chart(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
