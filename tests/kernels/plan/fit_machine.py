#!/usr/bin/env python3
"""Fits the numbers of kernels/plan/machines/h100.json or h200.json to the recorded runs of that GPU.

    gather_runs.py RESULTS runs.csv;  fit_machine.py runs.csv FOLDER H200

The model is that of kernels/plan/model.cc, over all runs at once. It begins with the file's numbers and stays near them
where runs say little. Half of the shapes are held out (held_out() of recorded_runs.cc has the same chess board);
recorded_runs_test.cc judges the files on those. Runs of earlier kernels count only by the differences between the
candidates of a shape. Needs requirements.txt.
"""
import csv
import json
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

SMS = 132
GB = 1e3  # bytes in a us at 1 GB/s

# Field of machine.h: first guess, least, most. The bounds are what was measured otherwise (kernels/cuda/decisions).
FIELDS = {
    "step_us_256": (0.58, 0.5, 0.75), "step_us_128": (0.31, 0.27, 0.5), "step_us_64": (0.27, 0.2, 0.34),
    "step_us_64_rows": (0.27, 0.2, 0.5),
    "tile_us_256": (4, 1, 15), "tile_us_128": (2, 0.5, 12), "power_slowdown": (0.25, 0, 0.6),
    "power_after_us": (1.5e3, 200, 1e4), "whole_waves_share": (0.9, 0.5, 1), "link_gb_s": (360, 200, 420),
    "link_sharpness": (4, 1, 12), "rows_link_gb_s": (320, 200, 450), "crowding": (0.05, 0, 0.3), "copy_gb_s": (13, 4, 30),
    "pass_on_gb_s": (10, 3, 30), "chunk_flag_us": (0.05, 0, 1), "last_part_share": (0.7, 0, 2),
    "many_parts_share": (0.2, 0, 1), "copy_beside_share": (0.03, 0, 0.5), "engine_gb_s": (320, 240, 400),
    "engine_copy_us": (6, 1, 30), "hbm_gb_s": (2500, 800, 3500), "sum_gb_s": (10, 2, 40), "sum_out_gb_s": (4.1, 1, 20),
    "sums_link_gb_s": (250, 100, 450), "sum_sent_gb_s": (8, 2, 40), "sum_sent_ar_gb_s": (8, 2, 40),
    "sum_come_gb_s": (4, 1, 20), "store_beside_share": (0.05, 0, 1), "last_wave_share": (0.5, 0, 1.5),
    "own_share": (0.05, 0, 1), "network_gb_s": (50, 40, 55), "network_latency_us": (30, 5, 80),
    "network_fill_chunks": (1, 0.9, 2), "network_command_us": (0.15, 0.12, 1), "network_fill_tiles": (0.2, 0, 3),
    "copy_for_network_us": (5, 0, 30), "arrival_tiles": (1, 1, 3),
    "unfused_sum_share": (0.5, 0, 4), "power_slowdown_128": (0.02, 0, 0.3), "l2_mb": (40, 5, 200),
    "weights_overlap": (2, 2, 12),
    "l2_share_128": (0.1, 0, 0.5),
}
for op in ("ag", "rs", "ar"):
    FIELDS.update({f"launch_us_{op}": (18, 12, 40), f"overlap_{op}": (6, 1.5, 14), f"unfused_us_{op}": (25, 5, 80),
                   f"unfused_link_{op}": (1.2, 0.5, 4), f"unfused_network_{op}": (1, 0.9, 1.6)})
# These are taken as measured. On an H100, whose recorded runs don't vary tiles, those of 128 columns take 24 to 33% longer in
# wide products. The rate at which weights come from memory: gemm_h100.json, gemm_h200.json, 16 rows. A fabric of sockets:
# staged_tcp_h200.json. On an H200 the rates that other operators share.
SOCKETS = {"sockets_gb_s": 2.6, "sockets_latency_us": 90.0}
MEASURED = {"H100": {"l2_share_128": 0.35, "l2_mb_128": 25.0, "weights_gb_s": 2700.0, "power_slowdown_128": 0.0, **SOCKETS},
            "H200": {"l2_mb_128": 25.0, "weights_gb_s": 3600.0, "link_gb_s": 398.9, "rows_link_gb_s": 347.6,
                     "copy_gb_s": 14.05, "pass_on_gb_s": 13.73, "hbm_gb_s": 2730.0, "crowding": 0.0756,
                     "link_sharpness": 6.869, "engine_gb_s": 329.8, **SOCKETS}}
PRIOR = 0.1  # of a number's difference from the file's, as a share of it


