"""Ring Attention over packed sequences of different lengths: `mkernel::ring_attention_packed`. It has no gradient."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .. import packed as base
from ..errors import Error, ErrorCode, invalid
from ..group import GroupLike, get_group
from ..ring import check_shapes
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

    Tensors are [rows, heads, dimension], with this rank's `mkernel.packed_rows`. `cu_seqlens` (int32, on the same device) has where each sequence begins
    among the rows of all ranks, and where the last one ends. `rows_max` is at least that end, the same on all ranks. On a GPU it must be given: the
    host does not read `cu_seqlens`, so a captured graph may be replayed with others. Only the forward pass is there.
    """
    if rows_max is None:
        if cu_seqlens.is_cuda:
            raise Error(ErrorCode.INVALID_ARGUMENT, "mkernel.torch.attention_varlen: rows_max is missing; on a GPU the host must know it")
        rows_max = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.mkernel.ring_attention_packed(query, key, value, cu_seqlens, rows_max, is_causal, factor, _name(group))[0]


@torch.library.custom_op(
    "mkernel::ring_attention_packed",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int rows_max, bool causal, float scale, str group) -> (Tensor, Tensor)",
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
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((rows, heads), dtype=torch.float32)
    # A rank may have no row; a GPU's tensors have memory all the same.
    there = [x if rows else x.new_empty((1, *x.shape[1:])) for x in (q.contiguous(), k.contiguous(), v.contiguous(), out, lse)]
    starts = cu_seqlens.contiguous()
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
