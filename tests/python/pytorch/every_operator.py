"""Every operator of torch.library with its gradient, once over: tests run it under different circumstances, and compare."""
import contextlib
import ctypes
from types import SimpleNamespace

import torch
from torch_ranks import random_tensor

import mkernel
import mkernel.torch as mt


def at_odd_offset(x):
    """The same, without gaps, but where no vector of 16 bytes begins."""
    rows = x if x.is_contiguous() else x.t()
    made = x.new_empty(x.numel() + 1)[1:].view(rows.shape).copy_(rows)
    return made if x.is_contiguous() else made.t()


def poison():
    """From now on, PyTorch fills memory that nobody has written with not-a-number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def results(dtype, rows=4, wide=16, place=torch.clone, forward=contextlib.nullcontext, backward=contextlib.nullcontext, device="cpu"):
    """By operator, its results and gradients on this rank, of numbers that are always the same.

    `rows`: of a matrix of one rank, of a rank's part of a sequence, and tokens. `place` copies an input; the passes run in the contexts `forward`
    and `backward`.
    """
    group = mkernel.get_group()
    world, rank = group.world, group.rank
    found = {}

    def run(name, call, *inputs):
        inputs = [place(x.to(device)).requires_grad_() for x in inputs]
        with forward():
            ys = call(*inputs)
        ys = ys if isinstance(ys, tuple) else (ys,)
        # All ranks have the same result of gemm_ar, and the same gradient of it.
        dys = [random_tensor(900 + i if name.startswith("gemm_ar") else 1000 + 10 * rank + i, *y.shape, dtype=y.dtype) for i, y in enumerate(ys)]
        with backward():
            torch.autograd.backward(ys, [dy.to(device) for dy in dys])
        found[name] = [x.detach().cpu() for x in (*ys, *(x.grad for x in inputs))]

    def own(seed, *shape, dtype=dtype):
        return random_tensor(seed + 50 * rank, *shape, dtype=dtype)

    for columns, b in (("", own(2, wide, 24)), (" by columns", own(2, 24, wide).t())):
        for keep in (True, False):
            run(f"ag_gemm{columns} {keep}", lambda a, b: mt.ag_gemm(a, b, keep_gathered=keep), own(1, rows, wide), b)
        run(f"gemm_rs{columns}", mt.gemm_rs, own(3, rows * world, wide), b)
        run(f"gemm_ar{columns}", mt.gemm_ar, own(3, rows * world, wide), b)
        run(f"copy_gemm{columns}", mt.copy_gemm, random_tensor(4, rows * world, wide, dtype=dtype), b)
    run("ag_gemm with a bias", lambda a, b, bias: mt.ag_gemm(a, b, bias=bias), own(1, rows, wide), own(2, wide, 24), own(5, 24))
    for kind in (dtype, torch.float32):
        run(f"all_gather {kind}", mt.all_gather, own(6, rows, wide, dtype=kind))
        run(f"reduce_scatter {kind}", mt.reduce_scatter, own(7, rows * world, wide, dtype=kind))

    for causal in (False, True):
        parts = rows + rows % 2 if causal else rows  # causal ranks have two parts each
        q, k, v = (own(8 + i, 1, heads, parts, 64) * 4 for i, heads in enumerate((4, 2, 2)))
        run(f"attention {causal}", lambda q, k, v: mt.attention(q, k, v, is_causal=causal, enable_gqa=True), q, k, v)
        lengths = [rows * world, 0, 1, 3 * rows]
        mine = len(mkernel.packed_rows(lengths, causal=causal))
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        q, k, v = (own(11 + i, mine, heads, 64) * 4 for i, heads in enumerate((4, 2, 2)))
        run(f"attention_varlen {causal}", lambda q, k, v: mt.attention_varlen(q, k, v, starts, causal, rows_max=sum(lengths)), q, k, v)

    experts, top_k = 6, 4
    first, last = rank * experts // world, (rank + 1) * experts // world
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:top_k] for t in range(rows * rank, rows * (rank + 1))])
    weights = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(20 + rank), dtype=torch.float32)

    def experts_of(tokens, weights, up, down, residual):
        routed = mt.moe_dispatch_gemm(tokens, ids.to(device), weights, up, experts_total=experts)
        return mt.gemm_combine(routed.y, routed, down, residual=residual), routed.y, routed.weight

    run("experts", experts_of, own(14, rows, wide), weights, own(15, last - first, wide, 24), own(16, last - first, 24, wide), own(17, rows, wide))
    return found


def alike(some, others, what):
    """Raises which operators have other results, bit for bit."""
    assert some.keys() == others.keys()
    wrong = [
        f"{name}[{i}]" for name in some for i, (x, y) in enumerate(zip(some[name], others[name])) if x.dtype != y.dtype or not torch.equal(x, y)
    ]
    wrong += [f"{name} is not a number" for name in some for x in others[name] if not x.isfinite().all()]
    assert not wrong, f"{what}: {', '.join(wrong)}"


def addresses_seen(seen):
    """From now on, `seen` gets (operator, argument, address) of what launches read and write by vectors."""
    launch = mkernel.Group.launch
    by_words = ("ids", "weights", "rows", "expert_offsets", "sequence_starts", "lse")

    def spied(self, name, shape, room, arguments, **more):
        for field, kind in arguments._fields_:
            address = getattr(arguments, field)
            if kind is ctypes.c_void_p and address is not None and field not in by_words:
                seen.append(SimpleNamespace(operator=name, argument=field, address=address))
        return launch(self, name, shape, room, arguments, **more)

    mkernel.Group.launch = spied