def overlapped(sharpness, *legs):
    longest = np.maximum.reduce([np.broadcast_to(leg, legs[0].shape) for leg in legs])
    longest = np.maximum(longest, 1e-9)
    return longest * sum((leg / longest) ** sharpness for leg in legs) ** (1 / sharpness)


class Runs:
    def __init__(self, path, gpu=None):
        rows = [row for row in csv.DictReader(open(path)) if gpu in (None, row["gpu"])]
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name not in ("file", "gpu", "op", "form", "sums"):
                values = [float(value) for value in values]
            setattr(self, name, np.array(values))
        self.ag, self.rs, self.ar = (self.op == op for op in ("ag_gemm", "gemm_rs", "gemm_ar"))
        self.ranks = self.nodes * self.locals
        self.multi = self.nodes > 1
        self.engines = self.dma == 1
        self.fused = self.form == "fused"
        shard = np.ceil(self.m / self.ranks)
        rows_of_tiles = np.where(self.ar, np.ceil(self.m / self.tile_m), self.ranks * np.ceil(shard / self.tile_m))
        self.tiles = rows_of_tiles * np.ceil(self.n / self.tile_n)
        self.chunk = self.chunks(shard)
        family = np.where(self.ag, (self.n >= 7168) & (self.k == 8192), self.k == 3584)
        order = np.select([self.ag, self.rs, self.ar], [0, 1, 2]) + family + 1
        for side in (self.m, self.n, self.k):
            order = order + np.floor(np.log2(side)) + 1
        self.held_out = order % 2 == 1
        groups = {}
        keys = zip(self.file, self.op, self.m, self.n, self.k, self.form, self.in_place)
        self.group = np.array([groups.setdefault(key, len(groups)) for key in keys])
        self.products = self.first_of_each_shape()

    def first_of_each_shape(self):
        """One present run of each file and fitted shape that names cuBLAS' time."""
        seen, first = set(), []
        for i, key in enumerate(zip(self.file, self.op, self.m, self.n, self.k)):
            if self.product_us[i] > 0 and self.fused[i] and self.present[i] and not self.held_out[i] and key not in seen:
                seen.add(key)
                first.append(i)
        return np.array(first, dtype=int)

    def chunks(self, shard):
        """0 is what the operators chose then (default_chunk() of recorded_runs.cc)."""
        kib = 1024
        sent = np.where(self.ag, shard * self.k * 2, np.where(self.ar, self.m * self.n / 4,
                                                              (self.nodes - 1) * shard * self.n * 2))
        over_nodes = np.where(sent >= 32768 * kib, 512 * kib, 256 * kib)
        few, narrow = self.m <= 4096, self.n < 3072
        rows = np.select(
            [self.engines, few & narrow, (self.m <= 2048) & (self.n >= 6144), few, narrow & (self.m <= 8192),
             (self.n < 6144) & (sent / (128 * kib) >= 1024)],
            [np.clip(256 * self.k, 128 * kib, 8192 * kib), np.clip(sent / 64, 32 * kib, 64 * kib), 128 * kib, 64 * kib,
             np.where(self.locals > 4, 32 * kib, 64 * kib), 256 * kib], 128 * kib)
        chosen = np.where(self.multi, over_nodes, np.where(self.ag, rows, 256 * self.tile_n))
        return np.where(self.chunk_bytes > 0, self.chunk_bytes, chosen)

    def parts(self, chunks, warpgroups):
        """copy_parts() of kernels/cuda/skeleton/chunk_steps.h."""
        chunks = np.ceil(chunks)
        least = np.where(self.multi, 8, np.where(self.locals == 2, 48, 24)) * 1024
        most = np.floor(self.chunk / least)
        for_all = np.floor(4 * warpgroups / np.maximum(chunks, 1))
        in_order = np.where(self.multi, np.floor(self.chunk / (np.where(self.locals <= 2, 256, 64) * 1024)), 1)
        parts = np.maximum(np.minimum(np.maximum(for_all, in_order), most), 1)
        return np.where((chunks == 0) | (chunks > np.where(self.multi, 2048, 128)), 1, parts)


