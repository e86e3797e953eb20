#!/usr/bin/env python3
"""Gathers the recorded operator runs of GPUs in tests/bench/results into one table.

    gather_runs.py RESULTS [OUT.csv]

A row of the table is one launch form of one rank: the fused form as it was configured, with A in place where that was
measured, or the unfused form. Files whose ranks share a GPU are left out: the model is of ranks with a GPU each. The
results do not record tiles and sums; they follow from the operators' rules, which this script repeats for the past.
Those of choices_bench do, and are of present kernels.
"""
import csv
import json
import statistics
import sys
from pathlib import Path

SMS = 132
ELEMENT = 2

# Runs whose times the model is held to (the results' README); the others are of earlier ones: they still say which of two
# candidates is quicker, but not how long a launch takes today.
PRESENT = {"operators_h100_x4.json", "operators_h100_2x2.json", "operators_h100_x2.json", "operators_h100_2x1.json",
           "operators_h100_1x8_mirrored.json", "operators_h100_2x4_mirrored.json",
           "operators_h100_x4_sweep_ag_gemm.json", "operators_h100_x4_sweep_gemm_rs.json",
           "operators_h100_x4_sweep_gemm_ar.json", "operators_h100_2x2_sweep_ag_gemm.json",
           "operators_h100_2x2_sweep_gemm_rs.json", "operators_h100_2x2_sweep_gemm_ar.json"}

COLUMNS = ["file", "present", "sweep", "screened", "mirrored", "gpu", "op", "nodes", "locals", "m", "n", "k", "form", "in_place",
           "tile_m", "tile_n", "chunk_bytes", "compute", "stream", "receive", "dma", "sums", "us", "us_min",
           "product_us", "collective_us", "baseline_us"]


FIRST_TRIED = 12


