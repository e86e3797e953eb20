"""Transformer layers shaped like Llama-3-8B's and 70B's on two GPUs, forward and backward, in bf16: tokens a second.

    python3 torch_layer_stack.py --json FILE [--nodes 1] [--shapes 8B,70B] [--no-compile] [--tokens 8192]

One node: `mkernel` (ColumnParallelLinear, RowParallelLinear) beside `dtensor` (PyTorch's tensor parallelism, NCCL), both eager, and beside
each other compiled layer by layer: `mkernel_compiled`, and `async_tp`, Inductor's pass for async tensor parallelism; at the end
`async_tp_by_mkernel`, the same graphs with our operators in them. Two nodes of one GPU each:
`mkernel` beside `unfused`, the same model with our product first and our collective then, over the same paced loopback.

Variants run interleaved. A time is the slowest rank's, between two events; the median of `rounds`. Gradients are compared with the same stack in
fp32 in one process (`errors`: the norm of the difference over the norm, the worst of the weights and of the input).
Layers have no rotary embedding, and their norms no weights: all variants share the rest of the code.
"""
import argparse
import json
import os
import pathlib
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mkernel
import mkernel.torch as mt

#: hidden, query heads, key heads, width of the MLP, layers of the stack; heads of 128.
SHAPES = {"8B": (4096, 32, 8, 14336, 4), "70B": (8192, 64, 8, 28672, 2)}
HEAD = 128
PACE = "50GB/s"
ROUNDS = 10


