#!/usr/bin/env python3
"""Attention against FlashAttention-3 and cuDNN on one GPU, interleaved in one run.

    attention_bench.py --library libattention_abi.so [--set goals|f16|batch]... [--only TEXT]
                       [--turns N] [--json FILE]

Needs PyTorch, and FlashAttention-3 (PyPI fa3-fwd) where it is to be compared. Every case has fresh random
inputs. Our result is judged against float64: every element up to 4096 keys, above that 512 rows of each
of four heads. Exit status 1 if any element is wrong.

A turn of one side is as many launches as take about 3 ms, timed together behind a kernel that holds the
stream until all are queued, so that no side's host code is timed. TFLOPS count half of the products
under a causal mask.
"""
import argparse
import ctypes
import json
import math
import random
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_judge import worst_over_bound

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


class Problem(ctypes.Structure):
    """MkAttentionProblem of attention_abi.h."""

    _fields_ = (
        [(name, ctypes.c_int) for name in
         ("dtype", "head_dim", "batch", "query_heads", "key_heads", "queries", "keys", "causal")]
        + [("scale", ctypes.c_float), ("blocks_max", ctypes.c_int), ("section", ctypes.c_int)]
        + [(name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")]
        + [("strides", ctypes.c_int64 * 3 * 5)]
    )


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.mk_attention_create.restype = ctypes.c_void_p
        self.c.mk_attention_create.argtypes = [ctypes.POINTER(Problem)]
        self.c.mk_attention_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.c.mk_attention_destroy.argtypes = [ctypes.c_void_p]
        self.c.mk_attention_tile_keys.argtypes = [ctypes.c_void_p]
        self.c.mk_attention_error.restype = ctypes.c_char_p

    def plan(self, problem):
        plan = self.c.mk_attention_create(ctypes.byref(problem))
        if not plan:
            raise RuntimeError(self.c.mk_attention_error().decode())
        return plan

    def launch(self, plan):
        if self.c.mk_attention_launch(plan, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(self.c.mk_attention_error().decode())


def cases_of(which):
    """(batch, query heads, key heads, head dimension, rows, causal, type)"""
    lengths = (2048, 4096, 8192, 16384, 32768)
    if which == "goals":
        return [(1, hq, hk, d, s, causal, "bf16")
                for hq, hk, d in ((32, 32, 128), (64, 8, 128), (32, 32, 64), (64, 8, 64))
                for s in lengths for causal in (False, True)]
    if which == "f16":
        return [(1, 32, 8, d, s, causal, "f16") for d in (64, 128) for s in (4096, 16384) for causal in (False, True)]
    return [(b, 16, 16, d, s, causal, "bf16") for b, s in ((16, 1536), (16, 3072), (4, 6144), (8, 1000), (2, 12288))
            for d in (64, 128) for causal in (False, True)]


class Run:
    """The tensors of a case, and the sides that compute it."""

    def __init__(self, library, case, peers):
        self.library = library
        self.case = case
        batch, hq, hk, d, s, causal, dtype = case
        normal = lambda heads: torch.randn(batch, s, heads, d, device=DEVICE, dtype=DTYPES[dtype])
        self.q, self.k, self.v = normal(hq), normal(hk), normal(hk)
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(batch, hq, s, device=DEVICE)
        self.flops = 4.0 * batch * s * s * d * hq * (0.5 if causal else 1)
        problem = Problem(list(DTYPES).index(dtype), d, batch, hq, hk, s, s, int(causal), 0.0, 0, 0, self.q.data_ptr(),
                          self.k.data_ptr(), self.v.data_ptr(), self.o.data_ptr(), self.lse.data_ptr())
        for row, tensor in enumerate((self.q, self.k, self.v, self.o)):
            problem.strides[row] = (ctypes.c_int64 * 3)(*tensor.stride()[:3])
        problem.strides[4] = (ctypes.c_int64 * 3)(hq * s, 1, s)
        self.plan = library.plan(problem)
        self.sides = {"ours": lambda: library.launch(self.plan)}
        if peers:
            self.add_cudnn()
            self.add_flash_attention()

    def close(self):
        self.library.c.mk_attention_destroy(self.plan)

    def try_side(self, name, side):
        try:
            side()
            torch.cuda.synchronize()
            self.sides[name] = side
        except Exception as error:  # noqa: BLE001 - whatever a peer may say
            print(f"{name}: {str(error)[:200]}", file=sys.stderr)

    def add_cudnn(self):
        _, hq, hk, _, _, causal, _ = self.case
        q, k, v = (t.transpose(1, 2) for t in (self.q, self.k, self.v))

        def side():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hk)

        self.try_side("cudnn", side)

    def add_flash_attention(self):
        try:
            from fa3_fwd_interface import flash_attn_func
        except ImportError as error:
            print(f"FlashAttention-3: {error}", file=sys.stderr)
            return
        self.try_side("fa3", lambda: flash_attn_func(self.q, self.k, self.v, causal=self.case[5]))

    def time(self, turns):
        """Microseconds a launch, of every turn."""
        launches = max(1, min(32, round(3e-3 / (self.flops / 6e14))))
        times = {name: [] for name in self.sides}
        warm_up = 2
        for turn in range(turns + warm_up):
            names = list(self.sides)
            random.shuffle(names)
            for name in names:
                begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
                torch.cuda._sleep(300_000 + 200_000 * launches)
                begin.record()
                for _ in range(launches):
                    self.sides[name]()
                end.record()
                torch.cuda.synchronize()
                if turn >= warm_up:
                    times[name].append(begin.elapsed_time(end) * 1e3 / launches)
        return times

    def judge(self):
        """The worst |error| over its bound."""
        batch, hq, hk, d, s, causal, dtype = self.case
        self.o.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.sides["ours"]()
        torch.cuda.synchronize()
        key_tiles = s / self.library.c.mk_attention_tile_keys(self.plan) + 2
        if s <= 4096:
            heads, rows = [(b, h) for b in range(batch) for h in range(hq)], torch.arange(s, device=DEVICE)
            if len(heads) > 64:
                heads = random.sample(heads, 64)
        else:
            heads = [(random.randrange(batch), random.randrange(hq)) for _ in range(4)]
            rows = torch.randperm(s, device=DEVICE)[:512].sort().values
        worst = 0.0
        for b, h in heads:
            k, v = (t[b, :, h // (hq // hk)] for t in (self.k, self.v))
            worst = max(worst, worst_over_bound(self.q[b, rows, h], k, v, self.o[b, rows, h], self.lse[b, h, rows], rows,
                                                causal, key_tiles, dtype == "bf16"))
        return worst


def machine():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True, check=False).stdout.strip().split("\n")[0]
    return dict(gpu=torch.cuda.get_device_name(), driver=driver, torch=torch.__version__, cuda=torch.version.cuda,
                cudnn=torch.backends.cudnn.version())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--set", action="append", default=[], choices=["goals", "f16", "batch"])
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-judge", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    rows, wrong = [], 0
    for which in arguments.set or ["goals"]:
        for case in cases_of(which):
            batch, hq, hk, d, s, causal, dtype = case
            text = f"B{batch} heads {hq}:{hk} d{d} S{s} {'causal' if causal else 'no mask'} {dtype}"
            if arguments.only not in text:
                continue
            run = Run(library, case, not arguments.no_peers)
            worst = None if arguments.no_judge else run.judge()
            wrong += worst is not None and not worst <= 1
            times = run.time(arguments.turns)
            run.close()
            us = {name: statistics.median(all_times) for name, all_times in times.items()}
            tflops = {name: round(run.flops / t / 1e6, 1) for name, t in us.items()}
            peers = [t for name, t in us.items() if name != "ours"]
            share = round(min(peers) / us["ours"], 4) if peers else None
            print(f"{text:44} | " + " ".join(f"{name} {value:.0f}" for name, value in tflops.items())
                  + (f" | {share:.3f} of the faster" if share else "") + (f" | worst {worst:.2f}" if worst is not None else ""),
                  flush=True)
            rows.append(dict(set=which, case=text, us={name: round(t, 2) for name, t in us.items()}, tflops=tflops,
                             of_the_faster_peer=share, worst_over_bound=worst))
            del run
            torch.cuda.empty_cache()
    print(f"{wrong} cases wrong")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(dict(command=" ".join(sys.argv), machine=machine(), turns=arguments.turns, cases=rows), file, indent=1)
            file.write("\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
