#!/usr/bin/env python3
"""Tables and pictures of Ring Attention from the JSON of tests/gpu/ring_bench.py.

    python3 ring_figures.py            prints the tables of the documents
    python3 ring_figures.py FOLDER     writes the pictures into FOLDER (of TRACE_PICTURE: tests/bench/results)

Both depend on the JSON alone, so that a test compares them with what is committed.
"""
import html
import pathlib
import sys

from figures import RESULTS, load

TABLES = ("ring_h200_1x2", "ring_h200_2x1")
TRACE, TRACE_PICTURE = "ring_trace_h200", "ring_trace.svg"
LEFT, WIDTH, LANE, GAP, HEAD, PANEL_HEAD, ARRIVALS = 64, 780, 11, 2, 46, 38, 12
ITEMS, WAIT, ARRIVAL = ("#3b6fb6", "#6a94cd"), "#d9534f", "#4a9d5b"


def baseline_us(us, prefix):
    """The fastest side of that name."""
    found = [value["median"] for name, value in us.items() if name.startswith(prefix)]
    return min(found) if found else None


def table(name):
    """A row for each shape: milliseconds, gains, the share of the bound."""
    lines = ["| shape | fused, ms | gather, then attention | overlapped ring | own unfused form | gain over the faster | of the bound |",
             "|---|---|---|---|---|---|---|"]
    for case in load(name)["cases"]:
        us = case["us"]
        fused = us["fused"]["median"]
        times = [baseline_us(us, "gather_"), baseline_us(us, "ring_fa3"), us["unfused"]["median"]]
        cells = [f"{fused / 1e3:.2f}"] + [f"{time / 1e3:.2f}" for time in times]
        cells += [f"{min(times[:2]) / fused:.2f}×", f"{100 * case['of_bound']:.0f}%"]
        lines.append("| " + " | ".join([case["case"], *cells]) + " |")
    return "\n".join(lines) + "\n"


def text(x, y, words, size=11):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#222">{html.escape(words)}</text>'


def bar(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height}" fill="{color}"/>'


def panel(trace, top):
    """The lanes of one trace; and where they end."""
    world = "one node of two GPUs" if trace["nodes"] == 1 else "two nodes of one GPU, 50 GB/s"
    out = [text(0, top + 13, f"{trace['case']}, {world}", 12),
           text(0, top + 28, f"exposed wait {trace['wait_us_per_sm']:.0f} µs an SM (at most {trace['wait_us_max']:.0f}), tail "
                f"{trace['tail_us_per_sm']:.0f} µs an SM, of {trace['end_us']:.0f} µs")]
    scale = WIDTH / trace["end_us"]
    y = top + PANEL_HEAD
    for block, spans in list(trace["shown"].items())[::2]:
        out += [text(0, y + 9, f"SM {block}", 9), bar(LEFT, y, WIDTH, LANE, "#f4f4f4")]
        for number, (what, begin, end) in enumerate(spans):
            color = WAIT if what == "wait" else ITEMS[number % 2]
            out.append(bar(LEFT + begin * scale, y, (end - begin) * scale, LANE, color))
        y += LANE + GAP
    out.append(text(0, y + 9, "arrivals", 9))
    out += [bar(LEFT + at * scale, y, 0.6, LANE, ARRIVAL) for at in trace["arrivals"] if at >= 0]
    return out, y + ARRIVALS + 14


def trace_picture():
    traces = load(TRACE)["traces"]
    out, y = [], HEAD
    for trace in traces:
        lanes, y = panel(trace, y)
        out += lanes
    legend = [text(0, 13, "Ring Attention on H200s: what four of rank 0's SMs do in a launch", 13)]
    for x, color, words in ((0, ITEMS[0], "tiles of queries"), (130, WAIT, "waits for keys"), (250, ARRIVAL, "keys of the other rank seen")):
        legend += [bar(x, 24, 10, 10, color), text(x + 15, 33, words, 10)]
    size = f'viewBox="-8 -4 {LEFT + WIDTH + 16} {y + 4:.0f}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
                      '<rect x="-8" y="-4" width="100%" height="100%" fill="#fff"/>', *legend, *out, "</svg>"]) + "\n"


def main(arguments):
    if arguments:
        (pathlib.Path(arguments[0]) / TRACE_PICTURE).write_text(trace_picture(), encoding="utf-8")
        return
    for name in TABLES:
        print(f"{name}:\n\n{table(name)}")


if __name__ == "__main__":
    main(sys.argv[1:])
