#!/usr/bin/env python3
"""Ring Attention on GPUs against what PyTorch, NCCL and FlashAttention-3 make of it, interleaved in one run.

    ring_bench.py --library libring_abi.so --nodes 1 --locals 2 [--set paper|causal|heads|d64|batch|long]...
                  [--only TEXT] [--up-to ROWS] [--trace] [--streams G,G,...] [--transports chosen,engines,engines4,warpgroups]
                  [--windows PAIRS,PAIRS,...]
                  [--link-bandwidth 50GB/s] [--seconds S] [--json FILE]

One GPU a rank. Needs PyTorch, and FlashAttention-3 (PyPI fa3-fwd). The work of one launch of all ranks is held until
all of it is queued, and a launch takes as long as its slowest rank. The sides:

  fused          Ring Attention; fused_gN: with N warpgroups that share rows (--streams)
  fused_engines, fused_warpgroups   by copy engines or by warpgroups within the node, whatever the planner chooses
                 (--transports); fused_enginesN: of N key heads together
  fused_wN       with a workspace for N pairs of K and V (--windows), by warpgroups
  unfused        its own unfused form
  core_*         a rank's queries over all keys, which are there: ours, fa3, cudnn (without a mask)
  gather         K and V of all ranks to every rank: NCCL's all-gather; under a mask its sends and receives, so that rows
                 lie in order; between two nodes the daemons' paced rails, each shard once, and NCCL within a node
  gather_fa3, gather_cudnn   the one after the other
  ring_fa3_mN    FlashAttention-3 over each shard beside NCCL's sends and receives (or the rails), then one merge in
                 fp32; with N SMs left to the communication

Launches of 96K rows and more take a second and longer. So nothing else warms up there, and of cores, and of what follows a
gather, only the fastest runs three times.

The bound is max(core, network, NVLink): the fastest core, what a rank sends at the rail's rate, and what it gets of its
node at 450 GB/s. Results are judged against float64: every row of some heads up to 12288 keys, above that 512 rows of
each of eight heads, on every rank. Exit status 1 if any is wrong.
"""
import argparse
import ctypes
import dataclasses
import os
import random
import statistics
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# pylint: disable=wrong-import-position
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_bench
import world_bench
from attention_judge import worst_over_bound
from gpu_world import World
from ring_shards import Shards
from ring_world import FUNCTIONS, Partial, Shape, Span, Stats, Tensors

NVLINK_BYTES_PER_US = 450e3
MARGINS = (8, 16, 32)
EVERY_ROW_UP_TO = 12288
HEADS_JUDGED = 8
COMPUTE, WAIT = 0, 5  # Role and SpanKind
SHOWN = 16
LONG_FLOPS = 5e14
BACKENDS = ("fa3", "cudnn")


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch's shape: `seq` rows over all ranks, bf16."""

    batch: int
    query_heads: int
    key_heads: int
    dim: int
    seq: int
    causal: bool

    def __str__(self):
        return (f"B{self.batch} heads {self.query_heads}:{self.key_heads} d{self.dim} S{self.seq // 1024}K "
                f"{'causal' if self.causal else 'no mask'}")


def cases_of(which):
    k = 1024
    lengths = (6 * k, 12 * k, 24 * k, 48 * k)
    if which in ("paper", "causal"):
        return [Case(16, 16, 16, 128, s, which == "causal") for s in lengths]
    if which == "heads":
        return [Case(1, hq, hk, 128, s, causal) for hq, hk in ((64, 64), (64, 8), (32, 8)) for s in lengths[1:3]
                for causal in (False, True)]
    if which == "d64":
        return [Case(16, 16, 16, 64, s, causal) for s in lengths[1:3] for causal in (False, True)]
    if which == "batch":
        return [Case(4, 32, 8, 128, s, causal) for s in lengths[1:3] for causal in (False, True)]
    return [Case(16, 16, 16, 128, s, False) for s in (96 * k, 192 * k)]


