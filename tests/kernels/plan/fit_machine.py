#!/usr/bin/env python3
"""Fits the numbers of kernels/plan/machines/h100.json and h200.json to recorded runs.

    gather_runs.py RESULTS runs.csv;  fit_machine.py runs.csv FOLDER

The model is that of kernels/plan/model.cc, over all runs at once. Half of the shapes are held out (held_out() of
recorded_runs.cc has the same chess board); recorded_runs_test.cc judges the files on those. Runs of earlier kernels count
only by the differences between the candidates of a shape. Needs requirements.txt.
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
    "step_us_256": (0.58, 0.5, 0.75), "step_us_128": (0.31, 0.27, 0.5), "step_us_64": (0.27, 0.25, 0.34),
    "tile_us_256": (4, 1, 15), "tile_us_128": (2, 0.5, 12), "power_slowdown": (0.25, 0, 0.6),
    "power_after_us": (1.5e3, 200, 1e4), "whole_waves_share": (0.9, 0.5, 1), "link_gb_s": (360, 200, 500),
    "link_sharpness": (4, 1, 12), "rows_link_gb_s": (320, 200, 450), "crowding": (0.05, 0, 1), "copy_gb_s": (13, 4, 30),
    "pass_on_gb_s": (10, 3, 30), "chunk_flag_us": (0.05, 0, 1), "last_part_share": (0.7, 0, 2),
    "many_parts_share": (0.2, 0, 1), "copy_beside_share": (0.03, 0, 0.5), "engine_gb_s": (320, 150, 400),
    "engine_copy_us": (6, 1, 30), "hbm_gb_s": (2500, 800, 3500), "sum_gb_s": (10, 2, 40), "sum_out_gb_s": (4.1, 1, 20),
    "sums_link_gb_s": (250, 100, 450), "sum_sent_gb_s": (8, 2, 40), "sum_sent_ar_gb_s": (8, 2, 40),
    "sum_come_gb_s": (4, 1, 20), "store_beside_share": (0.05, 0, 1), "last_wave_share": (0.5, 0, 1.5),
    "own_share": (0.05, 0, 1), "network_gb_s": (50, 40, 55), "network_latency_us": (30, 5, 80),
    "network_fill_chunks": (0.8, 0, 1.5), "network_command_us": (0.15, 0.12, 1), "network_fill_tiles": (0.2, 0, 3),
    "copy_for_network_us": (5, 0, 20), "copy_for_network_share": (0.02, 0, 0.3), "arrival_tiles": (0.8, 0, 3),
    "unfused_sum_share": (0.5, 0, 4),
}
for op in ("ag", "rs", "ar"):
    FIELDS.update({f"launch_us_{op}": (18, 3, 40), f"overlap_{op}": (6, 1.5, 20), f"unfused_us_{op}": (25, 5, 80),
                   f"unfused_link_{op}": (1.2, 0.5, 4), f"unfused_network_{op}": (1, 0.9, 1.6)})
# What is taken as measured: on an H100 tiles of 128 columns take 24 to 33% longer in wide products, on an H200 8%; and the
# rate at which weights come from memory (gemm_h100.json, gemm_h200.json: 16 rows), which no recorded operator feels; a
# fabric of sockets (staged_tcp_h200.json).
SOCKETS = {"sockets_gb_s": 2.6, "sockets_latency_us": 90.0}
MEASURED = {"H100": {"l2_share_128": 0.35, "l2_mb_128": 25.0, "weights_gb_s": 2700.0, **SOCKETS},
            "H200": {"l2_share_128": 0.1, "l2_mb_128": 25.0, "weights_gb_s": 3600.0, **SOCKETS}}
NAMES = list(FIELDS)


def overlapped(sharpness, *legs):
    longest = np.maximum.reduce([np.broadcast_to(leg, legs[0].shape) for leg in legs])
    longest = np.maximum(longest, 1e-9)
    return longest * sum((leg / longest) ** sharpness for leg in legs) ** (1 / sharpness)


class Runs:
    def __init__(self, path):
        rows = list(csv.DictReader(open(path)))
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
        order = np.select([self.ag, self.rs, self.ar], [0, 1, 2]) + np.floor(np.log2(self.m / 2048)) + family
        self.held_out = order % 2 == 1
        groups = {}
        keys = zip(self.file, self.op, self.m, self.n, self.k, self.form, self.in_place)
        self.group = np.array([groups.setdefault(key, len(groups)) for key in keys])
        self.products = self.first_of_each_shape()

    def first_of_each_shape(self):
        """Of the runs that name cuBLAS' time, one of each file and shape."""
        seen, first = set(), []
        for i, key in enumerate(zip(self.file, self.op, self.m, self.n, self.k)):
            if self.product_us[i] > 0 and self.fused[i] and key not in seen:
                seen.add(key)
                first.append(i)
        return np.array(first)

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

    def clock(self, time):
        return 1 + self.p["power_slowdown"] * time / (time + self.p["power_after_us"])

    def waves(self, tiles_per_block):
        share = self.p["whole_waves_share"]
        return share * np.ceil(tiles_per_block - 1e-9) + (1 - share) * np.maximum(tiles_per_block, 1)

    def tile(self, tile_m, tile_n):
        r, p = self.r, self.p
        megabytes = r.n * r.k * 2 / 1e6
        l2 = np.where(r.gpu == "H100", MEASURED["H100"]["l2_share_128"] * megabytes / (megabytes + MEASURED["H100"]["l2_mb_128"]), 0)
        step = np.where(tile_n > 128, p["step_us_256"], p["step_us_128"] * (1 + l2))
        step = np.where((tile_m <= 64) | (tile_n <= 64), p["step_us_64"] * (1 + l2), step)
        return r.k / 64 * step + np.where((tile_n > 128) & (tile_m > 64), p["tile_us_256"], p["tile_us_128"])

    def product(self, tiles, tile, blocks):
        time = self.waves(tiles / blocks) * tile
        return time * self.clock(time)

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
        network = network + (1 - r.in_place) * (p["copy_for_network_us"] + p["copy_for_network_share"] * network)
        over_nodes = overlapped(p["overlap_ag"], network + 1e-9, np.where(peers > 0, local + passed, 1e-9))
        rows = np.where(r.multi, over_nodes, local)
        blocks, everything = r.compute, np.where(r.engines, r.compute, SMS)
        each = r.tiles * tile / blocks
        alone = each * self.clock(each)
        time = np.where(alone <= rows, alone, rows + (alone - rows) * blocks / everything)
        compute = self.waves(time / tile / self.clock(time)) * tile * self.clock(time)
        compute = compute + np.where(r.engines | (peers == 0), 0, p["copy_beside_share"] * np.minimum(compute, local))
        last = p["arrival_tiles"] * tile * self.clock(compute)
        return p["launch_us_ag"] + self.latency() + overlapped(p["overlap_ag"], compute, rows + last)

    def sums(self, op):
        r, p = self.r, self.p
        overlap, scatter = p[f"overlap_{op}"], op == "rs"
        tile, c = self.tile(r.tile_m, r.tile_n), r.m * r.n * 2
        compute = self.product(r.tiles, tile, r.compute)
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
        rail = overlapped(overlap, network + p["network_fill_tiles"] * tile, product + wait)
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

        return (by_op("unfused_us") + self.product(r.tiles, self.tile(r.tile_m, r.tile_n), r.compute)
                + by_op("unfused_link") * size / (p["link_gb_s"] * GB) + by_op("unfused_network") * self.rail(sent)
                + np.where(r.ag, 0, p["unfused_sum_share"] * 2 * c / (p["hbm_gb_s"] * GB)))

    def total(self):
        r = self.r
        fused = np.select([r.ag, r.rs, r.ar], [self.gather(), self.sums("rs"), self.sums("ar")])
        return np.where(r.fused, fused, self.unfused())

    def cublas(self, launch_us):
        """A product by itself, by the better tile."""
        r, times = self.r, []
        for columns in (256, 128):
            tiles = np.ceil(r.m / 128) * np.ceil(r.n / columns)
            times.append(self.product(tiles, self.tile(np.full_like(r.m, 128), np.full_like(r.m, columns)), SMS))
        return np.minimum(*times) + launch_us


