#!/usr/bin/env python3
"""The grouped product against DeepGEMM and torch._grouped_mm on one GPU, interleaved in one run.

    grouped_gemm_bench.py --library libgrouped_gemm_abi.so [--set goals|models|small|epilogues]...
                          [--launches N] [--seconds S] [--json FILE] [--variant V --band ROWS]

Needs PyTorch; DeepGEMM (PyPI sgl-deep-gemm with apache-tvm-ffi) where it is to be compared. Every case
has fresh random inputs. Every element of our result is judged against float64, rows of nobody must
stay as they were. Exit status 1 if any element is wrong.

DeepGEMM takes rows in multiples of 128 an expert. Where counts are others, its rows are padded with
zeros outside the timing; TFLOPS count the rows that there are, for all three.
"""
import argparse
import ctypes
import functools
import json
import pathlib
import random
import statistics
import subprocess
import sys

import torch

from grouped_judge import product_bound

DEVICE = "cuda"
BF16, F16 = 0, 1
NK, KN = 0, 1
ACTIVATIONS = ("none", "halves", "pairs")
VARIANTS = ("auto", "128x128", "128x256")
ALIGN = 128  # DeepGEMM's rows of an expert


class Problem(ctypes.Structure):
    """MkGroupedProblem of grouped_gemm_abi.cc."""

    _fields_ = (
        [(name, ctypes.c_int) for name in ("dtype", "b_layout", "activation", "experts", "rows_max", "n", "k")]
        + [(name, ctypes.c_void_p) for name in ("a", "b", "c", "offsets", "counts", "bias", "row_scale")]
        + [(name, ctypes.c_int) for name in ("variant", "band_rows", "blocks_max")]
    )


