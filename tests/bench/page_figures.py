#!/usr/bin/env python3
"""Figures of the documents from the JSON in results/: tables, and ranges in prose.

    python3 page_figures.py    prints those that a page does not have

CLAIMS has, by page, functions that give what must stand there, word for word. page_figures_test.py holds the pages to it. Rows of
performance.md that no function gives stand under a head of BY_HAND.
"""
import contextlib
import io
import pathlib

import moe_figures
import operator_tables
import ring_figures
from figures import RESULTS, geometric_mean, load

DOCS = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "docs"
OPERATORS = {"ag_gemm": "AllGather+GEMM", "gemm_rs": "GEMM+ReduceScatter", "gemm_ar": "GEMM+AllReduce"}
# Which files a table has is said in its cells, and goals are ours. The simulator and verbs_footprint made the others; fabrics
# and daemon have a file for each row, whose figures are held one by one.
BY_HAND = ("| figures | of |", "| rows | a window computes |", "| nodes of one rank, 50 GB/s |", "| figure | goal |", "| fabric | figure |",
           "| what | figure |")


def span(values, form=".2f"):
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"


def mean_and_most(values):
    values = list(values)
    return f"{geometric_mean(values):.3f}, {max(values):.2f}"


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def of_op(rows, op):
    return [one for one in rows if one["op"] == op]


# -- the three GEMM operators ------------------------------------------------------------------


