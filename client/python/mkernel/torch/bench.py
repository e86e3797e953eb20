"""Is it faster? Two layers of your shape, forward and backward, by mkernel and by PyTorch's DTensor over NCCL (over gloo on CPUs).

    torchrun --nproc-per-node 8 -m mkernel.torch.bench --width 4096 --hidden 14336 --rows 8192

One block is y = down(silu(up(x))), with up: width to hidden and down: hidden to width, in bf16, without biases. `--rows` counts those of all ranks together:
sequence times batch. With `--whole` the activations are not split by the sequence.

The variants run interleaved. A time is the slowest rank's, and the median of `--rounds`. The errors are those of y, of the gradient of x and of
both weights' gradients against float32 in one process: the norm of the difference over the norm, the worst of them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any, Callable, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import mkernel

from . import parallel
from .shards import local_of

#: Before the rounds that count.
_WARM_UP = 3


class Block(nn.Module):
    """Two layers; x is [rows, width]."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta") for w in (up, down))
        self.up.weight, self.down.weight = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def step(block: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, the gradient of x, those of the weights]: what this rank has of each."""
    for parameter in block.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = block(x)
    y.backward(dy)
    gradients = [local_of(parameter.grad) for parameter in block.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients]


def clock(variants: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """By variant, the median of the slowest rank's milliseconds. They run interleaved, on all ranks of torch.distributed."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(_WARM_UP + rounds):
        for name, run in variants.items():
            _wait(device)
            dist.barrier()
            began = time.perf_counter()
            run()
            _wait(device)
            slowest = torch.tensor([(time.perf_counter() - began) * 1e3], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_ >= _WARM_UP:
                times[name].append(float(slowest))
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(
    width: int, hidden: int, rows: int, *, sequence_parallel: bool = True, rounds: int = 20, compiled: bool = False, device: Optional[torch.device] = None
) -> dict[str, Any]:
    """The command's work, in a process that has joined torch.distributed: {"ms": by variant, "errors": by variant, ...}."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rank, world = mesh.get_local_rank(), mesh.size()
    mkernel.init(mesh, name="bench", rows_max=rows)
    try:
        draw = torch.Generator(device).manual_seed(1)
        up, down, whole, dys = (
            torch.randn(*size, generator=draw, device=device).div_(scale).bfloat16()
            for size, scale in (((hidden, width), width**0.5), ((width, hidden), hidden**0.5), ((rows, width), 1), ((rows, width), 1))
        )
        mine = slice(rank * rows // world, (rank + 1) * rows // world) if sequence_parallel else slice(None)
        x, dy = whole[mine].contiguous(), dys[mine].contiguous()
        exact = step(Block(up.float(), down.float()), whole.float(), dys.float())
        exact = [exact[0][mine], exact[1][mine], exact[2].chunk(world, 0)[rank], exact[3].chunk(world, 1)[rank]]
        blocks = {"mkernel": _of_mkernel(up, down, mesh, sequence_parallel), "dtensor": _of_dtensor(up, down, mesh, sequence_parallel)}
        calls: dict[str, Any] = {name: torch.compile(block) if compiled else block for name, block in blocks.items()}
        errors = {name: _worst(step(call, x, dy), exact, device) for name, call in calls.items()}
        ms = clock({name: lambda call=call: step(call, x, dy) for name, call in calls.items()}, rounds, device)  # type: ignore[misc]
    finally:
        mkernel.shutdown("bench")
    return {
        "width": width,
        "hidden": hidden,
        "rows": rows,
        "ranks": world,
        "sequence_parallel": sequence_parallel,
        "compiled": compiled,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "ms": ms,
        "errors": errors,
    }


def _of_mkernel(up: Tensor, down: Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    dim = 0 if sequence_parallel else None
    plan: dict[str, ParallelStyle] = {"up": parallel.ColwiseParallel(sequence_dim=dim), "down": parallel.RowwiseParallel(sequence_dim=dim)}
    return parallelize_module(Block(up.clone(), down.clone()), mesh, plan)


def _of_dtensor(up: Tensor, down: Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(Block(up.clone(), down.clone()), mesh, plan)


def _worst(got: Sequence[Tensor], exact: Sequence[Tensor], device: torch.device) -> float:
    """The largest error of all results, over all ranks."""
    worst = torch.stack([(local_of(one).float() - want).norm() / want.norm() for one, want in zip(got, exact)]).max().reshape(1).to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mkernel.torch.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--rows", type=int, default=8192, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--whole", action="store_true", help="without sequence parallelism")
    parser.add_argument("--compile", action="store_true", help="both variants under torch.compile")
    parser.add_argument("--json", help="where the figures go")
    options = parser.parse_args(arguments)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    found = compare(
        options.width, options.hidden, options.rows, sequence_parallel=not options.whole, rounds=options.rounds, compiled=options.compile
    )
    if dist.get_rank() == 0:
        for name, took in found["ms"].items():
            print(f"{name:8} {took:10.3f} ms   error {found['errors'][name]:.2e}", flush=True)
        print(f"mkernel takes {found['ms']['mkernel'] / found['ms']['dtensor']:.2f} of DTensor's time on {found['ranks']} ranks", flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as out:
                json.dump(found, out, indent=1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