@functools.cache
def import_deep_gemm():
    """DeepGEMM, where it is. Its library wants the NVRTC of PyTorch's wheels, which nobody has loaded yet."""
    for library in pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import deep_gemm  # noqa: PLC0415

    return deep_gemm


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.mk_grouped_create.restype = ctypes.c_void_p
        self.c.mk_grouped_create.argtypes = [ctypes.POINTER(Problem)]
        self.c.mk_grouped_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.c.mk_grouped_destroy.argtypes = [ctypes.c_void_p]
        self.c.mk_grouped_error.restype = ctypes.c_char_p
        self.c.mk_grouped_variant.restype = ctypes.c_char_p
        self.c.mk_grouped_variant.argtypes = [ctypes.c_void_p]

    def plan(self, problem):
        plan = self.c.mk_grouped_create(ctypes.byref(problem))
        if not plan:
            raise RuntimeError(self.c.mk_grouped_error().decode())
        return plan

    def launch(self, plan):
        if self.c.mk_grouped_launch(plan, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(self.c.mk_grouped_error().decode())


# ---- cases ---------------------------------------------------------------------------------------


def uniform(experts, rows):
    return [rows] * experts


def skewed(experts, rows, seed):
    """Multiples of 128, `rows` an expert in the mean, unequal as peers.py draws them: some have next to
    none, some several times the mean."""
    draw = random.Random(seed)
    weights = [draw.random() ** 6 for _ in range(experts)]
    total = sum(weights)
    return [round(w / total * rows * experts / ALIGN) * ALIGN for w in weights]


def ragged(experts, rows, seed):
    """As a router deals out tokens: each row to an expert drawn at random."""
    draw = random.Random(seed)
    counts = [0] * experts
    for _ in range(experts * rows):
        counts[draw.randrange(experts)] += 1
    return counts


def one_hot(experts, rows):
    """Half of all rows are one expert's."""
    counts = [rows // 2] * experts
    counts[experts // 3] += rows * experts - sum(counts)
    return counts


def case(name, experts, k, n, counts, activation="none", layout=NK, dtype=BF16, bias=False, scale=False):
    return dict(name=name, experts=experts, k=k, n=n, counts=counts, activation=activation, layout=layout,
                dtype=dtype, bias=bias, scale=scale)


def cases_of(which):
    made = []
    if which == "goals":
        for k, n in ((7168, 2048), (2048, 7168), (7168, 4096)):
            for rows in (128, 256, 512, 1024, 4096):
                if rows == 4096 and n == 4096:
                    continue
                made.append(case(f"uniform {rows}", 64, k, n, uniform(64, rows)))
                made.append(case(f"skewed {rows}", 64, k, n, skewed(64, rows, rows)))
        for rows in (128, 256, 1024):
            made.append(case(f"ragged {rows}", 64, 7168, 2048, ragged(64, rows, rows)))
            made.append(case(f"one hot {rows}", 64, 7168, 2048, one_hot(64, rows)))
    elif which == "models":
        for name, experts, h, i in (("Mixtral 8x7B", 8, 4096, 14336), ("Qwen3-235B", 128, 4096, 1536)):
            for rows in (128, 256, 1024) if experts == 128 else (256, 1024, 4096):
                for k, n in ((h, 2 * i), (i, h)):
                    made.append(case(f"{name} uniform {rows}", experts, k, n, uniform(experts, rows)))
                    made.append(case(f"{name} ragged {rows}", experts, k, n, ragged(experts, rows, rows)))
    elif which == "small":
        for rows in (1, 4, 16, 32, 64):
            made.append(case(f"ragged {rows}", 64, 7168, 2048, ragged(64, rows, rows)))
        made.append(case("uniform 64", 64, 7168, 2048, uniform(64, 64)))
        made.append(case("ragged 8", 32, 7168, 4096, ragged(32, 8, 8)))
    elif which == "epilogues":
        for activation in ACTIVATIONS:
            for layout in (NK, KN):
                for bias, scale in ((False, False), (True, True)):
                    made.append(case("uniform 512", 64, 7168, 4096, uniform(64, 512), activation, layout, BF16,
                                     bias, scale))
        made.append(case("uniform 512", 64, 7168, 4096, uniform(64, 512), dtype=F16))
    return made


# ---- one case ------------------------------------------------------------------------------------


class Run:
    """The tensors of a case, and the sides that compute it."""

    def __init__(self, library, made, options, peers):
        self.library = library
        self.case = made
        e, k, n, counts = made["experts"], made["k"], made["n"], made["counts"]
        self.rows = sum(counts)
        dtype = torch.bfloat16 if made["dtype"] == BF16 else torch.float16
        gated = made["activation"] != "none"
        self.columns = n // 2 if gated else n
        generator = torch.Generator(DEVICE).manual_seed(random.randrange(1 << 30))
        normal = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)
        self.a = normal(max(1, self.rows), k)
        self.b = normal(e, n, k) if made["layout"] == NK else normal(e, k, n)
        # Outputs as large as they would be without activation: some hundreds of sums of squares.
        self.bias = normal(e, n) if made["bias"] else None
        self.scale = torch.rand(max(1, self.rows), device=DEVICE, generator=generator) + 0.25 if made["scale"] else None
        self.c = torch.empty(max(1, self.rows), self.columns, device=DEVICE, dtype=dtype)
        ends = torch.tensor(counts).cumsum(0)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(DEVICE)
        self.plans = {}
        self.sides = {}
        for name, variant, band in options:
            pointer = lambda t: t.data_ptr() if t is not None else None
            problem = Problem(made["dtype"], made["layout"], ACTIVATIONS.index(made["activation"]), e, self.a.shape[0],
                              n, k, pointer(self.a), pointer(self.b), pointer(self.c), pointer(self.offsets), None,
                              pointer(self.bias), pointer(self.scale), VARIANTS.index(variant), band, 0)
            plan = library.plan(problem)
            self.plans[name] = plan
            self.sides[name] = lambda plan=plan: library.launch(plan)
        plain = not gated and not made["bias"] and not made["scale"]
        if plain and peers:
            self.add_torch()
            self.add_deepgemm()

    def close(self):
        for plan in self.plans.values():
            self.library.c.mk_grouped_destroy(plan)
        # The sides hold this object: without a cycle its tensors are free at once.
        self.plans.clear()
        self.sides.clear()

    def add_torch(self):
        b = self.b.transpose(1, 2) if self.case["layout"] == NK else self.b
        ends = self.offsets[1:].clone()
        side = lambda: torch._grouped_mm(self.a, b, offs=ends)
        try:
            side()
            torch.cuda.synchronize()
            self.sides["torch"] = side
        except RuntimeError as error:
            print(f"torch._grouped_mm: {str(error)[:200]}", file=sys.stderr)

    def add_deepgemm(self):
        if self.case["layout"] != NK or self.case["dtype"] != BF16 or self.rows == 0:
            return
        try:
            deep_gemm = import_deep_gemm()
        except (ImportError, OSError) as error:
            print(f"DeepGEMM: {error}", file=sys.stderr)
            return
        padded = [(count + ALIGN - 1) // ALIGN * ALIGN for count in self.case["counts"]]
        layout = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded)).to(torch.int32)
        a, c = self.a, self.c
        if padded != self.case["counts"]:
            a = torch.zeros(sum(padded), self.case["k"], device=DEVICE, dtype=self.a.dtype)
            at = row = 0
            for expert, (rows, room) in enumerate(zip(self.case["counts"], padded)):
                a[at : at + rows] = self.a[row : row + rows]
                layout[at + rows : at + room] = -1
                at, row = at + room, row + rows
            c = torch.empty(sum(padded), self.columns, device=DEVICE, dtype=self.c.dtype)
        else:
            c = torch.empty_like(self.c)
        layout = layout.to(DEVICE)
        side = lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, self.b, c, layout)
        try:
            side()
            torch.cuda.synchronize()
            self.sides["deepgemm"] = side
        except Exception as error:  # noqa: BLE001 - whatever its compilation may say
            print(f"DeepGEMM: {str(error)[:300]}", file=sys.stderr)

    def time(self, launches):
        """Medians in microseconds. The stream is held while a launch is queued, so that no side's host
        code is timed."""
        times = {name: [] for name in self.sides}
        warm_up = 2
        for turn in range(launches + warm_up):
            names = list(self.sides)
            random.shuffle(names)
            for name in names:
                begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
                torch.cuda._sleep(400_000)
                begin.record()
                self.sides[name]()
                end.record()
                torch.cuda.synchronize()
                if turn >= warm_up:
                    times[name].append(begin.elapsed_time(end) * 1e3)
        return times

    def judge(self, name):
        """The worst |error| over its bound, of every element."""
        self.c.view(torch.int16).fill_(-1)
        self.sides[name]()
        torch.cuda.synchronize()
        worst = 0.0
        unit = 2.0**-8 if self.case["dtype"] == BF16 else 2.0**-11
        row = 0
        for expert, rows in enumerate(self.case["counts"]):
            b = self.b[expert].transpose(0, 1) if self.case["layout"] == NK else self.b[expert]
            bias = self.bias[expert] if self.bias is not None else None
            for first in range(row, row + rows, 4096):
                last = min(first + 4096, row + rows)
                scale = self.scale[first:last, None].double() if self.scale is not None else None
                exact, bound = product_bound(self.a[first:last], b, self.case["activation"], unit, bias, scale)
                share = ((self.c[first:last].double() - exact).abs() / bound).nan_to_num(nan=1e300, posinf=1e300)
                worst = max(worst, share.max().item())
            row += rows
        return worst