def residuals(values, runs):
    p = dict(zip(NAMES, values))
    model = Model(runs, p)
    off = np.log(model.total() / runs.us)
    mean = np.bincount(runs.group, off) / np.bincount(runs.group)
    off = np.where(runs.present == 1, off, 1.5 * (off - mean[runs.group]))
    off = np.where(runs.fused, off, 0.3 * off)[~runs.held_out]
    products = runs.products[~runs.held_out[runs.products]]
    alone = 0.5 * np.log(model.cublas(values[-1])[products] / runs.product_us[products])
    return np.concatenate([off, alone])


def main():
    runs, folder = Runs(sys.argv[1]), Path(sys.argv[2])
    bounds = np.array([*FIELDS.values(), (6, 0, 20)])  # the last: cuBLAS' launch
    first, least, most = bounds.T
    fit = least_squares(residuals, first, bounds=(least, most), args=(runs,), loss="soft_l1", f_scale=0.06,
                        x_scale=np.maximum(np.abs(first), 0.05), max_nfev=25)
    p = dict(zip(NAMES, fit.x))
    error = np.abs(Model(runs, p).total() / runs.us - 1)
    for name, which in (("fitted", ~runs.held_out), ("held out", runs.held_out)):
        e = error[which & (runs.present == 1) & runs.fused]
        print(f"{name}: {e.size} launches, median error {np.median(e):.3f}, nine of ten {np.quantile(e, 0.9):.3f}")
    for gpu, l2 in MEASURED.items():
        numbers = {name: float(f"{value:.4g}") for name, value in {**p, **l2}.items()}
        machine = {"kind": "gpu", "name": gpu, "sms": SMS,
                   "comment": "Fitted to recorded runs by tests/kernels/plan/fit_machine.py.", **numbers}
        (folder / f"{gpu.lower()}.json").write_text(json.dumps(machine, indent=2) + "\n")


if __name__ == "__main__":
    main()
