"""Mixture of experts: `mkernel::moe_dispatch_gemm` and `mkernel::gemm_combine`.

Their gradients are composed: the ranks gather the tokens, or their gradients, and multiply locally. Gradients of tokens then return by
GEMM+Combine. Where the library has no kernel of it for GPUs, it is composed, too. Every rank has as many tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import numpy
import torch
from torch import Tensor

from .. import _c, gradients
from .. import moe as base
from ..errors import Error, ErrorCode, invalid
from ..group import Group, GroupLike, get_group
from .composed import all_gather, dense, in_own_types, on_device, operator, reduce_scatter, warn_once
from .operators import _DTYPES, _name, group_of, name_and_world


class Routed(NamedTuple):
    """The rows of this rank's experts. The i-th expert of the rank has the rows offsets[i] to offsets[i + 1] of y.

    `rows` has for each row its token: (rank, token of that rank, slot of its experts), and `weight` its weight, with a gradient. y has room for
    any routing: the rows behind the last offset are zero, with the weight 0 and the token (-1, -1, -1).
    """

    y: Tensor
    weight: Tensor
    rows: Tensor
    offsets: Tensor
    ids: Tensor
    experts_total: int


def moe_dispatch_gemm(tokens: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, *, experts_total: int, group: GroupLike = None) -> Routed:
    """Each token times the weights of its experts, on the ranks that have them.

    `tokens` is [count, hidden], `ids` [count, k] with -1 for none, `weights` [count, k], `experts` [experts of this rank, hidden, features]. A token
    names an expert once at most.
    """
    y, weight, rows, offsets = torch.ops.mkernel.moe_dispatch_gemm(tokens, ids, weights, experts, experts_total, *name_and_world(group))
    return Routed(y, weight, rows, offsets, ids, experts_total)


def gemm_combine(y: Tensor, routed: Routed, experts: Tensor, *, residual: Optional[Tensor] = None, group: GroupLike = None) -> Tensor:
    """For each token of this rank the sum over its experts of weight (row of y) (the expert's weights), plus the residual.

    `y` is what became of routed.y, and `experts` [experts of this rank, features, hidden].
    """
    return torch.ops.mkernel.gemm_combine(
        y, routed.weight, routed.rows, routed.offsets, routed.ids, experts, residual, routed.experts_total, _name(group)
    )


# --- Dispatch ---------------------------------------------------------------------------------------


@operator(
    "moe_dispatch_gemm",
    "(Tensor tokens, Tensor ids, Tensor weights, Tensor experts, int experts_total, str group, int world) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _moe_dispatch_gemm(
    tokens: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, experts_total: int, group: str, world: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = group_of("moe_dispatch_gemm", group, world)
    base.check_shapes(chosen, tokens.shape, ids.shape, weights.shape, experts.shape, experts_total)
    dtype = _checked(chosen, "moe_dispatch_gemm", tokens, experts, ids, weights)
    tokens, experts = dense(tokens), dense(experts)
    ids, weights = ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
    shape = base.dispatch_shape(chosen, experts.shape, experts_total, ids.shape[1], dtype)
    capacity = _capacity(world, ids, experts)
    if tokens.is_cuda:
        return _dispatch_on_device(chosen, tokens, ids, weights, experts, shape, capacity)
    y = tokens.new_empty((capacity, experts.shape[2]))
    addresses = [x.data_ptr() for x in (tokens, ids, weights, experts, y)]
    _, offsets, found = base.dispatch(chosen, addresses, len(tokens), shape, capacity, len(tokens))
    y[len(found) :] = 0
    factor, rows = weights.new_zeros(capacity), ids.new_full((capacity, 3), -1)
    # The rows as words: rank, token and slot, and then the bits of the weight.
    words = torch.from_numpy(found.view("i4").reshape(-1, 4).copy())
    rows[: len(found)] = words[:, :3]
    factor[: len(found)] = words[:, 3].contiguous().view(torch.float32)
    return y, factor, rows, torch.from_numpy(offsets.astype("i4"))


def _dispatch_on_device(
    group: Group, tokens: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, shape: dict[str, int], capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # A launch that refuses its routing computes nothing, and its host hears of it late: then not-a-number says it.
    y = tokens.new_full((capacity, experts.shape[2]), math.nan)
    arguments = _c.MoeArguments(
        tokens=tokens.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        count=len(tokens),
        expert_weights=experts.data_ptr(),
        y=y.data_ptr(),
        capacity=capacity,
    )
    kept: list[Tensor] = []

    def ask(operator: Any) -> None:
        offsets = on_device(group, operator, _c.EXPERT_OFFSETS, (len(experts) + 1,), tokens.device)
        kept.extend((offsets.clone(), on_device(group, operator, _c.ROWS, (capacity, 4), tokens.device).clone()))

    with torch.cuda.device(tokens.device):
        group.launch("moe", shape, max(1, len(tokens)), arguments, device=tokens.device.index, stream=torch.cuda.current_stream().cuda_stream, after=ask)
        offsets, words = kept
        nothing = torch.arange(capacity, device=y.device) >= offsets[-1]
        rows = words[:, :3].masked_fill(nothing[:, None], -1)
        factor = words[:, 3].contiguous().view(torch.float32).masked_fill(nothing, 0)
        return y.masked_fill_(nothing[:, None], 0), factor, rows, offsets


@_moe_dispatch_gemm.register_fake
def _(
    tokens: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, experts_total: int, group: str, world: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    capacity = _capacity(world, ids, experts)
    return (
        tokens.new_empty((capacity, experts.shape[2])),
        weights.new_empty((capacity,), dtype=torch.float32),
        ids.new_empty((capacity, 3), dtype=torch.int32),
        ids.new_empty((experts.shape[0] + 1,), dtype=torch.int32),
    )


@operator(
    "moe_dispatch_gemm_backward",
    "(Tensor dy, Tensor? dweight, Tensor tokens, Tensor ids, Tensor experts, Tensor rows, Tensor offsets, int experts_total, str group)"
    " -> (Tensor, Tensor, Tensor)",
    waits=True,
)
def _dispatch_backward(
    dy: Tensor,
    dweight: Optional[Tensor],
    tokens: Tensor,
    ids: Tensor,
    experts: Tensor,
    rows: Tensor,
    offsets: Tensor,
    experts_total: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    warn_once("moe_dispatch_gemm")
    chosen = get_group(group)
    dy, everyones, source = dy.contiguous(), all_gather(tokens, chosen), _source(rows, len(tokens))
    dexperts = torch.zeros_like(experts, memory_format=torch.contiguous_format)
    for i, mine in enumerate(_slices(offsets)):
        dexperts[i] = everyones[source[mine]].t() @ dy[mine]
    one = dy.new_ones(len(rows), dtype=torch.float32)
    dtokens = _combine(chosen, dy, one, rows, offsets, ids, experts, None, experts_total, transposed=True)
    dweights = dy.new_zeros(ids.shape, dtype=torch.float32)
    if dweight is not None:
        # In float32, whose range a weight's gradient may need; one rank alone adds to each. Rows are multiples of 16 bytes.
        parts = dy.new_zeros((len(everyones), -(-ids.shape[1] // 4) * 4), dtype=torch.float32)
        there = slice(0, int(offsets[-1]))
        parts[source[there], rows[there, 2].long()] = dweight[there]
        dweights = reduce_scatter(parts, chosen)[:, : ids.shape[1]].contiguous()
    return dtokens, dweights, dexperts


@_dispatch_backward.register_fake
def _(dy: Tensor, dweight: Optional[Tensor], tokens: Tensor, ids: Tensor, experts: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.new_empty(tokens.shape), tokens.new_empty(ids.shape, dtype=torch.float32), experts.new_empty(experts.shape)


def _save_dispatch(ctx: Any, inputs: tuple, output: tuple) -> None:
    tokens, ids, weights, experts, ctx.experts_total, ctx.group, _ = inputs
    _, _, rows, offsets = output
    ctx.mark_non_differentiable(rows, offsets)
    ctx.set_materialize_grads(False)
    ctx.dtype = weights.dtype
    ctx.save_for_backward(tokens, ids, experts, rows, offsets)


def _dispatch_gradients(ctx: Any, dy: Optional[Tensor], dweight: Optional[Tensor], *_: Any) -> tuple:
    tokens, ids, experts, rows, offsets = ctx.saved_tensors
    if dy is None:
        dy = tokens.new_zeros((rows.shape[0], experts.shape[2]))
    # Only where it is asked for does a gradient of the weights travel.
    wanted = dweight if ctx.needs_input_grad[2] else None
    dtokens, dweights, dexperts = torch.ops.mkernel.moe_dispatch_gemm_backward(
        dy, wanted, tokens, ids, experts, rows, offsets, ctx.experts_total, ctx.group
    )
    return dtokens, None, dweights.to(ctx.dtype) if ctx.needs_input_grad[2] else None, dexperts, None, None, None


_moe_dispatch_gemm.register_autograd(in_own_types(_dispatch_gradients), setup_context=_save_dispatch)


# --- Combine ----------------------------------------------------------------------------------------


@operator(
    "gemm_combine",
    "(Tensor y, Tensor weight, Tensor rows, Tensor offsets, Tensor ids, Tensor experts, Tensor? residual, int experts_total, str group) -> Tensor",
    waits=True,  # where it is composed
)
def _gemm_combine(
    y: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    ids: Tensor,
    experts: Tensor,
    residual: Optional[Tensor],
    experts_total: int,
    group: str,
) -> Tensor:
    chosen = get_group(group)
    base.check_combine(chosen, y.shape, rows.shape[0], experts.shape, experts_total)
    _checked(chosen, "gemm_combine", y, experts, weight, rows, offsets, ids)
    out = (ids.shape[0], experts.shape[2])
    if residual is not None and (tuple(residual.shape) != out or residual.dtype != y.dtype or residual.device != y.device):
        raise invalid(f"gemm_combine: residual is {tuple(residual.shape)} of {residual.dtype} and the result {out} of {y.dtype}", chosen.rank)
    return _combine(chosen, y, weight, rows, offsets, ids, experts, residual, experts_total)


@_gemm_combine.register_fake
def _(y: Tensor, weight: Tensor, rows: Tensor, offsets: Tensor, ids: Tensor, experts: Tensor, *_: Any) -> Tensor:
    return y.new_empty((ids.shape[0], experts.shape[2]))


@operator(
    "gemm_combine_backward",
    "(Tensor dout, Tensor y, Tensor weight, Tensor rows, Tensor offsets, Tensor experts, str group) -> (Tensor, Tensor, Tensor)",
    waits=True,
)
def _combine_backward(
    dout: Tensor, y: Tensor, weight: Tensor, rows: Tensor, offsets: Tensor, experts: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    warn_once("gemm_combine")
    everyones, source = all_gather(dout, get_group(group)), _source(rows, len(dout))
    dy = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
    dweight = torch.zeros_like(weight)
    dexperts = torch.zeros_like(experts, memory_format=torch.contiguous_format)
    for i, mine in enumerate(_slices(offsets)):
        of_y, dweight[mine], of_expert = gradients.combine_of_expert(everyones[source[mine]].float(), y[mine].float(), weight[mine], experts[i].float())
        dy[mine], dexperts[i] = of_y.to(y.dtype), of_expert.to(experts.dtype)
    return dy, dweight, dexperts


@_combine_backward.register_fake
def _(dout: Tensor, y: Tensor, weight: Tensor, rows: Tensor, offsets: Tensor, experts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape), experts.new_empty(experts.shape)


def _save_combine(ctx: Any, inputs: tuple, output: Tensor) -> None:
    y, weight, rows, offsets, _, experts, residual, _, ctx.group = inputs
    ctx.save_for_backward(y, weight, rows, offsets, experts)


def _combine_gradients(ctx: Any, dout: Tensor) -> tuple:
    dresidual = dout if ctx.needs_input_grad[6] else None
    if not any(ctx.needs_input_grad[:6]):
        return (None,) * 6 + (dresidual, None, None)
    y, weight, rows, offsets, experts = ctx.saved_tensors
    dy, dweight, dexperts = torch.ops.mkernel.gemm_combine_backward(dout, y, weight, rows, offsets, experts, ctx.group)
    return dy, dweight, None, None, None, dexperts, dresidual, None, None


_gemm_combine.register_autograd(in_own_types(_combine_gradients), setup_context=_save_combine)


# --- What both share --------------------------------------------------------------------------------


def _combine(
    group: Group,
    y: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    ids: Tensor,
    experts: Tensor,
    residual: Optional[Tensor],
    experts_total: int,
    transposed: bool = False,
) -> Tensor:
    """GEMM+Combine. `transposed`: by the experts' weights transposed, and sums travel in float32, for a gradient."""
    hidden = experts.shape[1 if transposed else 2]
    y, experts, ids, offsets = dense(y), dense(experts), ids.to(torch.int32).contiguous(), offsets.contiguous()
    residual = None if residual is None else dense(residual)
    shape = base.combine_shape(experts.shape, experts_total, ids.shape[1], _DTYPES[y.dtype], transposed)
    addresses = {"y": y.data_ptr(), "expert_weights": experts.data_ptr()}
    if residual is not None:
        addresses["residual"] = residual.data_ptr()
    if y.is_cuda:
        made = _combine_on_device(group, addresses, y.new_full((len(ids), hidden), math.nan), weight, rows, offsets, ids, shape)
        return _combine_composed(group, y, weight, rows, offsets, ids, experts, residual, transposed) if made is None else made
    out = y.new_empty((len(ids), hidden))
    count = int(offsets[-1])
    found = numpy.empty(count, dtype=base.ROW)
    for i, name in enumerate(("rank", "token", "slot")):
        found[name] = rows[:count, i].numpy()
    found["weight"] = weight[:count].detach().numpy()
    addresses["out"] = out.data_ptr()
    base.combine(group, addresses, found, offsets.numpy().astype("u4"), ids.numpy(), shape, len(ids))
    return out


#: Kinds of GEMM+Combine that the library said it cannot do on GPUs, by group; it says so on all ranks.
_without_kernel: set[tuple] = set()


def _combine_on_device(
    group: Group, addresses: dict[str, int], out: Tensor, weight: Tensor, rows: Tensor, offsets: Tensor, ids: Tensor, shape: dict[str, int]
) -> Optional[Tensor]:
    """GEMM+Combine on the current stream; None where the library has no kernel. A launch that refuses its rows leaves not-a-number."""
    kind = (group.name, shape["dtype"], shape["b_layout"], shape["partials"])
    if kind in _without_kernel:
        return None
    words = torch.cat([rows, weight.detach().contiguous().view(torch.int32)[:, None]], 1)
    arguments = _c.CombineArguments(
        rows=words.data_ptr(),
        row_count=len(words),
        expert_offsets=offsets.data_ptr(),
        expert_offset_count=len(offsets),
        ids=ids.data_ptr(),
        count=len(ids),
        out=out.data_ptr(),
        **addresses,
    )
    try:
        with torch.cuda.device(out.device):
            group.launch("combine", shape, max(1, len(ids)), arguments, device=out.device.index, stream=torch.cuda.current_stream().cuda_stream)
    except Error as error:
        if error.code != ErrorCode.UNSUPPORTED:
            raise
        _without_kernel.add(kind)
        return None
    return out


def _combine_composed(
    group: Group,
    y: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    ids: Tensor,
    experts: Tensor,
    residual: Optional[Tensor],
    transposed: bool,
) -> Tensor:
    """The same by local products and a reduce-scatter over the tokens of all ranks."""
    warn_once("gemm_combine on GPUs", "operator")
    source = _source(rows, len(ids))
    total = torch.zeros(len(ids) * group.world, experts.shape[1 if transposed else 2], dtype=torch.float32, device=y.device)
    for i, mine in enumerate(_slices(offsets)):
        product = y[mine] @ (experts[i].t() if transposed else experts[i])
        total.index_add_(0, source[mine], product.float() * weight[mine, None])
    out = reduce_scatter(total.to(y.dtype), group)
    return out if residual is None else out + residual


def _capacity(world: int, ids: Tensor, experts: Tensor) -> int:
    return base.rows_at_most(ids.shape[0] * world, ids.shape[1], experts.shape[0])


def _source(rows: Tensor, count: int) -> Tensor:
    """By row: its token among those of all ranks, one rank after the other."""
    return rows[:, 0].long() * count + rows[:, 1]


def _slices(offsets: Tensor) -> list[slice]:
    bounds = offsets.tolist()
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:])]


def _checked(group: Group, what: str, x: Tensor, experts: Tensor, *others: Tensor) -> int:
    """The library's number of the element type."""
    if x.dtype != experts.dtype or x.dtype not in _DTYPES:
        raise invalid(f"{what}: elements of {x.dtype} and experts of {experts.dtype}: both must be torch.bfloat16 or torch.float16", group.rank)
    devices = {str(one.device) for one in (x, experts, *others)}
    if len(devices) > 1 or x.device.type not in ("cpu", "cuda"):
        raise invalid(f"{what}: tensors on {', '.join(sorted(devices))}: all must be on CPUs or on one GPU", group.rank)
    return _DTYPES[x.dtype]
