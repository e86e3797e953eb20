"""Mixture of experts: `mkernel::moe_dispatch_gemm`, the sum that brings its rows back, and a layer of both.

The first product is the fused operator, on CPUs. Its gradient and `moe_combine` are composed of gathers and reduce-scatters over the tokens of all ranks.
Every rank has as many tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import _c
from .. import moe as base
from ..errors import Error, ErrorCode, invalid
from ..group import GroupLike, get_group
from .composed import reduce_scatter, warn_once
from .layers import mark_sequence_parallel
from .operators import _DTYPES, _name, all_gather


def moe_dispatch_gemm(tokens: Tensor, ids: Tensor, experts: Tensor, *, experts_total: int, group: GroupLike = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, source, slot, offsets): each token times the weights of its experts, on the ranks that have them.

    `tokens` is [count, hidden], `ids` [count, k] with -1 for none, `experts` [experts of this rank, hidden, features]. The i-th expert of this rank has the
    rows offsets[i] to offsets[i + 1] of y. Row j is of the token source[j] of all ranks' tokens, one rank after the other, for its slot slot[j].
    y has room for any routing; the rows behind the last offset are zero, and have the source -1.
    """
    return torch.ops.mkernel.moe_dispatch_gemm(tokens, ids, experts, experts_total, _name(group))


def moe_combine(z: Tensor, source: Tensor, slot: Tensor, weights: Tensor, *, group: GroupLike = None) -> Tensor:
    """For each token of this rank, the sum of its experts' rows of z with its weights [count, k]."""
    warn_once("moe_combine")
    name = _name(group)
    everyones = all_gather(weights.to(z.dtype), group=name)
    there = source >= 0
    index = source.clamp(min=0)
    factor = torch.where(there, everyones[index, slot.clamp(min=0)], torch.zeros((), dtype=z.dtype))
    total = torch.zeros(everyones.shape[0], z.shape[1], dtype=torch.float32, device=z.device)
    total = total.index_add(0, index, (z * factor[:, None]).float())
    return reduce_scatter(total.to(z.dtype), name)