class Block(nn.Module):
    """A layer of this rank, of four linear layers; x is [tokens of this rank, hidden]."""

    def __init__(self, shape, world, linears):
        super().__init__()
        _, heads, keys, width, _ = shape
        self.parts = [heads // world * HEAD, keys // world * HEAD, keys // world * HEAD]
        self.qkv, self.o, self.gate_up, self.down = linears

    def forward(self, x):
        x = x + self.o(attend(self.qkv(norm(x)), self.parts))
        gate, up = self.gate_up(norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def attend(qkv, parts):
    q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for part in qkv.split(parts, -1))
    if qkv.dtype == torch.float32:  # of which the kernel that keeps no scores takes no grouped heads
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


def shards(shape, world, rank, device):
    """By layer, the four weights of a rank; every rank can draw every rank's."""
    hidden, heads, keys, width, layers = shape
    sizes = [((heads + 2 * keys) * HEAD // world, hidden), (hidden, heads * HEAD // world), (2 * width // world, hidden), (hidden, width // world)]
    fan_in = [hidden, heads * HEAD, hidden, width]
    generator = torch.Generator(device).manual_seed(1 + rank)
    return [
        [(torch.randn(*size, generator=generator, device=device) / fan**0.5).bfloat16() for size, fan in zip(sizes, fan_in)] for _ in range(layers)
    ]


def of_mkernel(shape, world, weights):
    def linear(weight, kind, features):
        made = kind(*features, bias=False, sequence_parallel=True, device=weight.device, dtype=weight.dtype)
        made.weight.data = weight.clone()
        return made

    def block(qkv, o, gate_up, down):
        columns = [(w.shape[1], w.shape[0] * world) for w in (qkv, gate_up)]
        rows = [(w.shape[1] * world, w.shape[0]) for w in (o, down)]
        column, row = mt.ColumnParallelLinear, mt.RowParallelLinear
        return Block(
            shape, world, [linear(qkv, column, columns[0]), linear(o, row, rows[0]), linear(gate_up, column, columns[1]), linear(down, row, rows[1])]
        )

    return nn.ModuleList(block(*layer) for layer in weights)


def of_dtensor(shape, world, weights, mesh):
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def block(layer):
        linears = []
        for index, weight in enumerate(layer):
            by_rows = index % 2 == 0
            made = nn.Linear(1, 1, bias=False, device="meta")
            made.weight = nn.Parameter(DTensor.from_local(weight.clone(), mesh, [Shard(0 if by_rows else 1)], run_check=False))
            linears.append(made)
        column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        return parallelize_module(Block(shape, world, linears), mesh, {"qkv": column, "o": row, "gate_up": column, "down": row})

    return nn.ModuleList(block(layer) for layer in weights)


def step(layers, x, dy):
    """(output, gradient of x, gradients of this rank's weights)."""
    for parameter in layers.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = x
    for layer in layers:
        y = layer(y)
    y.backward(dy)
    return y, x, [getattr(p.grad, "_local_tensor", p.grad) for p in layers.parameters()]


def exact_step(shape, world, rank, x, dy, device):
    """The same of the whole stack in fp32: the output, the gradient of x, and those of this rank's weights."""
    everyones = [[[w.float().requires_grad_(r == rank) for w in layer] for layer in shards(shape, world, r, device)] for r in range(world)]
    parts = Block(shape, world, [nn.Identity()] * 4).parts
    x = x.float().requires_grad_()
    y = x
    for layer in range(shape[4]):
        weights = [of_rank[layer] for of_rank in everyones]
        y = y + sum(F.linear(attend(F.linear(norm(y), qkv), parts), o) for qkv, o, _, _ in weights)
        behind = 0
        for _, _, gate_up, down in weights:
            gate, up = F.linear(norm(y), gate_up).chunk(2, -1)
            behind = behind + F.linear(F.silu(gate) * up, down)
        y = y + behind
    y.backward(dy.float())
    return y.detach(), x.grad, [w.grad for layer in everyones[rank] for w in layer]


def errors(result, exact, rows):
    def error(got, want):
        return float((got.float() - want).norm() / want.norm())

    y, x, gradients = result
    return {
        "y": error(y.detach(), exact[0][rows]),
        "dx": error(x.grad, exact[1][rows]),
        "weights": max(error(got, want) for got, want in zip(gradients, exact[2])),
    }


def clock(variants, x, dy, device):
    """By variant, the medians of the slowest rank's milliseconds; they run interleaved."""
    times = {name: [] for name in variants}
    for round_ in range(2 + ROUNDS):
        for name, (layers, prepare) in variants.items():
            prepare()
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(layers, x, dy)
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor([begin.elapsed_time(end)], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_ >= 2:
                times[name].append(slowest.item())
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def async_tp_calls(layers, x, dy):
    """How often a step calls the fused operators of async tensor parallelism."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(layers, x, dy)
    return sum(event.count for event in seen.key_averages() if "symm_mem::fused" in event.key)


def compiled(layers, micro_pipeline):
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = micro_pipeline
    return nn.ModuleList(torch.compile(layer) for layer in layers)


def rank_main(name, nodes, tokens, compile_too, folder):
    torch.cuda.set_device(int(os.environ["MKERNEL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    rank, world = int(os.environ["MKERNEL_RANK"]), int(os.environ["MKERNEL_WORLD_SIZE"])
    dist.init_process_group("nccl", init_method=f"file://{folder}/{name}", rank=rank, world_size=world, device_id=device)
    mesh = init_device_mesh("cuda", (world,))
    group = mkernel.init(mesh if nodes == 1 else None)
    shape = SHAPES[name]
    weights = shards(shape, world, rank, device)
    draw = torch.Generator(device).manual_seed(0)
    whole, dys = (torch.randn(tokens, shape[0], generator=draw, device=device).bfloat16() for _ in range(2))
    rows = slice(rank * tokens // world, (rank + 1) * tokens // world)
    x, dy = whole[rows], dys[rows]

    def mode(chosen):
        def prepare():
            group.mode = chosen

        return prepare

    ours = of_mkernel(shape, world, weights)
    variants = {"mkernel": (ours, mode("auto"))}
    if nodes == 1:
        variants["dtensor"] = (of_dtensor(shape, world, weights, mesh), mode("auto"))
    else:
        variants["unfused"] = (ours, mode("unfused"))
    exact = exact_step(shape, world, rank, whole, dys, device)
    torch.cuda.empty_cache()
    row = {"shape": name, "layers": shape[4], "tokens": tokens, "nodes": nodes, "ranks": world, "errors": {}}

    def check(names):
        for one in names:
            layers, prepare = variants[one]
            prepare()
            row["errors"][one] = errors(step(layers, x, dy), exact, rows)

    def report():
        row["ms"] = clock(variants, x, dy, device)
        row["tokens_per_s"] = {one: tokens / took * 1e3 for one, took in row["ms"].items()}
        if rank == 0:
            print(json.dumps(row), flush=True)

    check(list(variants))
    report()
    if compile_too and nodes == 1:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
        for one, of, pipelined in (("async_tp", "dtensor", True), ("mkernel_compiled", "mkernel", False)):
            began = time.monotonic()
            variants[one] = (compiled(variants[of][0], pipelined), mode("auto"))
            check([one])
            row.setdefault("compile_s", {})[one] = time.monotonic() - began
        row["async_tp_calls"] = async_tp_calls(variants["async_tp"][0], x, dy)
        report()
        # The same compiled graphs, whose fused operators are now ours.
        mt.use_for_async_tp("cuda")
        variants["async_tp_by_mkernel"] = variants.pop("async_tp")
        check(["async_tp_by_mkernel"])
        before = row["ms"]["async_tp"]
        report()
        row["ms"]["async_tp"], row["tokens_per_s"]["async_tp"] = before, tokens / before * 1e3
    dist.destroy_process_group()
    mkernel.shutdown()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--shapes", default="8B,70B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    # Multicast over NVLink stays off: some machines do not allow it.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    link = {} if options.nodes == 1 else {"link_bandwidth": PACE}
    found = []
    with mkernel.local_cluster(nodes=options.nodes, local=2 // options.nodes, **link) as cluster, tempfile.TemporaryDirectory() as folder:
        for name in options.shapes.split(","):
            found.append(cluster.run(rank_main, name, options.nodes, options.tokens, not options.no_compile, folder)[0])
            record = {
                "command": f"python3 tests/bench/torch_layer_stack.py --nodes {options.nodes}",
                "gpu": torch.cuda.get_device_name(0),
                "torch": f"{torch.__version__}, NVLink multicast off",
                "network": "NVLink" if options.nodes == 1 else f"loopback, GPU memory, {PACE} per rail, daemons beside it",
                "times": f"ms, slowest rank, median of {ROUNDS}; variants interleaved",
                "rows": found,
            }
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
