#!/usr/bin/env python3
"""The MoE layer on GPUs against what PyTorch, NCCL and DeepGEMM make of it, interleaved in one run.

    moe_bench.py --library libmoe_abi.so --nodes 1 --locals 2 [--set deepseek|skew|models|decode|one]... [--only TEXT]
                 [--up-to TOKENS] [--streams G,G,...] [--transports chosen,engines,engines16,warpgroups] [--baselines NAME,...] [--link-bandwidth 50GB/s] [--seconds S] [--json FILE]

One GPU a rank. Needs PyTorch; DeepGEMM (PyPI sgl-deep-gemm with apache-tvm-ffi) where it is to be compared. The work of one launch
of all ranks is held until all of it is queued, and a launch takes as long as its slowest rank. Each half, and the layer:

  dispatch, combine, layer              ours; NAME_gN: with N warpgroups that move data (--streams)
  dispatch_engines, dispatch_warpgroups  tokens by copy engines or by warpgroups within the node, whatever the planner chooses
                                        (--transports); dispatch_enginesN: N MiB at a time. With --streams: each number so
  unfused_dispatch, ...                 its own unfused form
  torch_dispatch, deepgemm_dispatch...  permute, NCCL's all-to-all, permute and the grouped product of either (moe_baseline.py);
                                        between two nodes over the daemons' paced rails
  core1_*, core2_*                      the grouped products alone, over as many rows: ours, torch, deepgemm

The bound of a half is max(core, NVLink, network, HBM): the fastest core, each token once to each rank of its node at 450 GB/s, once
over its rail, and weights and rows once from memory. Every row of every rank is judged, and every element against float64.
Exit status 1 if any is wrong.
"""
import argparse
import dataclasses
import os
import random
import statistics
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# pylint: disable=wrong-import-position
import torch

import grouped_gemm_bench
import world_bench
from gpu_world import World
from moe_baseline import ALIGN, Baseline
from moe_judge import judge_first, judge_second
from moe_world import FUNCTIONS, Case, Layer

NVLINK_BYTES_PER_US = 450e3
HBM_BYTES_PER_US = {"H100": 3.35e6, "H200": 4.8e6}
PARTS = ("dispatch", "combine", "layer")


