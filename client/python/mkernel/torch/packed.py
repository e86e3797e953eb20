"""Ring Attention over packed sequences of different lengths: `mkernel::ring_attention_packed`. Its gradient is composed, as `attention.py` says."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import gradients
from .. import packed as base
from ..errors import Error, ErrorCode, invalid
from ..group import GroupLike, get_group
from ..ring import check_shapes
from .composed import all_gather, dense, in_own_types, operator, reduce_scatter, warn_once
from .operators import _DTYPES, _name


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    is_causal: bool = False,
    scale: Optional[float] = None,
    *,
    rows_max: Optional[int] = None,
    group: GroupLike = None,
) -> Tensor:
    """Attention within each of many sequences, each of which is spread over all ranks: FlashAttention's varlen form.

    Tensors are [rows, heads, dimension], with this rank's `mkernel.packed_rows`. Rows behind those have the result 0. `cu_seqlens` (int32, on the same
    device) has where each sequence begins among the rows of all ranks, and where the last one ends. `rows_max` is at least that end, the same on all
    ranks. On a GPU it must be given: the host does not read `cu_seqlens`, so a captured graph may be replayed with others. The gradient is composed,
    like that of `attention`, and its host does read `cu_seqlens`: it cannot be captured.
    """
    if rows_max is None:
        if cu_seqlens.is_cuda:
            raise Error(ErrorCode.INVALID_ARGUMENT, "mkernel.torch.attention_varlen: rows_max is missing; on a GPU the host must know it")
        rows_max = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.mkernel.ring_attention_packed(query, key, value, cu_seqlens, rows_max, is_causal, factor, _name(group))[0]


@operator(
    "ring_attention_packed",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int rows_max, bool causal, float scale, str group) -> (Tensor, Tensor)",
)
def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rows_max: int, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    """The results are the output, like q, and the log-sum-exp [rows, heads]."""
    chosen = get_group(group)
    what = "ring_attention_packed"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise invalid(f"{what}: q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: they must be [rows, heads, dimension]", chosen.rank)
    check_shapes(chosen, *((1, x.shape[1], x.shape[0], x.shape[2]) for x in (q, k, v)))
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise invalid(f"{what}: elements of {q.dtype}, {k.dtype}, {v.dtype}: all must be torch.bfloat16 or all torch.float16", chosen.rank)
    if not q.device == k.device == v.device == cu_seqlens.device or q.device.type not in ("cpu", "cuda"):
        raise invalid(f"{what}: tensors on {q.device}, {k.device}, {v.device}, {cu_seqlens.device}: all must be on CPUs or on one GPU", chosen.rank)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise invalid(f"{what}: cu_seqlens is {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}: it must be two or more torch.int32", chosen.rank)
    rows, heads, size = q.shape
    # The launch writes no row behind the sequences, and the host does not know how many there are.
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_zeros((rows, heads), dtype=torch.float32)
    # A rank may have no row; a GPU's tensors have memory all the same.
    there = [x if rows else x.new_empty((1, *x.shape[1:])) for x in (dense(q), dense(k), dense(v), out, lse)]
    starts = cu_seqlens.contiguous()
    if q.device.type == "cpu":  # where the library takes the end itself, and the host knows it
        end = int(starts[-1])
        if end > rows_max:
            raise invalid(f"{what}: the sequences end at {end}, and rows_max is {rows_max}", chosen.rank)
        rows_max = end
    tensors = {name: x.data_ptr() for name, x in zip(("q", "k", "v", "out", "lse"), there)}
    shape = dict(query_heads=heads, key_heads=k.shape[1], head_dim=size, causal=int(causal), dtype=_DTYPES[q.dtype])
    arguments = (chosen, tensors, shape, starts.data_ptr(), starts.numel() - 1, rows_max, max(rows, 1), scale)
    if q.device.type == "cpu":
        base.launch_packed(*arguments)
        return out, lse
    with torch.cuda.device(q.device):
        base.launch_packed(*arguments, device=q.device.index, stream=torch.cuda.current_stream().cuda_stream)
    return out, lse


@_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rows_max: int, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(
    "ring_attention_packed_backward",
    "(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor out, Tensor lse, bool causal, float scale, str group) "
    "-> (Tensor, Tensor, Tensor)",
    waits=True,
)
def _backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    warn_once("ring_attention_packed")
    chosen = get_group(group)
    starts = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in zip(starts, starts[1:])]
    of_ranks = [torch.from_numpy(base.packed_rows(lengths, causal=causal, group=chosen, rank=r)).to(q.device) for r in range(chosen.world)]
    most = max(len(rows) for rows in of_ranks)
    # Rows behind the sequences have the gradient 0.
    dq, of_k, of_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if most == 0:
        return dq, of_k, of_v
    rows, (_, key_heads, size) = len(of_ranks[chosen.rank]), k.shape
    # Ranks have different numbers of rows; gathers want the same.
    padded = k.new_zeros((most, 2, key_heads, size))
    padded[:rows] = torch.stack([k[:rows], v[:rows]], 1)
    everyone = all_gather(padded.reshape(most, -1), chosen).view(chosen.world * most, 2, key_heads, size)
    places = torch.empty(starts[-1], dtype=torch.int64, device=q.device)  # of each position, among everyone's rows
    for r, positions in enumerate(of_ranks):
        places[positions] = r * most + torch.arange(len(positions), device=q.device)
    whole = everyone[places]
    parts = torch.zeros(whole.shape, dtype=torch.float32, device=q.device)
    each = q.shape[1] // key_heads
    first = 0
    for begin, end in zip(starts, starts[1:]):
        positions = of_ranks[chosen.rank][first:] - begin
        mine = slice(first, first + int((positions < end - begin).sum()))
        if mine.start == mine.stop:
            continue
        seen = torch.arange(end - begin, device=q.device)
        hidden = positions[: mine.stop - mine.start, None] < seen[None, :] if causal else None
        for head in range(q.shape[1]):
            of = head // each
            one = (q[mine, head], whole[begin:end, 0, of], whole[begin:end, 1, of], out[mine, head], lse[mine, head], dout[mine, head], dlse[mine, head])
            of_q, dk, dv = gradients.attention_of_head(torch, [x.float() for x in one], scale, hidden)
            dq[mine, head] = of_q.to(q.dtype)
            parts[begin:end, 0, of] += dk
            parts[begin:end, 1, of] += dv
        first = mine.stop
    of_all = torch.zeros(everyone.shape, dtype=torch.float32, device=q.device)
    of_all[places] = parts
    mine_of_all = reduce_scatter(of_all.reshape(chosen.world * most, -1).to(k.dtype), chosen).view(most, 2, key_heads, size)
    of_k[:rows], of_v[:rows] = mine_of_all[:rows].unbind(1)
    return dq, of_k, of_v


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, cu_seqlens, _, ctx.causal, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple:
    found = torch.ops.mkernel.ring_attention_packed_backward(dout, dlse, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.group)
    return (*found, None, None, None, None, None)


_packed.register_autograd(in_own_types(_gradients), setup_context=_save)