class MoELayer(nn.Module):
    """A router, and experts of the form down(silu(gate(x)) up(x)), dealt out over the group: Mixtral's block.

    x is [tokens of this rank, hidden], as many on every rank. The router is the same on all ranks, and its gradient of this rank's tokens, until
    `finish_gradients`. Every rank initialises its own experts, so seed each rank differently.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, *, group: GroupLike = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        chosen = get_group(group)
        self.group, self.experts_total, self.top_k = chosen.name, experts, top_k
        count = base.experts_of_rank(chosen, experts)[1]
        self.router = nn.Linear(hidden, experts, bias=False, device=device, dtype=dtype)
        self.gate_up = nn.Parameter(torch.empty(count, hidden, 2 * intermediate, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, intermediate, hidden, device=device, dtype=dtype))
        with torch.no_grad():
            self.gate_up.uniform_(-1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
            self.down.uniform_(-1 / math.sqrt(intermediate), 1 / math.sqrt(intermediate))
        mark_sequence_parallel(self.router)

    def extra_repr(self) -> str:
        return f"experts={self.experts_total}, top_k={self.top_k}, on this rank {self.gate_up.shape[0]}"

    def choose(self, probabilities: Tensor) -> Tensor:
        """The experts of each token, [count, top_k]; another choice may override it."""
        return probabilities.topk(self.top_k, -1)[1]

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).float().softmax(-1)
        ids = self.choose(probabilities)
        weights = probabilities.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        y, source, slot, offsets = moe_dispatch_gemm(x, ids, self.gate_up, experts_total=self.experts_total, group=self.group)
        gate, up = y.chunk(2, -1)
        active = nn.functional.silu(gate) * up
        bounds = offsets.tolist()
        parts = [active[begin:end] @ self.down[i] for i, (begin, end) in enumerate(zip(bounds, bounds[1:]))]
        z = torch.cat([*parts, active.new_zeros(active.shape[0] - bounds[-1], x.shape[1])])
        return moe_combine(z, source, slot, weights, group=self.group)


@torch.library.custom_op(
    "mkernel::moe_dispatch_gemm",
    mutates_args=(),
    schema="(Tensor tokens, Tensor ids, Tensor experts, int experts_total, str group) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _moe_dispatch_gemm(tokens: Tensor, ids: Tensor, experts: Tensor, experts_total: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = get_group(group)
    base.check_shapes(chosen, tokens.shape, ids.shape, ids.shape, experts.shape, experts_total)
    if tokens.dtype != experts.dtype or tokens.dtype not in _DTYPES:
        raise invalid(f"moe: tokens of {tokens.dtype} and experts of {experts.dtype}: both must be torch.bfloat16 or torch.float16", chosen.rank)
    if {x.device.type for x in (tokens, ids, experts)} != {"cpu"}:
        raise Error(ErrorCode.UNSUPPORTED, "moe_dispatch_gemm runs on CPUs only, so far: give it tensors of the host", chosen.rank)
    tokens, ids, experts = tokens.contiguous(), ids.to(torch.int32).contiguous(), experts.contiguous()
    capacity = base.rows_at_most(tokens.shape[0] * chosen.world, ids.shape[1], experts.shape[0])
    y = torch.empty(capacity, experts.shape[2], dtype=tokens.dtype)
    weights = torch.ones(ids.shape, dtype=torch.float32)  # they stay with the caller
    addresses = [x.data_ptr() for x in (tokens, ids, weights, experts, y)]
    _, offsets, rows = base.launch(
        chosen, addresses, tokens.shape, ids.shape[1], experts.shape, experts_total, capacity, tokens.shape[0], _DTYPES[tokens.dtype], _c.KN
    )
    y[len(rows) :] = 0
    source, slot = torch.full((capacity,), -1), torch.full((capacity,), -1)
    source[: len(rows)] = torch.from_numpy(rows["rank"].astype("i8") * tokens.shape[0] + rows["token"])
    slot[: len(rows)] = torch.from_numpy(rows["slot"].astype("i8"))
    return y, source, slot, torch.from_numpy(offsets.astype("i8"))


@_moe_dispatch_gemm.register_fake
def _(tokens: Tensor, ids: Tensor, experts: Tensor, experts_total: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    capacity = base.rows_at_most(tokens.shape[0] * get_group(group).world, ids.shape[1], experts.shape[0])
    index = ids.new_empty((capacity,), dtype=torch.int64)
    return tokens.new_empty((capacity, experts.shape[2])), index, torch.empty_like(index), ids.new_empty((experts.shape[0] + 1,), dtype=torch.int64)


@torch.library.custom_op(
    "mkernel::moe_dispatch_gemm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor tokens, Tensor experts, Tensor source, Tensor offsets, str group) -> (Tensor, Tensor)",
)
def _backward(dy: Tensor, tokens: Tensor, experts: Tensor, source: Tensor, offsets: Tensor, group: str) -> tuple[Tensor, Tensor]:
    warn_once("moe_dispatch_gemm")
    everyones = all_gather(tokens, group=group)
    total = torch.zeros(everyones.shape, dtype=torch.float32)
    dexperts = torch.zeros_like(experts)
    bounds = offsets.tolist()
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        rows = source[begin:end]
        dexperts[i] = everyones[rows].t() @ dy[begin:end]
        total.index_add_(0, rows, dy[begin:end].float() @ experts[i].float().t())
    return reduce_scatter(total.to(tokens.dtype), group), dexperts


@_backward.register_fake
def _(dy: Tensor, tokens: Tensor, experts: Tensor, source: Tensor, offsets: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(experts)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    tokens, _, experts, _, ctx.group = inputs
    ctx.save_for_backward(tokens, experts, output[1], output[3])


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple:
    dtokens, dexperts = torch.ops.mkernel.moe_dispatch_gemm_backward(dy, *ctx.saved_tensors, ctx.group)
    return dtokens, None, dexperts, None, None


_moe_dispatch_gemm.register_autograd(_gradients, setup_context=_save)
