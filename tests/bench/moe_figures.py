#!/usr/bin/env python3
"""Tables of the MoE layer from the JSON of tests/gpu/moe_bench.py.

    python3 moe_figures.py    prints the tables of the documents

They depend on the JSON alone, so that a test compares them with what is committed.
"""
from figures import geometric_mean, load

TABLES = ("moe_h200_1x2", "moe_h200_2x1")
PARTS = ("dispatch", "combine", "layer")


def gain(case, part):
    """The time of an all-to-all and torch's grouped product over that of the fused form, for a part."""
    return case["us"][f"torch_{part}"]["median"] / case["us"][part]["median"]


def table(name):
    """A row for each case: milliseconds of the layer, its gains, those of its halves, the share of the bound."""
    lines = ["| case | layer fused, ms | own unfused form | PyTorch | gain of the layer | gain of dispatch | gain of combine | layer: share of the bound |",
             "|---|---|---|---|---|---|---|---|"]
    for case in load(name)["cases"]:
        us = case["us"]
        cells = [f"{us[side]['median'] / 1e3:.2f}" for side in ("layer", "unfused_layer", "torch_layer")]
        cells += [f"{gain(case, part):.2f}×" for part in ("layer", "dispatch", "combine")]
        lines.append("| " + " | ".join([case["case"], *cells, f"{100 * case['layer']['of_bound']:.0f}%"]) + " |")
    return "\n".join(lines) + "\n"


def core_share(name):
    """The grouped product alone: the speed as a share of torch's, on average and the lowest."""
    shares = [case["us"][f"core{n}_torch"]["median"] / case["us"][f"core{n}_ours"]["median"] for case in load(name)["cases"] for n in (1, 2)]
    return geometric_mean(shares), min(shares)


def main():
    for name in TABLES:
        print(f"{name}:\n\n{table(name)}")
    print("grouped product over torch's: mean %.2f, lowest %.2f" % core_share(TABLES[0]))


if __name__ == "__main__":
    main()