def div_up(a, b):
    return -(-a // b)


def best_columns(row_tiles, n, half_time):
    compute = SMS - SMS // 16
    waves = [div_up(row_tiles * div_up(n, columns), compute) for columns in (128, 256)]
    return 128 if waves[0] * half_time < waves[1] else 256


def tile_of(op, nodes, local, m, n, name):
    """The tile that the operators' rules gave (kernels/ops/*/sm90.cc)."""
    ranks = nodes * local
    sharded = ranks * div_up(div_up(m, ranks), 128)
    if op == "gemm_rs":
        return 128, best_columns(sharded, n, 0.54 if nodes > 1 else 0.67)
    if op == "gemm_ar":
        return 128, best_columns(div_up(m, 128), n, 0.54 if nodes > 1 else 0.67)
    if name == "operators_h200_2x4_sweep.json":
        return 128, 256
    waits = ELEMENT * (nodes - 1) / ranks * 5.2e12 * SMS > 4.0 * n * 50e9
    if waits and n < 3072 and m <= 4096:
        return 64, 128
    many = sharded * div_up(n, 256) >= 4 * SMS
    if n >= 3072 or (many and not waits):
        return 128, best_columns(sharded, n, 0.54)
    return 128, 64 if sharded * div_up(n, 64) <= SMS else 128


def sums_of(row, op, nodes, local):
    """Where partial sums are added: by groups, by the compute blocks ("own"), or a shard once with what has come."""
    m, n, k = row["m"], row["n_per_rank"], row["k_per_rank"]
    if op == "gemm_rs" and nodes > 1 and local > 1:
        return "once" if 2.0 * k * 50e9 > ELEMENT * (nodes - 1) / (nodes * local) * 5.2e12 * 128 else "groups"
    if nodes == 1 and local == 2 and op != "ag_gemm" and row["stream_groups"] == 3:
        return "own"
    return "groups"


def chunk_of(row):
    """What the tables chose is kept as 0: the plan's default of today."""
    return row["chunk_bytes"]


def rows_of(path):
    data = json.loads(path.read_text())
    sweep = len({(r["op"], r["m"], r["n_per_rank"], r["k_per_rank"]) for r in data["rows"]}) < len(data["rows"])
    for row in data["rows"]:
        nodes, ranks = row["nodes"], row["ranks"]
        local = ranks // nodes
        op = row["op"]
        tile_m, tile_n = tile_of(op, nodes, local, row["m"], row["n_per_rank"], path.name)
        common = {
            "file": path.name, "present": int(path.name in PRESENT), "sweep": int(sweep), "screened": 0,
            "mirrored": int("mirrored" in path.name), "gpu": "H100" if "H100" in data["gpu"] else "H200",
            "op": op, "nodes": nodes, "locals": local, "m": row["m"], "n": row["n_per_rank"], "k": row["k_per_rank"],
            "tile_m": tile_m, "tile_n": tile_n, "chunk_bytes": chunk_of(row), "compute": row["compute_blocks"],
            "stream": row["stream_groups"], "receive": row["receive_groups"], "dma": int(bool(row.get("by_dma"))),
            "sums": sums_of(row, op, nodes, local),
            "product_us": row.get("products_us", {}).get("median", 0),
            "collective_us": row.get("collective_us", {}).get("median", 0),
            "baseline_us": row.get("baseline_us", {}).get("median", 0),
        }
        for key, form, in_place in (("fused_us", "fused", 0), ("in_place_us", "fused", 1), ("unfused_us", "unfused", 0)):
            if key in row:
                yield {**common, "form": form, "in_place": in_place, "us": row[key]["median"],
                       "us_min": row[key]["min"]}


def choices_of(path):
    """Runs of choices_bench: `planned` and `finals` as they are. Five launches screened the others, on a GPU that they
    left cooler: their times are taken by the ratio that the finals' times have to theirs. The first ones, which are
    those of the least predicted time, ran up to a fifth slower, on a GPU that came out of a pause: they are left out."""
    data = json.loads(path.read_text())
    columns = data["columns"]

    def runs(row, name):
        return [dict(zip(columns, values)) for values in row[name]]

    def same(run):
        return tuple(run[name] for name in columns if not name.endswith("us"))

    for row in data["rows"]:
        nodes, ranks = row["nodes"], row["ranks"]
        common = {
            "file": path.name, "present": 1, "sweep": 1, "mirrored": 0, "gpu": "H100" if "H100" in data["gpu"] else "H200",
            "op": row["op"], "nodes": nodes, "locals": ranks // nodes, "m": row["m"], "n": row["n_per_rank"],
            "k": row["k_per_rank"], "form": "fused", "in_place": 0, "product_us": 0, "collective_us": 0, "baseline_us": 0,
        }
        finals, tried = runs(row, "finals"), runs(row, "tried")
        screened = {same(run): run["us"] for run in tried}
        warmer = statistics.geometric_mean(run["us"] / screened[same(run)] for run in finals)
        precise = finals + [dict(zip(columns, row["planned"]))]
        known = {same(run) for run in precise}
        tried.sort(key=lambda run: run["predicted_us"])
        others = [run for run in tried[FIRST_TRIED:] if same(run) not in known]
        for run in precise + others:
            is_screened = same(run) not in known
            us = run["us"] * (warmer if is_screened else 1)
            yield {**common, **{name: run[name] for name in ("tile_m", "tile_n", "chunk_bytes", "compute", "stream", "receive")},
                   "screened": int(is_screened), "dma": int(run["by_dma"]),
                   "sums": "groups" if run["sums"] == "warpgroups" else run["sums"], "us": us, "us_min": us}


def main():
    results = Path(sys.argv[1])
    rows = []
    for path in sorted(results.glob("operators_h[12]00_*.json")):
        rows.extend(rows_of(path))
    for path in sorted(results.glob("choices_h[12]00_*.json")):
        rows.extend(choices_of(path))
    out = open(sys.argv[2], "w", newline="") if len(sys.argv) > 2 else sys.stdout
    with out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