class Ranks:
    """The tensors of all ranks, and the sides that compute them."""

    def __init__(self, world, case, streams, transports, windows, kept):
        self.world, self.case, self.kept = world, case, kept
        size = world.size
        self.rows = case.seq // size
        if case.seq % (size * (2 if case.causal else 1)):
            raise RuntimeError("sequences divide evenly here")
        normal = lambda r, heads: torch.randn(case.batch, self.rows, heads, case.dim, device=f"cuda:{r}", dtype=torch.bfloat16)
        ranks = range(size)
        self.q = [normal(r, case.query_heads) for r in ranks]
        self.k, self.v = ([normal(r, case.key_heads) for r in ranks] for _ in range(2))
        self.o = [torch.empty_like(q) for q in self.q]
        self.lse = [torch.empty(case.batch, case.query_heads, self.rows, device=f"cuda:{r}") for r in ranks]
        self.other_o = [torch.empty_like(q) for q in self.q]
        self.rings = {f"fused_g{g}" if g else "fused": self.make_ring(g) for g in streams}
        for name in transports:
            transport = 2 if name == "warpgroups" else 1
            together = int(name.removeprefix("engines") or 0) if transport == 1 else 0
            self.rings[f"fused_{name}"] = self.make_ring(0, transport, together)
        for pairs in windows:
            self.rings[f"fused_w{pairs}"] = self.make_ring(0, 2, 0, pairs)
        self.ring = next(iter(self.rings.values()))
        self.shards = Shards(world, case, self.k, self.v, kept)
        self.part, self.parts_each, self.positions = self.shards.part, self.shards.parts_each, self.shards.positions
        self.all_k, self.all_v = self.shards.all_k, self.shards.all_v
        for r in ranks:
            torch.cuda.synchronize(r)
        pairs = self.rows * case.seq * (0.5 if case.causal else 1)
        self.flops = 4.0 * case.batch * pairs * case.dim * case.query_heads  # of a rank
        self.plans = self.make_plans()
        self.sides, self.first = {}, {}
        self.add_sides()

    # What each rank has.

    def make_ring(self, groups, transport=0, together=0, window=0):
        case = self.case
        shape = Shape(0, case.batch, case.query_heads, case.key_heads, case.dim, int(case.causal), case.seq, groups, transport,
                      together, window)
        ring = self.world.c.mk_ring_create(self.world.handle, ctypes.byref(shape))
        self.world.require(not ring)
        self.kept.callback(self.world.c.mk_ring_destroy, ring)
        return ring

    def make_plans(self):
        """Our core alone: each rank's parts over the keys that they see."""
        core = attention_bench.Library(self.world.c._name)  # noqa: SLF001
        case, plans = self.case, []
        for r in range(self.world.size):
            with torch.cuda.device(r):
                for first, row in self.positions(r):
                    keys = first + self.part if case.causal else case.seq
                    q, o = (t[r][:, row:row + self.part] for t in (self.q, self.other_o))
                    problem = attention_bench.Problem(0, case.dim, case.batch, case.query_heads, case.key_heads, self.part,
                                                      keys, int(case.causal), 0.0, 0, 0, q.data_ptr(), self.all_k[r].data_ptr(),
                                                      self.all_v[r].data_ptr(), o.data_ptr(), None)
                    for at, tensor in enumerate((q, self.all_k[r], self.all_v[r], o)):
                        problem.strides[at] = (ctypes.c_int64 * 3)(*tensor.stride()[:3])
                    plans.append((r, core, core.plan(problem)))
                    self.kept.callback(core.c.mk_attention_destroy, plans[-1][2])
        return plans

    # The sides.

    def launch(self, ring, unfused=False):
        all_tensors = (Tensors * self.world.size)()
        for r in range(self.world.size):
            tensors = (self.q[r], self.k[r], self.v[r], self.o[r])
            all_tensors[r] = Tensors(*(t.data_ptr() for t in tensors), self.lse[r].data_ptr())
            for row, tensor in enumerate(tensors):
                all_tensors[r].strides[row] = (ctypes.c_int64 * 3)(*tensor.stride()[:3])
            batch, head, row = self.lse[r].stride()
            all_tensors[r].strides[4] = (ctypes.c_int64 * 3)(batch, row, head)
        self.world.require(self.world.c.mk_ring_launch(ring, all_tensors, int(unfused)))

    def core_ours(self):
        for r, core, plan in self.plans:
            with torch.cuda.stream(self.world.streams[r]):
                core.launch(plan)

    def core_fa3(self):
        for r in range(self.world.size):
            with torch.cuda.stream(self.world.streams[r]):
                for first, row in self.positions(r):
                    keys = first + self.part if self.case.causal else self.case.seq
                    rows = slice(row, row + self.part)
                    flash_attention(self.q[r][:, rows], self.all_k[r][:, :keys], self.all_v[r][:, :keys],
                                    self.other_o[r][:, rows], self.case.causal, 0)

    def core_cudnn(self):
        for r in range(self.world.size):
            with torch.cuda.stream(self.world.streams[r]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                q, k, v = (t[r].transpose(1, 2) for t in (self.q, self.all_k, self.all_v))
                F.scaled_dot_product_attention(q, k, v, is_causal=self.case.causal,
                                               enable_gqa=self.case.query_heads != self.case.key_heads)

    def both(self, second):
        self.shards.gather()
        second()

    def load_kernels(self, outputs):
        """CUDA loads a kernel at its first launch, and may wait for an idle GPU to do so: not beside one that waits for
        a daemon."""
        for r in range(self.world.size):
            with torch.cuda.stream(self.world.streams[r]):
                self.merge(r, [(0, outputs[r][0], flash_attention(self.q[r], *self.shards.came[r][0], outputs[r][0], False, 8))])
            torch.cuda.synchronize(r)

    def merge(self, r, partials):
        array = (Partial * len(partials))(*(Partial(o.data_ptr(), lse.data_ptr(), first, o.shape[1])
                                            for first, o, lse in partials))
        self.world.c.mk_ring_merge(self.world.handle, r, self.other_o[r].data_ptr(), self.case.batch, self.rows,
                                   self.case.query_heads, self.case.dim, array, len(partials),
                                   self.world.streams[r].cuda_stream)

    def ring_fa3(self, outputs, margin):
        arrived = self.shards.pass_round()
        for r in range(self.world.size):
            with torch.cuda.stream(self.world.streams[r]):
                partials = [(0, outputs[r][0], flash_attention(self.q[r], self.k[r], self.v[r], outputs[r][0],
                                                               self.case.causal, margin))]
                for step, origin in enumerate(self.shards.origins(r)):
                    self.world.streams[r].wait_event(arrived[step][r])
                    k, v = self.shards.came[r][step]
                    first = 0
                    if self.parts_each == 2 and origin < r:
                        k, v = k[:, :self.part], v[:, :self.part]
                    elif self.parts_each == 2:
                        first = self.part
                    out = outputs[r][step + 1]
                    if first:
                        out = out.view(-1)[:out.numel() // 2].view(self.case.batch, self.part, *out.shape[2:])
                    partials.append((first, out, flash_attention(self.q[r][:, first:], k, v, out, False, margin)))
                self.merge(r, partials)
                self.world.streams[r].wait_stream(self.world.side_streams[r])

    def add_sides(self):
        for name, ring in self.rings.items():
            self.sides[name] = lambda ring=ring: self.launch(ring)
        self.sides["core_ours"] = self.core_ours
        self.try_side("core_fa3", self.core_fa3)
        if not self.case.causal:
            self.try_side("core_cudnn", self.core_cudnn)
        if self.world.size == 1:
            return
        self.sides["unfused"] = lambda: self.launch(self.ring, True)
        self.sides["gather"] = self.shards.gather
        for name in BACKENDS:
            if f"core_{name}" in self.sides:
                core = self.sides[f"core_{name}"]
                self.sides[f"gather_{name}"] = lambda core=core: self.both(core)
        if "core_fa3" in self.sides:
            outputs = [[torch.empty_like(self.q[r]) for _ in range(self.world.size)] for r in range(self.world.size)]
            self.load_kernels(outputs)
            for margin in MARGINS:
                self.try_side(f"ring_fa3_m{margin}", lambda margin=margin: self.ring_fa3(outputs, margin))

    def try_side(self, name, side):
        try:
            self.first[name] = self.world.time(side, False)
            self.sides[name] = side
        except Exception as error:  # noqa: BLE001 - whatever a peer may say
            print(f"{name}: {str(error)[:300]}", file=sys.stderr)

    def first_us(self, name):
        """Microseconds of a launch that follows another one of the side; of its first one where that takes long."""
        if self.flops > LONG_FLOPS:
            return self.first.get(name) or self.world.time(self.sides[name], False)
        self.world.time(self.sides[name], False)
        return self.world.time(self.sides[name])

    def time(self, seconds):
        """Microseconds of every turn. Of the ring's margins only the fastest goes on."""
        first = {name: self.first_us(name) for name in self.sides}
        if self.world.nodes > 1:
            self.shards.rails.right()  # what was missed while kernels were loaded
        rivals = [[name for name in first if name.startswith("ring_fa3")]]
        if self.flops > LONG_FLOPS:
            rivals += [[f"{kind}_{name}" for name in BACKENDS if f"{kind}_{name}" in first] for kind in ("core", "gather")]
        for slower in (name for some in rivals for name in sorted(some, key=first.get)[1:]):
            del self.sides[slower]
        turns = max(3, min(11, round(seconds * 1e6 / sum(first[name] for name in self.sides))))
        times = {name: [] for name in self.sides}
        for _ in range(turns):
            names = list(self.sides)
            random.shuffle(names)
            for name in names:
                times[name].append(self.world.time(self.sides[name]))
        return times

    # What came of it.

    def keys(self, tensors, rank, batch, head):
        """A head's rows of the sequence, on the rank's GPU, from where their ranks have them."""
        whole = torch.empty(self.case.seq, self.case.dim, device=f"cuda:{rank}", dtype=torch.bfloat16)
        for origin in range(self.world.size):
            for first, row in self.positions(origin):
                whole[first:first + self.part] = tensors[origin][batch, row:row + self.part, head].to(whole.device)
        return whole

    def transport(self):
        """The planner's choice within the node. 0: warpgroups; else engines, with so many heads together."""
        together = ctypes.c_uint32()
        return together.value if self.world.c.mk_ring_engines(self.ring, ctypes.byref(together)) else 0

    def judge(self):
        """The worst |error| of the fused form, however its keys come, over its bound; its counters."""
        judged = [self.judge_side(name, ring) for name, ring in self.rings.items() if not name.startswith("fused_g")]
        return max(worst for worst, _ in judged), judged[0][1]

    def judge_side(self, name, ring):
        case, world = self.case, self.world
        for r in range(world.size):
            self.o[r].fill_(float("nan"))
            self.lse[r].fill_(float("nan"))
            torch.cuda.synchronize(r)
        world.time(self.sides[name])
        stats = (Stats * world.size)()
        world.require(world.c.mk_ring_finish(ring, stats))
        key_tiles = case.seq / world.c.mk_ring_tile_keys(self.ring) + 2 * world.size + 2
        worst = 0.0
        for r in range(world.size):
            device = f"cuda:{r}"
            places = torch.cat([torch.arange(first, first + self.part, device=device) for first, _ in self.positions(r)])
            for _ in range(HEADS_JUDGED):
                b, h = random.randrange(case.batch), random.randrange(case.query_heads)
                rows = torch.arange(self.rows, device=device)
                if case.seq > EVERY_ROW_UP_TO:
                    rows = torch.randperm(self.rows, device=device)[:512].sort().values
                k, v = (self.keys(t, r, b, h // (case.query_heads // case.key_heads)) for t in (self.k, self.v))
                worst = max(worst, worst_over_bound(self.q[r][b, rows, h], k, v, self.o[r][b, rows, h], self.lse[r][b, h, rows],
                                                    places[rows], case.causal, key_tiles, True))
        return worst, stats

    def trace(self):
        """Of each rank: when its SMs took up an item, waited for keys, and were done, in microseconds from the rank's
        first span on; of every `SHOWN`-th SM by itself."""
        world, found = self.world, []
        world.c.mk_ring_set_trace(self.ring, 1)
        for _ in range(2):
            world.time(self.sides["fused"])
            stats = (Stats * world.size)()
            world.require(world.c.mk_ring_finish(self.ring, stats))
        for r in range(world.size):
            spans = (Span * (1 << 20))()
            count = min(world.c.mk_ring_trace(self.ring, r, spans, len(spans)), len(spans))
            found.append(trace_of(spans[:count]))
        world.c.mk_ring_set_trace(self.ring, 0)
        return found

    def baseline_difference(self):
        """The largest difference of any element between the fused form and each baseline."""
        found = {}
        for name, side in self.sides.items():
            if not name.startswith(("gather_fa3", "ring_fa3")):
                continue
            for o in self.other_o:
                o.fill_(float("nan"))
                torch.cuda.synchronize(o.device)
            self.world.time(side)
            found[name] = max((one.float() - other.float()).abs().max().nan_to_num(nan=1e30).item()  # fp32 of all may not fit
                              for all_one, all_other in zip(self.o, self.other_o) for one, other in zip(all_one, all_other))
        return found


def flash_attention(q, k, v, out, causal, margin):
    """FlashAttention-3 into `out`; the log-sum-exp, [batch, heads, rows]."""
    none = [None] * 10
    result = torch.ops.fa3_fwd.fwd(q, k, v, None, None, None, out, *none, None, None, None, None, None, None,
                                   q.shape[-1] ** -0.5, causal, -1, -1, 0, 0.0, True, None, 1, None, margin)
    return result[1]


def trace_of(spans):
    """A rank's spans as JSON."""
    compute = [span for span in spans if span.role == COMPUTE]
    begin = min(span.begin_ns for span in compute)
    at = lambda ns: round((ns - begin) / 1e3, 1)
    blocks = sorted({span.block for span in compute})
    waits = {block: [at(span.end_ns) - at(span.begin_ns) for span in compute if span.block == block and span.kind == WAIT]
             for block in blocks}
    ends = {block: at(max(span.end_ns for span in compute if span.block == block)) for block in blocks}
    shown = {}
    for block in blocks[::SHOWN]:
        shown[block] = joined = []
        for span in (one for one in compute if one.block == block):
            kind, one = ("wait" if span.kind == WAIT else "item"), [at(span.begin_ns), at(span.end_ns)]
            if one[0] == one[1]:
                continue
            # An item's keys of the next rank.
            if joined and kind == "item" == joined[-1][0] and joined[-1][1] == span.index and joined[-1][3] == one[0]:
                joined[-1][3] = one[1]
            else:
                joined.append([kind, span.index, *one])
    arrivals = [[span.rank, span.index, at(span.begin_ns)] for span in spans if span.role != COMPUTE]
    return dict(sms=len(blocks), wait_us_per_sm=round(statistics.mean(sum(of) for of in waits.values()), 1),
                wait_us_max=round(max(sum(of) for of in waits.values()), 1),
                waits_per_sm=round(statistics.mean(len(of) for of in waits.values()), 2),
                end_us=max(ends.values()), tail_us_per_sm=round(max(ends.values()) - statistics.mean(ends.values()), 1),
                shown=shown, arrivals=arrivals[::max(1, len(arrivals) // 200)])


def row_of(world, ranks, times, link_bytes_per_us):
    case = ranks.case
    us = {name: statistics.median(all_times) for name, all_times in times.items()}
    core = min(value for name, value in us.items() if name.startswith("core_"))
    network = ranks.shards.kv_bytes / link_bytes_per_us if world.nodes > 1 else 0
    nvlink = ranks.shards.kv_bytes * (world.locals - 1) * world.nodes / NVLINK_BYTES_PER_US
    bound = max(core, network, nvlink)
    baselines = {name: value for name, value in us.items() if name.startswith(("gather_", "ring_"))}
    row = dict(case=str(case), **dataclasses.asdict(case), turns=len(times["fused"]),
               us={name: dict(median=round(us[name], 1), min=round(min(all_times), 1), max=round(max(all_times), 1))
                   for name, all_times in times.items()},
               tflops_per_rank=round(ranks.flops / us["fused"] / 1e6, 1), core_us=round(core, 1),
               network_us=round(network, 1), nvlink_us=round(nvlink, 1), of_bound=round(bound / us["fused"], 4))
    if baselines:
        row["speedup"] = {name: round(value / us["fused"], 4) for name, value in baselines.items()}
        row["speedup_over_the_fastest"] = round(min(baselines.values()) / us["fused"], 4)
    return row


def measure(world, case, kept, streams, transports, windows, seconds, link_bytes_per_us, traced):
    ranks = Ranks(world, case, streams, transports, windows, kept)
    times = ranks.time(seconds)
    row = row_of(world, ranks, times, link_bytes_per_us)
    worst, stats = ranks.judge()
    compute, others = ctypes.c_uint32(), ctypes.c_uint32()
    world.c.mk_ring_blocks(ranks.ring, ctypes.byref(compute), ctypes.byref(others))
    slowest = max(stats, key=lambda one: one.total_ns)
    row.update(worst_over_bound=worst, heads_by_engines=ranks.transport(), compute_sms=compute.value, other_sms=others.value,
               launch=dict(total_us=slowest.total_ns / 1e3, compute_end_us=slowest.compute_end_ns / 1e3,
                           share_end_us=slowest.share_end_ns / 1e3, waits=slowest.waits,
                           wait_us_per_sm=slowest.wait_ns / 1e3 / compute.value))
    if traced:
        row["trace"] = ranks.trace()
    if world.size > 1:
        row["baselines_differ_by"] = ranks.baseline_difference()
        if world.nodes > 1 and not ranks.shards.rails.right():
            raise RuntimeError("the baseline missed flags")
    return row


def text_of(row):
    us = {name: value["median"] for name, value in row["us"].items()}
    sides = " ".join(f"{name} {value:.0f}" for name, value in us.items())
    gain = f" | {row['speedup_over_the_fastest']:.2f}x" if "speedup" in row else ""
    differ = " ".join(f"{name} {value:.1e}" for name, value in row.get("baselines_differ_by", {}).items())
    by = f"engines{row['heads_by_engines']}" if row["heads_by_engines"] else "warpgroups"
    return (f"{row['case']:38} | {by} | {sides} | {row['tflops_per_rank']:.0f} TF, {row['of_bound']:.3f} of bound{gain} | worst "
            f"{row['worst_over_bound']:.2f} | wait {row['launch']['wait_us_per_sm']:.0f} us/SM, share end "
            f"{row['launch']['share_end_us']:.0f} | differ {differ}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    world_bench.add_options(parser, ["paper", "causal", "heads", "d64", "batch", "long"], up_to="rows of the sequence", streams="share rows")
    parser.add_argument("--transports", default="chosen", help="chosen, engines, enginesN (N heads together), warpgroups: as many as wanted")
    parser.add_argument("--windows", default="", help="pairs of K and V that the workspace has room for: as many as wanted")
    parser.add_argument("--trace", action="store_true", help="into the JSON: when SMs compute and wait")
    arguments = parser.parse_args()
    world = World(arguments.library, arguments.nodes, arguments.locals, arguments.link_bandwidth, FUNCTIONS)
    import fa3_fwd._C  # noqa: F401, PLC0415 - it wants CUDA, which the world must see first

    streams, link = world_bench.streams_of(arguments), world_bench.link_bytes_per_us(arguments)
    transports = [one for one in arguments.transports.split(",") if one != "chosen"]
    windows = [int(one) for one in arguments.windows.split(",") if one]
    cases = (case for which in arguments.set or ["paper"] for case in cases_of(which) if case.seq <= arguments.up_to)
    world_bench.run(arguments, cases, text_of=text_of, machine=attention_bench.machine,
                    measure=lambda case, kept: measure(world, case, kept, streams, transports, windows, arguments.seconds,
                                                       link, arguments.trace),
                    right=lambda row: row["worst_over_bound"] <= 1)


if __name__ == "__main__":
    main()