def gemm_operators():
    for name in ("operators_h200_x2", "operators_h200_2x1"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            operator_tables.main([str(RESULTS / f"{name}.json")])
        yield out.getvalue().partition("\n\n")[2].strip()
    shapes = load("operators_h200_2x1")["rows"]
    few = [1 - one["speedup"] for one in shapes if one["m"] == 2048]
    gather = next(one["speedup"] for one in of_op(shapes, "ag_gemm") if one["m"] == 4096)
    yield f"launches of 2048 rows lose {100 * min(few):.0f} to {100 * max(few):.0f}%, and AllGather+GEMM of 4096 rows {100 * (1 - gather):.0f}%"


def planner_choices():
    files = [load(name)["rows"] for name in ("choices_h200_1x2", "unseen_h200_1x2", "choices_h200_2x1", "unseen_h200_2x1")]
    for op, name in OPERATORS.items():
        yield row(name, *(mean_and_most(one["ratio"] for one in of_op(rows, op)) for rows in files))
    layers = [one for name in ("layers_h200_1x2", "layers_h200_2x1") for one in load(name)["rows"]]
    yield f"the 24 gain {span(one['speedup'] for one in layers if one['m'] >= 3000)} from M 3000 on, and {span(one['speedup'] for one in layers if one['m'] == 1024)} at M 1024"
    yield f"take up to {max(1 / one['speedup'] for one in layers if one['m'] < 1000):.2f} times as long"
    unseen = files[1] + files[3]
    yield f"{geometric_mean([one['ratio'] for one in unseen]):.2f}, at worst {max(one['ratio'] for one in unseen):.2f}, on two"


def few_rows():
    rows = [one for document in load("few_rows_h200_1x2")["documents"] for one in document["rows"]]
    gains = {op: span(one["speedup"] for one in of_op(rows, op) if one["m"] <= (384 if op == "ag_gemm" else 256)) for op in OPERATORS}
    yield (f"AllGather+GEMM {gains['ag_gemm']} at M 16 to 384, GEMM+ReduceScatter {gains['gemm_rs']} and GEMM+AllReduce {gains['gemm_ar']} "
           "at M 16 to 256")


# -- layers of a model -------------------------------------------------------------------------


def layers():
    names = {"8B": "8B, four layers", "70B": "70B, two layers"}
    one_node, two_nodes = load("layer_stack_h200_x2")["rows"], load("layer_stack_h200_2x1")["rows"]
    for one in one_node:
        rates = one["tokens_per_s"]
        yield row(names[one["shape"]], *(f"{rates[side] / 1e3:.0f}" for side in
                                         ("mkernel", "mkernel_compiled", "dtensor", "async_tp", "async_tp_by_mkernel")))
    for one in two_nodes:
        rates = one["tokens_per_s"]
        yield row(names[one["shape"]], *(f"{rates[side] / 1e3:.0f}" for side in ("mkernel", "unfused")),
                  f"{rates['mkernel'] / rates['unfused']:.2f}×")
    ratios = [[one["tokens_per_s"][side] / one["tokens_per_s"][over] for one in one_node]
              for side, over in (("mkernel", "dtensor"), ("mkernel_compiled", "async_tp"))]
    yield "mkernel reaches {:.2f} of DTensor at 8B and {:.2f} at 70B. Compiled, it reaches {:.2f} and {:.2f} of async-TP.".format(*ratios[0], *ratios[1])
    yield f"{span(ratios[0])} on two |"
    yield f"{span(one['tokens_per_s']['mkernel'] / one['tokens_per_s']['unfused'] for one in two_nodes)} on two nodes of one"


# -- the MoE layer -----------------------------------------------------------------------------


def moe():
    for name in moe_figures.TABLES:
        yield moe_figures.table(name)
    yield "| %.2f (geometric mean), %.2f (lowest) | `moe_h200_1x2.json` |" % moe_figures.core_share("moe_h200_1x2")
    for case in load("moe_h200_1x1")["cases"]:
        cells = [f"{case['model']} T{case['tokens']}"]
        for part in moe_figures.PARTS:
            cells += [f"{case['us'][part]['median'] / 1e3:.2f}", f"{moe_figures.gain(case, part):.2f}×"]
            cells += [f"{100 * case[part]['of_bound']:.0f}%"] if part != "layer" else []
        yield row(*cells)
    worlds = [load(name)["cases"] for name in moe_figures.TABLES]
    packing = [[100 * (1 - case["launch"]["dispatch"]["compute_sms"] / 132) for case in cases] for cases in worlds]
    yield f"so {span(packing[0], '.0f')}% of the SMs do nothing else on one node, and {span(packing[1], '.0f')}% over two"
    yield f"which takes {span(packing[0], '.0f')}% of the SMs on one node, and {span(packing[1], '.0f')}% over two."
    one, two = ([moe_figures.gain(case, "dispatch") for case in cases] for cases in worlds)
    yield f"{span(one)} on two; {span(two)} over two nodes"
    one, two = ([case["dispatch"]["of_bound"] for case in cases] for cases in worlds)
    yield f"{span(one)} on two, {span(two)} over two nodes"

    def gains(part, model=None, few=False, cases=worlds[0] + worlds[1]):
        return [moe_figures.gain(case, part) for case in cases if (case["tokens"] == 128) == few and
                (few or model is None or (case["model"] == "Mixtral-8x7B") == model)]

    yield (f"{span(gains('combine', False, cases=worlds[0]))} for DeepSeek-V3 and Qwen3 on two, {span(gains('combine', False, cases=worlds[1]))} over two nodes; "
           f"{span(gains('combine', True))} for Mixtral; {span(gains('combine', few=True))} at 128 tokens")
    yield (f"{span(gains('layer', False, cases=worlds[0]))} on two, {span(gains('layer', False, cases=worlds[1]))} over two nodes; "
           f"Mixtral {span(gains('layer', True))}; {span(gains('layer', few=True))} at 128 tokens")
    shares = [[100 / moe_figures.gain(case, "layer") for case in cases] for cases in worlds]
    yield f"Over two nodes a MoE layer takes {span(shares[1], '.0f')}% of PyTorch's time"
    yield f"On one node a MoE layer takes {span(shares[0], '.0f')}% of PyTorch's time"


# -- Ring Attention ----------------------------------------------------------------------------


def ring_gain(case):
    us = case["us"]
    return min(ring_figures.baseline_us(us, "gather_"), ring_figures.baseline_us(us, "ring_fa3")) / us["fused"]["median"]


def core_speed(case, other):
    return case["us"][f"core_{other}"]["median"] / case["us"]["core_ours"]["median"]


def ring():
    for name in ring_figures.TABLES:
        yield ring_figures.table(name)
    one, two = (load(name)["cases"] for name in ring_figures.TABLES)
    one_long, two_long = load("ring_h200_1x2_long")["cases"], load("ring_h200_2x1_long")["cases"]
    # Windows of heads: as many as heads times keys ask for, which the file does not say.
    for label, windows, case in (("96K", 8, one_long[0]), ("192K", 16, one_long[1]), ("96K, two nodes of one (`ring_h200_2x1_long.json`)", 8, two_long[0])):
        us = case["us"]
        times = [us["fused"]["median"], ring_figures.baseline_us(us, "gather_"), ring_figures.baseline_us(us, "ring_fa3"), us["unfused"]["median"]]
        yield row(label, str(windows), *(f"{time / 1e3:.1f}" for time in times), f"{ring_gain(case):.2f}×", f"{100 * case['of_bound']:.0f}%")
    yield f"FlashAttention-3's core is {span((100 / core_speed(case, 'fa3') - 100 for case in one_long + two_long), '.0f')}% faster"
    for case in load("ring_h200_1x2_windows")["cases"]:
        yield row("48K, causal" if case["causal"] else "48K", *("{:.1f} ({:.1f} to {:.1f})".format(*(case["us"][side][what] / 1e3 for what in ("median", "min", "max")))
                                                               for side in ("fused_w16", "fused", "fused_w64", "fused_w256")))
    shares = [core_speed(case, "fa3") for case in one]
    yield f"| {geometric_mean(shares):.2f} (geometric mean), {min(shares):.2f} (lowest) | `ring_h200_1x2.json` |"
    cudnn = [core_speed(case, "cudnn") for case in one if not case["causal"] and "core_cudnn" in case["us"]]
    yield f"| {geometric_mean(cudnn):.2f} (geometric mean), {min(cudnn):.2f} (lowest) | `ring_h200_1x2.json` |"
    from_8k = [[core_speed(case, "fa3") for case in cases if case["seq"] >= 8192] for cases in (one, two)]
    longest = core_speed(one_long[1], "fa3")
    yield f"{span(from_8k[0])} on one node, {span(from_8k[1])} over two; {longest:.2f} at 192K"
    yield f"FlashAttention-3 alone is up to {100 / min(shares) - 100:.0f}% faster than it, and {100 / longest - 100:.0f}% at 192K rows"
    for cases, where in ((one + one_long, "on two"), (two + two_long, "")):
        yield f"| never below 1 | {span(ring_gain(case) for case in cases)} {where}".rstrip() + " |"
        yield f"| {span(case['of_bound'] for case in cases if case['seq'] >= 24576)} {where}".rstrip() + " |"
    yield f"Ring Attention {span((100 / ring_gain(case) for case in one + one_long), '.0f')}% of the faster baseline's"
    yield f"Ring Attention takes up to {100 - min(100 / ring_gain(case) for case in two):.0f}% less time"
    lost = [100 - 100 * min(ring_gain(case) for case in cases) for cases in (one + one_long, two + two_long)]
    yield "long launches without a mask can lose {:.0f}%, and over two nodes {:.0f}%".format(*lost)
    unfused = {case["causal"]: case["us"]["unfused"]["median"] / case["us"]["fused"]["median"] for case in two if "64:64 d128 S12K" in case["case"]}
    yield f"| 1.7 | {unfused[True]:.2f} and {unfused[False]:.2f} |"
    alone = [case["us"]["fused"]["median"] / case["us"]["core_ours"]["median"] for case in load("ring_h200_1x1")["cases"]]
    yield f"It takes {span(alone)} times as long as our attention core"
    waits = sorted(case["launch"]["wait_us_per_sm"] for case in one if case["heads_by_engines"])
    yield f"{waits[-3]:.0f} µs an SM in {len(waits) - 2} of {len(waits)} launches, and {waits[-2]:.0f} and {waits[-1]:.0f} µs in two"
    masked = [case for case in two if case["key_heads"] == 8 and case["causal"]]
    yield f"8 key heads reach {span(case['of_bound'] for case in masked)} of the bound under a mask"
    yield f"There waits take {span((case['launch']['wait_us_per_sm'] for case in masked), '.0f')} µs of an SM"
    for causal, simulated in ((False, "0.02"), (True, "0.11")):
        ms = [next(case for case in cases if "B16 heads 16:16 d128 S48K" in case["case"] and case["causal"] == causal)["launch"]["wait_us_per_sm"] / 1e3
              for cases in (one, two)]
        yield f"| {simulated} | {ms[0]:.2f}".replace(" 0.00", " 0") + f", {ms[1]:.2f} |"


# -- collectives, fabrics, daemon, and other pages ------------------------------------------------


def collectives():
    names = {"all-gather": "AllGather", "reduce-scatter": "ReduceScatter"}
    for run in load("collectives_h200_1x2")["runs"]:
        words = run["command"].split()
        us = [1e3 * run[side]["total_ms"]["median"] for side in ("fused", "unfused")]
        yield row(f"{names[words[1]]}, {words[words.index('--m') + 1]} × {words[words.index('--n') + 1]}", *(f"{time:.0f}" for time in us), f"{us[1] / us[0]:.2f}×")


def fabrics():
    rxe, staged = load("verbs_rxe"), load("staged_tcp_h200")
    yield f"| {rxe['ratio_verbs_flag']['of_medians']:.2f}; {rxe['ratio_verbs_immediate']['of_medians']:.2f} | `verbs_rxe.json` |"
    paced = [one["gb_per_s_each"] for one in load("rails_h100_2x2")["rows"] if one["pace"] == "50GB/s" and one["write_kib"] >= 256]
    yield f"| {span(paced, '.1f')} GB/s | `rails_h100_2x2.json` |"
    one_sender = next(one["gb_per_s_each"] for one in staged["rows"] if (one["gpus"], one["senders"], one["write_kib"]) == (2, 1, 256))
    yield f"| {one_sender:.1f} GB/s | `staged_tcp_h200.json` |"
    through = {one["name"]: 1e9 / one["items_per_second"] for one in load("proxy_verbs")["benchmarks"] if one["name"].endswith("lanes:1/manual_time_median") or
               one["name"] == "drain_full_rings/lanes:1/peers:1/manual_time_median"}
    yield f"| {max(through.values()):.0f} ns; {min(through.values()):.0f} ns | `proxy_verbs.json` |"
    rails = load("verbs_footprint")["clusters"]
    pairs = [(one["queue_pairs_per_node"], one["link_memory_per_node_bytes"] / 1e6, one["with_gpu_memory"]["link_memory_per_node_bytes"] / 1e6) for one in rails]
    yield f"Two nodes have {pairs[0][0]} queue pairs and {pairs[0][1]:.1f} MB for links, 16 nodes {pairs[1][0]} and {pairs[1][1]:.1f} MB."
    yield f"With 128 nodes these are {pairs[2][0]} and {pairs[2][1]:.0f} MB, with 1024 nodes {pairs[3][0]} and {pairs[3][1]:.0f} MB."
    yield f"{pairs[0][2]:.1f}, {pairs[1][2]:.0f}, {pairs[2][2]:.0f} and {pairs[3][2]:.0f} MB"
    yield session_memory()


def session_memory():
    """A ring has the same room in every segment, and a flag 4 bytes; verbs_footprint has four rings and 16384 flags."""
    segment = load("verbs_footprint")["per_session"]
    flags = 4 * 16384
    ring = (segment["segment_bytes"] - flags) / segment["lanes"]
    return f"{(4 * 65536 + 2 * ring) / 1e3:.0f} kB with two rings and the default flags, and {(4 * 65536 + 4 * ring) / 1e3:.0f} kB with four rings"


def daemon():
    found = {one["name"]: one for one in load("proxy")["benchmarks"]}
    yield row("commands per second and thread, null fabric", f"{found['drain_full_rings/lanes:1/peers:1/manual_time']['items_per_second'] / 1e6:.0f} million", "`proxy.json`")
    yield row("from a command's commit to its post, hot", f"{found['commit_to_post/gap_ns:0/real_time']['commit_to_post_p50_ns']:.0f} ns (median)", "`proxy.json`")
    yield row("the same, one command every 10 µs", f"{found['commit_to_post/gap_ns:10000/real_time']['commit_to_post_p50_ns']:.0f} ns (median)", "`proxy.json`")


def partitions():
    names = ("partition_h200_1x2", "partition_h200_1x2_hot", "partition_h200_2x1", "partition_h200_2x1_rail")
    for label, side in (("static, planned", "planned"), ("adaptive, the planned number", "adaptive x1"), ("adaptive, a quarter", "adaptive x0.25"),
                        ("adaptive, four times", "adaptive x4")):
        cells = []
        for name in names:
            ratios = [one["partitions"][side]["ratio"] for one in load(name)["rows"]]
            cells.append(f"{geometric_mean(ratios):.2f}, {max(ratios):.2f}")
        yield row(label, *cells)


def turns():
    def us(name, shares):
        return next(one["us"] for one in load(name)["rows"] if one["operators"].startswith("gemm-ar") and not one["graph"] and one["shares"] == shares)

    yield f"take {us('turns_h200_1x2', True):.1f} µs a launch in one workspace, and {us('turns_h200_1x2', False):.1f} in two"
    yield f"they take {us('turns_h200_2x1', True):.0f} instead of {us('turns_h200_2x1', False):.0f} µs"


def a_node():
    for one in load("verbs_footprint")["clusters"]:
        gpus = one["with_gpu_memory"]
        yield row(str(one["nodes"]), "8", str(one["queue_pairs_per_node"]), str(gpus["queue_pairs_per_node"]), f"{gpus['link_memory_per_node_bytes'] / 1e6:.0f} MB")
    yield session_memory()


def torch_bench():
    for name, words in (("torch_bench_h200_x2_8k", "took {:.2f} of DTensor's time"), ("torch_bench_h200_x2_4k_compiled", "It took {:.2f} for 8192")):
        ms = load(name)["ms"]
        yield words.format(ms["mkernel"] / ms["dtensor"])


def readme():
    one, two = (load(name)["rows"] for name in ("operators_h200_x2", "operators_h200_2x1"))
    yield f"the GEMM operators are {span((case['speedup'] for case in one), '.1f')} times as fast as cuBLAS followed by NCCL"
    gains = [[moe_figures.gain(case, "layer") for case in load(name)["cases"]] for name in moe_figures.TABLES]
    yield f"A MoE layer is {min(gains[0]):.2f} to {max(gains[0]):.1f} times as fast as PyTorch's"
    yield f"Over two nodes a MoE layer is {span(gains[1], '.1f')} times as fast as PyTorch's"
    attention = [ring_gain(case) for name in ("ring_h200_1x2", "ring_h200_1x2_long") for case in load(name)["cases"]]
    yield f"Attention is {min(attention):.2f} to {max(attention):.1f} times as fast as the faster of two baselines"
    both = two + load("layers_h200_2x1")["rows"]
    many = [case.get("speedup_in_place", case["speedup"]) for case in both if case["m"] >= 8192]
    many += [case["speedup"] for case in both if case["m"] >= 8192]
    yield f"GEMM operators are {min(many):.2f} to {max(many):.1f} times as fast from 8192 rows on"


CLAIMS = {
    "../../README.md": (readme,),
    "performance.md": (gemm_operators, planner_choices, few_rows, layers, moe, ring, collectives, fabrics, daemon),
    "tuning.md": (partitions, turns, a_node),
    "api/python.md": (torch_bench,),
}


def missing(pages):
    """(page, function, text) of what the pages, given as text by name, do not have. Line breaks count as spaces."""
    flat = {page: " ".join(text.split()) for page, text in pages.items()}
    return [(page, function.__name__, text) for page, functions in CLAIMS.items() for function in functions for text in function()
            if " ".join(text.split()) not in flat[page]]


def rows_by_hand(page):
    """Rows of tables of performance.md that nothing here gives, but for those under a head of BY_HAND."""
    given = {line for function in CLAIMS["performance.md"] for text in function() for line in text.splitlines() if line.startswith("|")}
    ends = tuple(given)
    found, head = [], None
    for line in page.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        if head is None:
            head = line
        if line != head and not line.startswith("|---") and not head.startswith(BY_HAND) and not line.endswith(ends):
            found.append(line)
    return found


def pages():
    return {page: (DOCS / page).read_text(encoding="utf-8") for page in CLAIMS}


def main():
    texts = pages()
    for page, function, text in missing(texts):
        print(f"{page}: {function}:\n{text}\n")
    for line in rows_by_hand(texts["performance.md"]):
        print(f"performance.md: no function gives: {line}")


if __name__ == "__main__":
    main()
