#!/usr/bin/env python3
"""plan_truth.py MKBENCH OUT: `mkbench plan` against measured launches of the CPU executor, over links so slow that the network decides.

A loopback link is paced by itself, so a rank that sends to N - 1 nodes has N - 1 times a link's rate; that is the rate the plan gets.
"""
import json
import subprocess
import sys
import tempfile

LINK_GB_S = 0.001
# Much to send, little to compute.
SHAPES = {"ag-gemm": (2048, 64, 1024), "gemm-rs": (2048, 1024, 64), "gemm-ar": (2048, 1024, 64)}
WORLDS = [(2, 2), (3, 2), (4, 2), (2, 4), (4, 4)]
RING = {"ag-gemm"}


def run(mkbench, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/report.json"
        subprocess.run([mkbench, *arguments, "--json", path], check=True, stdout=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def compare(mkbench, op, nodes, locals_):
    world = ["--nodes", str(nodes)]
    m, n, k = SHAPES[op]
    sides = ["--m", str(m), "--n", str(n), "--k", str(k)]
    report = run(mkbench, op, *world, "--local", str(locals_), "--rails", str(locals_), *sides, "--iters", "3", "--warmup", "1",
                 "--modes", "fused", "--verify", "first", "--link-bandwidth", f"{LINK_GB_S}GB/s")
    links = 1 if op in RING else nodes - 1
    plan = run(mkbench, "plan", "--op", op, *world, "--locals", str(locals_), "--gpu", "cpu", "--shape", f"{m}x{n}x{k}",
               "--nic", f"{LINK_GB_S * links}GB/s")["plans"][0]
    measured = report["fused"]["total_ms"]["median"]
    predicted = plan["time_us"] / 1e3
    return {"operator": op, "nodes": nodes, "locals": locals_, "measured_ms": measured, "predicted_ms": predicted,
            "error": predicted / measured - 1, "network_bytes_per_rank": report["fused"]["network_bytes_per_rank"],
            "planned_bytes_per_rank": plan["network_bytes_per_rank"]}


def main():
    mkbench, out = sys.argv[1:]
    rows = []
    for op in ("ag-gemm", "gemm-rs", "gemm-ar"):
        for nodes, locals_ in WORLDS:
            row = compare(mkbench, op, nodes, locals_)
            rows.append(row)
            print(f"{op:8} {nodes} x {locals_}: {row['measured_ms']:8.1f} ms, predicted {row['predicted_ms']:8.1f} ({row['error']:+.1%})")
    worst = max(abs(row["error"]) for row in rows)
    report = {"tool": "plan_truth.py", "shapes": SHAPES, "link_gb_s": LINK_GB_S, "worst_error": worst,
              "within_10_percent": sum(abs(row["error"]) <= 0.1 for row in rows), "of": len(rows), "runs": rows}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