class Model:
    """model.cc; `p` has the fields of a machine file."""

    def __init__(self, runs, p):
        self.r, self.p = runs, p

    def clock(self, time, tile_n):
        p = self.p
        slowdown = p["power_slowdown"] + np.where(tile_n > 128, 0, p["power_slowdown_128"])
        return 1 + slowdown * time / (time + p["power_after_us"])

    def waves(self, tiles_per_block):
        share = self.p["whole_waves_share"]
        return share * np.ceil(tiles_per_block - 1e-9) + (1 - share) * np.maximum(tiles_per_block, 1)

    def tile(self, tile_m, tile_n):
        r, p = self.r, self.p
        megabytes = r.n * r.k * 2 / 1e6
        l2 = p["l2_share_128"] * megabytes / (megabytes + p["l2_mb_128"])
        step = np.where(tile_n > 128, p["step_us_256"], p["step_us_128"] * (1 + l2))
        step = np.where(tile_n <= 64, p["step_us_64"] * (1 + l2), step)
        step = np.where(tile_m <= 64, p["step_us_64_rows"] * (1 + l2), step)
        return r.k / 64 * step + np.where((tile_n > 128) & (tile_m > 64), p["tile_us_256"], p["tile_us_128"])

    def product(self, tiles, tile, blocks, tile_n):
        time = self.waves(tiles / blocks) * tile
        return time * self.clock(time, tile_n)

    def passes(self):
        """How often AllGather+GEMM reads B (AgGemmBands)."""
        r = self.r
        rounds, columns = np.ceil(np.ceil(r.m / r.ranks) / r.tile_m), np.ceil(r.n / r.tile_n)
        soon = (r.n >= 6144) & (r.m <= np.where(r.multi, 4096, 2048))
        in_turn = np.minimum(r.locals, 1 + np.ceil(r.compute / (rounds * columns)))
        whole = np.where(r.engines, r.locals, np.where(soon, in_turn, 1))
        together = np.clip(np.floor(r.compute / columns), 1, 16)

        def band(most, shards):
            shards = np.maximum(shards, 1)
            return np.where(most < shards, shards, np.floor(most / shards) * shards)

        near = band(np.where(soon | r.engines, 16, together), r.locals - whole)
        return (whole * np.ceil(rounds / 16) + np.ceil((r.locals - whole) * rounds / near)
                + (r.nodes - 1) * np.ceil(r.locals * rounds / band(together, r.locals)))

    def weights(self, passes):
        """The first reads B from memory, later ones what L2 has not kept."""
        r, p = self.r, self.p
        megabytes = r.n * r.k * 2 / 1e6
        lost = megabytes / (megabytes + p["l2_mb"])
        return megabytes * 1e6 * (1 + (passes - 1) * lost) / (p["weights_gb_s"] * GB)

    def rail(self, size):
        r, p = self.r, self.p
        return np.where(size > 0, (size + p["network_fill_chunks"] * np.minimum(r.chunk, size)) / (p["network_gb_s"] * GB)
                        + p["network_command_us"] * size / r.chunk, 0)

    def saturated(self, warpgroups, each, link):
        asked, sharpness = np.maximum(warpgroups, 1e-3) * each, self.p["link_sharpness"]
        return asked / (1 + (asked / link) ** sharpness) ** (1 / sharpness)

    def latency(self):
        return np.where(self.r.multi, self.p["network_latency_us"], 0)

    def gather(self):
        r, p = self.r, self.p
        tile, peers = self.tile(r.tile_m, r.tile_n), r.locals - 1
        size = r.m * r.k * 2 / r.ranks
        warpgroups = r.stream + r.receive
        rate = self.saturated(warpgroups, p["copy_gb_s"], p["rows_link_gb_s"])
        rate = rate / (1 + p["crowding"] * np.maximum(0, warpgroups - 36) / 100 * (peers > 1))
        parts = r.parts(size / r.chunk, warpgroups)
        copied = size * peers / (rate * GB) * (1 + p["many_parts_share"] * np.maximum(0, 1 - 3 / parts))
        copied = copied + (p["chunk_flag_us"] * size / r.chunk
                           + p["last_part_share"] * r.chunk / parts * peers / (p["copy_gb_s"] * GB)) * (peers > 0)
        brought = size * peers / (p["engine_gb_s"] * GB) + p["engine_copy_us"] * peers
        local = np.where(r.engines, brought, copied)
        onward = size * peers * (r.nodes - 1)
        passed = np.where(r.engines, onward / (p["engine_gb_s"] * GB) + 4 * p["engine_copy_us"] * peers,
                          onward / (self.saturated(r.receive, p["pass_on_gb_s"], p["rows_link_gb_s"]) * GB))
        network = self.rail(size * (r.nodes - 1))
        # Rows that are not in place: warpgroups copy them to where the network reads them.
        first = np.minimum(r.chunk, size) / (np.clip(warpgroups, 1, parts) * p["copy_gb_s"] * GB)
        placed = np.where(r.multi & (r.in_place == 0),
                          first + size / (self.saturated(warpgroups, p["copy_gb_s"], p["hbm_gb_s"] / 2) * GB), 0)
        network = np.where(r.multi & (r.in_place == 0),
                           overlapped(p["overlap_ag"], network + first, placed + 1e-9) + p["copy_for_network_us"], network)
        over_nodes = overlapped(p["overlap_ag"], network + 1e-9, np.where(peers > 0, local + passed, 1e-9))
        rows = np.where(r.multi, over_nodes, local)
        # SMs take tiles when they have shared: those that receive, with the last rows.
        shared = np.where(peers > 0, local, placed)
        blocks, everything = r.compute, np.where(r.engines, r.compute, SMS)
        receivers = np.where(r.engines, 0, np.ceil(r.receive / 3))
        after = np.maximum(everything - receivers, blocks)
        work = r.tiles * tile * self.clock(r.tiles * tile / blocks, r.tile_n)
        time = work / blocks
        time = np.where(time > shared, shared + (work - shared * blocks) / after, time)
        then = np.maximum(0, work - shared * blocks - (rows - shared) * after)
        time = np.where(time > rows, np.minimum(time, rows + then / everything), time)
        clock = self.clock(time, r.tile_n)
        compute = self.waves(time / tile / clock) * tile * clock
        compute = overlapped(p["weights_overlap"], compute, self.weights(self.passes()))
        compute = compute + np.where(r.engines | (peers == 0), 0, p["copy_beside_share"] * np.minimum(compute, local))
        row = np.maximum(1, np.ceil(r.n / r.tile_n) / everything)
        last = p["arrival_tiles"] * tile * row * self.clock(compute, r.tile_n)
        return p["launch_us_ag"] + self.latency() + overlapped(p["overlap_ag"], compute, rows + last)

    def sums(self, op):
        r, p = self.r, self.p
        overlap, scatter = p[f"overlap_{op}"], op == "rs"
        tile, c = self.tile(r.tile_m, r.tile_n), r.m * r.n * 2
        compute = overlapped(p["weights_overlap"], self.product(r.tiles, tile, r.compute, r.tile_n), self.weights(1))
        part = c * (r.locals - 1) / r.locals
        result = part * (not scatter)
        stored = part / (p["link_gb_s"] * GB)
        product = overlapped(overlap, compute, stored) + p["store_beside_share"] * np.minimum(compute, stored)
        link = (part + result) / (p["link_gb_s"] * GB)

        def left(size, rate):
            return 1 - np.minimum(1, rate * GB * product / np.maximum(size, 1e-9))

        own, once = r.sums == "own", r.sums == "once"
        last = p["last_wave_share"] * np.minimum(1, r.compute / r.tiles)
        size = c * (1 + 1 / r.locals) if scatter else result
        everything = size / ((p["hbm_gb_s"] if scatter else p["sums_link_gb_s"]) * GB)
        rate = r.stream * (p["sum_gb_s"] if scatter else p["sum_out_gb_s"])
        rest = everything * np.where(own, p["own_share"], np.maximum(last, left(size, rate)))
        node = product + rest if scatter else overlapped(overlap, product + rest, link)

        sent = c / r.ranks * (r.nodes - 1) if scatter else c / r.locals * (r.nodes - 1)
        network = self.rail(sent)
        each = p["sum_sent_gb_s"] if scatter else p["sum_sent_ar_gb_s"]
        wait = np.where(r.locals > 1, left(sent * r.locals, r.stream * each), 0) * network
        rail = overlapped(overlap, network + np.where(r.locals > 1, p["network_fill_tiles"], 1) * tile, product + wait)
        if scatter:
            come = c / r.ranks * (r.nodes + 1 + np.where(once, r.locals, 0))
            ready = 1 - left(come, (r.receive + np.where(once, r.stream, 0)) * p["sum_gb_s"])
            tail = (1 - ready * np.where(once, 0.5, 1)) * come / (p["hbm_gb_s"] * GB)
        else:
            come = c / r.locals * np.maximum(r.locals - 1, 1)
            beside = overlapped(-8.0, product, rail)
            missing = 1 - np.minimum(1, r.receive * p["sum_come_gb_s"] * GB * beside / come)
            tail = np.where(r.locals > 1, missing * come / (p["sums_link_gb_s"] * GB), 0)
        nodes = overlapped(overlap, rail, product + tail, link)
        return p[f"launch_us_{op}"] + self.latency() + np.where(r.multi, nodes, node)

    def unfused(self):
        r, p = self.r, self.p
        c = r.m * r.n * 2
        part = c * (r.locals - 1) / r.locals
        size = np.select([r.ag, r.rs, r.ar], [r.m * r.k * 2 * (r.locals - 1) / r.locals, part, 2 * part])
        sent = np.select([r.ag, r.rs, r.ar], [r.m * r.k * 2 / r.ranks, c / r.ranks, c / r.locals]) * (r.nodes - 1)

        def by_op(name):
            return np.select([r.ag, r.rs, r.ar], [p[f"{name}_{op}"] for op in ("ag", "rs", "ar")])

        return (by_op("unfused_us") + self.product(r.tiles, self.tile(r.tile_m, r.tile_n), r.compute, r.tile_n)
                + by_op("unfused_link") * size / (p["link_gb_s"] * GB) + by_op("unfused_network") * self.rail(sent)
                + np.where(r.ag, 0, p["unfused_sum_share"] * 2 * c / (p["hbm_gb_s"] * GB)))

    def total(self):
        r = self.r
        fused = np.select([r.ag, r.rs, r.ar], [self.gather(), self.sums("rs"), self.sums("ar")])
        return np.where(r.fused, fused, self.unfused())

    def cublas(self):
        """A product by itself, by the better tile."""
        r, times, launch_us = self.r, [], 6
        for columns in (256, 128):
            tiles = np.ceil(r.m / 128) * np.ceil(r.n / columns)
            sides = np.full_like(r.m, 128), np.full_like(r.m, columns)
            times.append(self.product(tiles, self.tile(*sides), SMS, sides[1]))
        return np.minimum(*times) + launch_us