def machine():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True, check=False).stdout.strip().split("\n")[0]
    return dict(gpu=torch.cuda.get_device_name(), driver=driver, torch=torch.__version__, cuda=torch.version.cuda)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--set", action="append", default=[], choices=["goals", "models", "small", "epilogues"])
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--launches", type=int, default=15)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-judge", action="store_true")
    parser.add_argument("--options", default="ours:auto:0", help="NAME:VARIANT:BAND_ROWS,... of ours")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    options = [(name, variant, int(band)) for name, variant, band in
               (option.split(":") for option in arguments.options.split(","))]
    library = Library(arguments.library)
    rows, wrong = [], 0
    for which in arguments.set or ["goals"]:
        for made in cases_of(which):
            text = f"{made['name']} E{made['experts']} {made['k']}x{made['n']}"
            extras = [made["activation"], "KN" if made["layout"] == KN else "NK", "f16" if made["dtype"] == F16 else "bf16",
                      "bias" if made["bias"] else "", "scale" if made["scale"] else ""]
            text += " " + " ".join(extra for extra in extras if extra)
            if arguments.only not in text:
                continue
            run = Run(library, made, options, not arguments.no_peers)
            times = run.time(arguments.launches)
            medians = {name: statistics.median(all_times) for name, all_times in times.items()}
            worst = {} if arguments.no_judge else {name: run.judge(name) for name in run.plans}
            wrong += sum(not share <= 1 for share in worst.values())
            run.close()
            flops = 2.0 * run.rows * made["k"] * made["n"]
            line = {name: round(flops / us / 1e6, 1) for name, us in medians.items()}
            first = options[0][0]
            ratio = {name: round(medians[name] / medians[first], 4) for name in medians if name != first}
            print(f"{text:52} rows {run.rows:7} | " + " ".join(f"{name} {line[name]:.0f}" for name in line)
                  + " | time over ours: " + " ".join(f"{name} {value:.3f}" for name, value in ratio.items())
                  + (f" | worst {max(worst.values()):.2f}" if worst else ""), flush=True)
            rows.append(dict(set=which, case=text, rows=run.rows, us={name: round(us, 2) for name, us in medians.items()},
                             tflops=line, time_over_ours=ratio, worst_over_bound=worst))
            del run
            torch.cuda.empty_cache()
    print(f"{wrong} cases wrong")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(dict(command=" ".join(sys.argv), machine=machine(), launches=arguments.launches, cases=rows), file, indent=1)
            file.write("\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
