#!/usr/bin/env python3
"""NCCL's all-gather and reduce-scatter, as torch.distributed calls them, in the shapes of `mkbench all-gather` and `reduce-scatter`.

    collectives_baseline.py [--devices N] [--shape MxN]... [--dtype bf16|f16|f32] [--launches L] [--lead L] [--json FILE]

A rank on each GPU. M are the rows of the whole, N the elements of a row. Before each timed launch come --lead others of the same
shape, as mkbench has them. A launch takes as long as its slowest rank, by events on the GPUs. Every element is judged: rows
bit by bit, sums against float64, within what rounding each addition allows. Exit status 1 if any is wrong.
With --backend gloo ranks are processes of the CPU, and clocks are the host's: that tests this program.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

# pylint: disable=wrong-import-position
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ROUNDINGS = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}


def drawn(seed, rank, rows, columns, dtype):
    """Within +-1; the same for the same numbers, on any rank."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    return (2 * torch.rand(rows, columns, generator=generator) - 1).to(DTYPES[dtype])


class Collective:
    """One rank's, of m rows in all."""

    def __init__(self, name, m, n, options, rank, device):
        self.name, self.m, self.n, self.options, self.rank, self.device = name, m, n, options, rank, device
        self.share = m // options.devices
        self.gathers = name == "all-gather"
        self.input = torch.empty(0)
        self.output = torch.empty(m if self.gathers else self.share, n, dtype=DTYPES[options.dtype], device=device)

    def part(self, seed, rank):
        return drawn(seed, rank, self.share if self.gathers else self.m, self.n, self.options.dtype)

    def fill(self, seed):
        self.input = self.part(seed, self.rank).to(self.device)
        self.output.fill_(float("nan"))

    def launch(self):
        if self.gathers:
            dist.all_gather_into_tensor(self.output, self.input)
        else:
            dist.reduce_scatter_tensor(self.output, self.input)

    def wrong(self, seed):
        """Elements of the output that are."""
        output = self.output.cpu()
        world = self.options.devices
        if self.gathers:
            return (output != torch.cat([self.part(seed, rank) for rank in range(world)])).sum().item()
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        parts = torch.stack([self.part(seed, rank)[mine].double() for rank in range(world)])
        allowed = 1.02 * (world - 1) * ROUNDINGS[self.options.dtype] * parts.abs().sum(0) + 2.0**-24
        # Not >: what is NaN is wrong.
        return (~((output.double() - parts.sum(0)).abs() <= allowed)).sum().item()

    def time_us(self):
        """The slowest rank's."""
        dist.barrier()
        for _ in range(self.options.lead):
            self.launch()
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.launch()
            end.record()
            torch.cuda.synchronize()
            mine = begin.elapsed_time(end) * 1e3
        else:
            begin = time.perf_counter()
            self.launch()
            mine = (time.perf_counter() - begin) * 1e6
        slowest = torch.tensor([mine], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def total(count, device):
    of_all = torch.tensor([count], device=device)
    dist.all_reduce(of_all)
    return int(of_all.item())


def rank_main(rank, options, meeting, rows_path):
    device = torch.device("cpu")
    if options.backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(options.backend, init_method=f"file://{meeting}", rank=rank, world_size=options.devices)
    rows = []
    for m, n in options.shape:
        for name in ("all-gather", "reduce-scatter"):
            one = Collective(name, m, n, options, rank, device)
            one.fill(1)
            one.launch()
            if options.spoil and rank == 0:
                one.output[0, 0] += 1
            wrong = total(one.wrong(1), device)
            times = [one.time_us() for _ in range(options.launches)]
            rows.append({"op": name, "m": m, "n": n, "dtype": options.dtype, "ranks": options.devices, "wrong": wrong,
                         "median_us": statistics.median(times), "least_us": min(times), "most_us": max(times)})
            if rank == 0:
                print(f"{options.backend} {name} {m}x{n} {options.dtype} on {options.devices}: {rows[-1]['median_us']:.1f} us"
                      f" ({min(times):.1f} to {max(times):.1f}) | {wrong} wrong", flush=True)
    if rank == 0:
        with open(rows_path, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()


def shape_of(text):
    m, n = (int(part) for part in text.split("x"))
    return m, n


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="ranks; 0: as many as there are GPUs")
    parser.add_argument("--shape", type=shape_of, action="append", metavar="MxN")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--launches", type=int, default=21)
    parser.add_argument("--lead", type=int, default=20)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--json")
    parser.add_argument("--spoil", action="store_true", help="one element of rank 0's output, for tests")
    options = parser.parse_args(arguments)
    options.shape = options.shape or [(16384, 8192)]
    options.devices = options.devices or torch.cuda.device_count()
    if options.devices < 1:
        parser.error("there is no GPU; --backend gloo --devices N tries this out without")
    for m, n in options.shape:
        if m % options.devices != 0:
            parser.error(f"{m}x{n}: {options.devices} ranks do not divide {m} rows, and these calls want equal shares")
    with tempfile.TemporaryDirectory() as folder:
        rows_path = os.path.join(folder, "rows.json")
        mp.spawn(rank_main, args=(options, os.path.join(folder, "meeting"), rows_path), nprocs=options.devices)
        with open(rows_path, encoding="utf-8") as file:
            rows = json.load(file)
    if options.json:
        gpu = options.backend == "nccl"
        machine = {"torch": torch.__version__, "backend": options.backend,
                   "device": torch.cuda.get_device_name(0) if gpu else "cpu",
                   "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "launches": options.launches, "lead": options.lead, "rows": rows}, file, indent=1)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