class Fit:
    def __init__(self, runs, gpu, file):
        self.runs, self.fixed = runs, {**file, **MEASURED[gpu]}
        self.names = [name for name in FIELDS if name not in MEASURED[gpu]]
        bounds = np.array([FIELDS[name] for name in self.names])
        self.least, self.most = bounds[:, 1], bounds[:, 2]
        self.first = np.array([file.get(name, FIELDS[name][0]) for name in self.names])
        self.first = np.clip(self.first, self.least + 1e-9, self.most - 1e-9)
        # Sweeps count alike, however many candidates they have.
        self.counts = np.bincount(runs.group)
        self.weight = 4 / np.sqrt(np.maximum(self.counts[runs.group], 8))

    def numbers(self, values):
        return {**self.fixed, **dict(zip(self.names, map(float, values)))}

    def residuals(self, values):
        r = self.runs
        model = Model(r, self.numbers(values))
        off = np.log(model.total() / r.us)
        among = off - (np.bincount(r.group, off) / self.counts)[r.group]
        present = r.present == 1
        # Five launches say less than interleaved ones.
        of_time = np.where(present, off, 2.25 * among) * np.where(r.screened == 1, 0.5, 1) * np.where(r.fused, 1, 0.3)
        of_choice = np.where(present, among * np.where(r.screened == 1, 1.05, 2.25), 0)
        fitted = ~r.held_out
        prior = PRIOR * (values - self.first) / np.maximum(self.first, 0.05)
        alone = 0.5 * np.log(model.cublas()[r.products] / r.product_us[r.products])
        return np.concatenate([(of_time * self.weight)[fitted], (of_choice * self.weight)[fitted], alone, prior])

    def solve(self):
        return self.numbers(least_squares(self.residuals, self.first, bounds=(self.least, self.most), loss="soft_l1",
                                          f_scale=0.06, x_scale=np.maximum(self.first, 0.05), max_nfev=60).x)


def main():
    gpu = sys.argv[3]
    runs, path = Runs(sys.argv[1], gpu), Path(sys.argv[2]) / f"{gpu.lower()}.json"
    file = json.loads(path.read_text())
    p = Fit(runs, gpu, file).solve()
    error = np.abs(Model(runs, p).total() / runs.us - 1)
    for name, which in (("fitted", ~runs.held_out), ("held out", runs.held_out)):
        e = error[which & (runs.present == 1) & runs.fused]
        print(f"{name}: {e.size} launches, median error {np.median(e):.3f}, nine of ten {np.quantile(e, 0.9):.3f}")
    # Attention and experts keep their rates, which their own runs have judged.
    rates = [one["step_us_256"] * (1 + one["power_slowdown"]) for one in (p, file)]
    for share in ("attention_share", "experts_share"):
        file[share] = float(f"{file[share] * rates[0] / rates[1]:.4g}")
    known = {name: float(f"{p[name]:.4g}") for name in (*FIELDS, *MEASURED[gpu])}
    path.write_text(json.dumps({**file, **known}, indent=2) + "\n")


if __name__ == "__main__":
    main()