def cases_of(which, size):
    """`tokens`: of all ranks, dealt out."""
    deepseek = lambda tokens, routing="uniform": Case("DeepSeek-V3", tokens // size, 7168, 2048, 256, 8, routing)
    k = 1024
    if which == "deepseek":
        return [deepseek(tokens) for tokens in (8 * k, 16 * k, 32 * k, 64 * k, 128 * k)]
    if which == "skew":
        return [deepseek(32 * k, routing) for routing in ("zipf", "hot_expert", "hot_rank", "correlated")]
    if which == "models":
        return [Case(name, tokens // size, hidden, features, experts, top_k) for tokens in (8 * k, 32 * k)
                for name, hidden, features, experts, top_k in (("Mixtral-8x7B", 4096, 14336, 8, 2), ("Qwen3-235B", 4096, 1536, 128, 8))]
    if which == "decode":
        return [deepseek(128 * size), Case("Qwen3-235B", 128, 4096, 1536, 128, 8)]
    return [Case("DeepSeek-V3", tokens // size, 7168, 2048, 256, 8, gated=False) for tokens in (8 * k, 32 * k, 128 * k)]


class Sides:
    """What is timed: by name, what queues a launch on the ranks' streams."""

    def __init__(self, world, case, library, streams, transports, baselines, kept):
        self.world, self.case, self.kept = world, case, kept
        self.layer = Layer(world, case, streams[0], kept=kept)
        others = [] if transports else streams[1:]
        layers = {streams[0]: self.layer, **{groups: Layer(world, case, groups, self.layer, kept=kept) for groups in others}}
        self.sides, self.baselines = {}, {}
        self.by = {f"dispatch_{name}_g{groups}" if groups else f"dispatch_{name}":
                   Layer(world, case, groups, self.layer, transport=name, kept=kept) for name in transports for groups in streams}
        for name, layer in self.by.items():
            self.sides[name] = lambda layer=layer: layer.launch(True, False)
        for groups, layer in layers.items():
            for part in PARTS:
                halves = (part != "combine", part != "dispatch")
                name = f"{part}_g{groups}" if groups else part
                self.sides[name] = lambda layer=layer, halves=halves: layer.launch(*halves)
        for part in PARTS:
            halves = (part != "combine", part != "dispatch")
            self.sides[f"unfused_{part}"] = lambda halves=halves: self.layer.launch(*halves, True)
        self.rows = {}
        self.add_cores(library)
        if "torch" in baselines:
            self.add_baseline("torch", grouped_by_torch, 1)
        if "deepgemm" in baselines:
            self.add_baseline("deepgemm", grouped_by_deepgemm, ALIGN)

    def rows_for(self, which, r, rows):
        """So many rows for a product alone; each side has the same."""
        features = (self.layer.tensors[r].first if which == 1 else self.layer.tensors[r].second).shape[2]
        with self.world.on(r):
            room = self.layer.rows[r] + self.layer.here * ALIGN
            if (which, r) not in self.rows:
                self.rows[which, r] = torch.randn(room, features, device=self.world.device(r), dtype=torch.bfloat16)
        return self.rows[which, r][:rows]

    def add_cores(self, path):
        """Our grouped product, over rows that lie ready."""
        library, layer, case = grouped_gemm_bench.Library(path), self.layer, self.case
        plans, used = {1: [], 2: []}, []
        for r in range(self.world.size):
            t = layer.tensors[r]
            counts = torch.bincount(torch.cat([its.ids_host for its in layer.tensors]).flatten().long(), minlength=case.experts)
            own = counts[r * layer.here:(r + 1) * layer.here]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)]).int().to(self.world.device(r))
            for which, weights, gated in ((1, t.first, case.gated), (2, t.second, False)):
                n, k = weights.shape[1:]
                a = self.rows_for(which, r, max(1, layer.rows[r]))
                c = torch.empty(a.shape[0], n // 2 if gated else n, device=a.device, dtype=a.dtype)
                with torch.cuda.device(r):
                    problem = grouped_gemm_bench.Problem(0, 0, int(gated), layer.here, a.shape[0], n, k, a.data_ptr(), weights.data_ptr(),
                                                         c.data_ptr(), offsets.data_ptr(), None, None, None, 0, 0, 0)
                    plans[which].append(library.plan(problem))
                    self.kept.callback(library.c.mk_grouped_destroy, plans[which][-1])
                used.append((c, offsets))
        self.world.synchronize()

        def core(which, _=used):
            for r, plan in enumerate(plans[which]):
                with self.world.on(r):
                    library.launch(plan)

        for which in (1, 2):
            self.sides[f"core{which}_ours"] = lambda which=which: core(which)

    def add_baseline(self, name, grouped, align):
        try:
            baseline = Baseline(self.world, self.case, self.layer.tensors, grouped, align, self.kept)
            self.baselines[name] = baseline
            for part in PARTS:
                side = getattr(baseline, part)
                self.world.time(side, False)
                self.sides[f"{name}_{part}"] = side
        except Exception as error:  # noqa: BLE001 - whatever a peer may say
            print(f"{name}: {type(error).__name__}: {str(error)[:300]} ({str(error.__cause__)[:300]})", file=sys.stderr)
            for part in PARTS:
                self.sides.pop(f"{name}_{part}", None)
            return
        # Its products alone, over what the layer has left of its rows.
        for which, weights_of in ((1, lambda t: t.first), (2, lambda t: t.second)):
            rows = [self.rows_for(which, r, baseline.padded[r]) for r in range(self.world.size)]

            def core(rows=rows, weights_of=weights_of):
                for r, t in enumerate(self.layer.tensors):
                    with self.world.on(r):
                        grouped(r, rows[r], weights_of(t), baseline.state[r]["ends"], baseline.state[r]["expert"])

            self.sides[f"core{which}_{name}"] = core
        self.world.synchronize()

    def time(self, seconds):
        """Microseconds of every turn."""
        first = {}
        # What combines wants what dispatches before it.
        self.world.time(self.sides["dispatch"], False)
        for name, side in self.sides.items():
            if name.startswith("combine_g"):
                self.world.time(self.sides[name.replace("combine", "dispatch")], False)
            self.world.time(side, False)
            first[name] = self.world.time(side)
        for baseline in self.baselines.values():
            if baseline.routes.rails is not None:
                baseline.routes.rails.right()  # what was missed while kernels were loaded
        turns = max(3, min(15, round(seconds * 1e6 / sum(first.values()))))
        times = {name: [] for name in self.sides}
        for _ in range(turns):
            names = list(self.sides)
            random.shuffle(names)
            for name in names:
                times[name].append(self.world.time(self.sides[name]))
        return times

    def drop_baselines(self):
        """Their memory, and that of the products alone: what is judged is there."""
        self.sides.clear()
        self.rows.clear()
        for baseline in self.baselines.values():
            baseline.state.clear()

    def judge_transports(self):
        """The worst error of each transport's first half over its bound, and what the slowest rank counted."""
        judged = {}
        for name, layer in self.by.items():
            layer.poison()
            self.world.time(self.sides[name])
            stats = layer.finish(False)
            judged[name] = dict(worst_over_bound=judge_first(layer), **{field: getattr(stats, field) for field, _ in stats._fields_})
        return judged

    def right(self):
        return all(baseline.routes.rails is None or baseline.routes.rails.right() for baseline in self.baselines.values())

    def baselines_differ_by(self):
        """The largest difference of any element of the layer's output between ours and each baseline, over the largest output."""
        found = {}
        for name, baseline in self.baselines.items():
            if f"{name}_layer" not in self.sides:
                continue
            self.world.time(baseline.layer)
            found[name] = max(((t.out.float() - t.baseline_out.float()).abs().max() / t.out.float().abs().max()).nan_to_num(nan=1e30).item()
                              for t in self.layer.tensors)
        return found


def grouped_by_torch(_, a, weights, ends, __):
    return torch._grouped_mm(a, weights.transpose(1, 2), offs=ends.int())


def grouped_by_deepgemm(_, a, weights, __, experts):
    deep_gemm = grouped_gemm_bench.import_deep_gemm()
    c = torch.empty(a.shape[0], weights.shape[1], device=a.device, dtype=a.dtype)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, weights, c, experts)
    return c


def bounds_of(world, layer, us, link_bytes_per_us):
    """Microseconds of each part, and which limit it is."""
    case = layer.case
    gpu = next((rate for name, rate in HBM_BYTES_PER_US.items() if name in torch.cuda.get_device_name()), 4.8e6)
    local, rail = layer.bytes_needed()
    rows, columns = max(layer.rows), case.features * (2 if case.gated else 1)
    core = lambda which: min(value for name, value in us.items() if name.startswith(f"core{which}_"))
    weights = lambda n, k: 2 * layer.here * n * k
    halves = []
    for which, n, k, stored in ((1, columns, case.hidden, case.features), (2, case.hidden, case.features, case.hidden)):
        halves.append(dict(core=core(which), nvlink=local / NVLINK_BYTES_PER_US, network=rail / link_bytes_per_us if world.nodes > 1 else 0.0,
                           hbm=(weights(n, k) + 2 * rows * (k + stored)) / gpu))
    halves.append({name: halves[0][name] + halves[1][name] for name in halves[0]})
    return dict(zip(PARTS, halves))


def row_of(world, sides, times, link_bytes_per_us):
    us = {name: statistics.median(all_times) for name, all_times in times.items()}
    row = dict(case=str(sides.case), **dataclasses.asdict(sides.case), rows=sides.layer.rows, turns=len(times["layer"]),
               us={name: dict(median=round(us[name], 1), min=round(min(all_times), 1), max=round(max(all_times), 1))
                   for name, all_times in times.items()})
    for part, limits in bounds_of(world, sides.layer, us, link_bytes_per_us).items():
        limit = max(limits, key=limits.get)
        baselines = {name: us[f"{name}_{part}"] for name in sides.baselines if f"{name}_{part}" in us}
        row[part] = dict(limits={name: round(value, 1) for name, value in limits.items()}, limit=limit,
                         of_bound=round(limits[limit] / us[part], 4), over_unfused=round(us[f"unfused_{part}"] / us[part], 4))
        if baselines:
            row[part]["speedup"] = {name: round(value / us[part], 4) for name, value in baselines.items()}
            row[part]["speedup_over_the_fastest"] = round(min(baselines.values()) / us[part], 4)
    return row


def measure(world, case, kept, arguments, link_bytes_per_us):
    transports = [one for one in arguments.transports.split(",") if one != "chosen"]
    sides = Sides(world, case, arguments.library, world_bench.streams_of(arguments), transports, arguments.baselines.split(","), kept)
    row = row_of(world, sides, sides.time(arguments.seconds), link_bytes_per_us)
    row["transports"] = sides.judge_transports()
    sides.layer.poison()
    world.time(sides.sides["layer"])
    row["launch"] = {part: {name: getattr(stats, name) for name, _ in stats._fields_}
                     for part, stats in (("dispatch", sides.layer.finish(False)), ("combine", sides.layer.finish(True)))}
    row["by_engines"] = sides.layer.by_engines()
    row["baselines_differ_by"] = sides.baselines_differ_by()
    if not sides.right():
        raise RuntimeError("the baseline missed flags")
    sides.drop_baselines()
    row["worst_over_bound"] = dict(dispatch=judge_first(sides.layer), combine=judge_second(sides.layer),
                                   **{name: one["worst_over_bound"] for name, one in row["transports"].items()})
    return row


def text_of(row):
    us = " ".join(f"{name} {value['median']:.0f}" for name, value in row["us"].items())
    parts = " | ".join(f"{part} {row[part]['of_bound']:.3f} of {row[part]['limit']}, {row[part]['over_unfused']:.2f}x unfused"
                       + (f", {row[part]['speedup_over_the_fastest']:.2f}x" if "speedup" in row[part] else "") for part in PARTS)
    worst = row["worst_over_bound"]
    by = "engines" if row["by_engines"] else "warpgroups"
    return (f"{row['case']} | {by} | {parts} | worst {' '.join(f'{value:.2f}' for value in worst.values())} | differ "
            + " ".join(f"{name} {value:.1e}" for name, value in row["baselines_differ_by"].items()) + f"\n    {us}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    world_bench.add_options(parser, ["deepseek", "skew", "models", "decode", "one"], up_to="tokens of a rank", streams="move data")
    parser.add_argument("--transports", default="chosen", help="chosen, engines, enginesN (N MiB at a time), warpgroups: as many as wanted")
    parser.add_argument("--baselines", default="torch,deepgemm", help="of torch, deepgemm; none: ours alone")
    arguments = parser.parse_args()
    world = World(arguments.library, arguments.nodes, arguments.locals, arguments.link_bandwidth, FUNCTIONS)
    link = world_bench.link_bytes_per_us(arguments)
    cases = (case for which in arguments.set or ["deepseek"] for case in cases_of(which, world.size) if case.tokens <= arguments.up_to)
    world_bench.run(arguments, cases, text_of=text_of, machine=grouped_gemm_bench.machine,
                    measure=lambda case, kept: measure(world, case, kept, arguments, link),
                    right=lambda row: max(row["worst_over_bound"].values()) <= 1)


if __name__ == "__main__":
    main()
