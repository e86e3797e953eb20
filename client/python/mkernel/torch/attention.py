"""Ring Attention for context parallelism: `mkernel::ring_attention`, and `attention` with the signature of PyTorch's own.

The forward pass is the fused operator. The backward pass is composed: it gathers all keys and values, computes again with the
log-sum-exp that the forward pass has kept, in float32, and scatters the sums of the gradients of keys and values.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import attention as base
from ..errors import Error, ErrorCode, invalid
from ..group import GroupLike, get_group
from .composed import reduce_scatter, warn_once
from .operators import _DTYPES, _name, all_gather


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    *,
    group: GroupLike = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, over the sequences of all ranks of the group.

    Tensors are [batch, heads, rows, dimension], with this rank's rows of the sequence (`sequence_shard`). A causal sequence is dealt out so that all
    ranks have the same work. Other masks and dropout are refused.
    """
    if attn_mask is not None or dropout_p:
        raise Error(ErrorCode.UNSUPPORTED, "mkernel.torch.attention: attn_mask and dropout_p are not supported; is_causal is")
    if query.dim() != 4:
        raise invalid(f"mkernel.torch.attention: query is {tuple(query.shape)}, and must be [batch, heads, rows, dimension]")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise invalid(f"mkernel.torch.attention: {query.shape[1]} heads of queries and {key.shape[1]} of keys need enable_gqa=True")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = [
        torch.ops.mkernel.ring_attention(*(x[i].transpose(0, 1).contiguous() for x in (query, key, value)), is_causal, factor, _name(group))[0]
        for i in range(query.shape[0])
    ]
    return torch.stack(outputs).transpose(1, 2)


def sequence_shard(x: Tensor, dim: int, *, is_causal: bool = False, group: GroupLike = None) -> Tensor:
    """This rank's rows of a whole sequence, in the order that `attention` takes them."""
    return x.index_select(dim, torch.from_numpy(base.sequence_rows(x.shape[dim], causal=is_causal, group=group)).to(x.device))


@torch.library.custom_op(
    "mkernel::ring_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, bool causal, float scale, str group) -> (Tensor, Tensor)"
)
def _ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    chosen = get_group(group)
    base.check_shapes(chosen, q.shape, k.shape, v.shape)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise invalid(f"ring_attention: elements of {q.dtype}, {k.dtype}, {v.dtype}: all must be torch.bfloat16 or all torch.float16", chosen.rank)
    if not q.device == k.device == v.device or q.device.type not in ("cpu", "cuda"):
        raise invalid(f"ring_attention: tensors on {q.device}, {k.device}, {v.device}: all must be on CPUs or on one GPU", chosen.rank)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    addresses = [x.data_ptr() for x in (q, k, v, out, lse)]
    arguments = (chosen, addresses, q.shape, k.shape[1], q.shape[0] * chosen.world, _DTYPES[q.dtype], causal, scale)
    if q.device.type == "cpu":
        base.launch(*arguments)
        return out, lse
    with torch.cuda.device(q.device):
        # Copies made here are freed in the order of the same stream.
        base.launch(*arguments, device=q.device.index, stream=torch.cuda.current_stream().cuda_stream)
    return out, lse


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op(
    "mkernel::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale, str group) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    warn_once("ring_attention")
    chosen = get_group(group)
    rows, key_heads, size = k.shape
    seq = rows * chosen.world
    everyone = all_gather(torch.cat([k, v], 1).reshape(rows, -1), group=group).view(seq, 2, key_heads, size).float()
    everyones_rows = [torch.from_numpy(base.sequence_rows(seq, causal=causal, group=chosen, rank=r)) for r in range(chosen.world)]
    mine, theirs = everyones_rows[chosen.rank].to(q.device), torch.cat(everyones_rows).to(q.device)
    hidden = mine[:, None] < theirs[None, :] if causal else None
    each = q.shape[1] // key_heads
    dq = q.new_empty(q.shape, dtype=torch.float32)
    parts = torch.zeros_like(everyone)
    for head in range(q.shape[1]):
        keys, values = everyone[:, 0, head // each], everyone[:, 1, head // each]
        queries, dy = q[:, head].float(), dout[:, head].float()
        weights = (queries @ keys.T * scale - lse[:, head, None]).exp()
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0.0)
        parts[:, 1, head // each] += weights.T @ dy
        inner = (dy * out[:, head].float()).sum(1, keepdim=True) - dlse[:, head, None]
        dscores = weights * (dy @ values.T - inner) * scale
        dq[:, head] = dscores @ keys
        parts[:, 0, head // each] += dscores.T @ queries
    dk, dv = reduce_scatter(parts.reshape(seq, -1).to(k.dtype), group).view(rows, 2, key_heads, size).unbind(1)
    return dq.to(q.dtype), dk.contiguous(), dv.contiguous()


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple:
    return (*torch.ops.mkernel.ring_attention_backward(dout, dlse, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.group), None, None, None)


_ring_attention.register_autograd(_gradients, setup_context=_save)
