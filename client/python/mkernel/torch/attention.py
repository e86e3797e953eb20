"""Ring Attention for context parallelism: `mkernel::ring_attention`, and `attention` with the signature of PyTorch's own.

The forward pass is the fused operator. The backward pass is composed: it gathers all keys and values, computes again with the
log-sum-exp that the forward pass has kept, in float32, and scatters the sums of the gradients of keys and values.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import gradients
from .. import ring as base
from ..errors import Error, ErrorCode, invalid
from ..group import GroupLike, get_group
from .composed import all_gather, in_own_types, misaligned, operator, reduce_scatter, warn_once
from .operators import _DTYPES, _name


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
    return torch.ops.mkernel.ring_attention(query, key, value, is_causal, factor, _name(group))[0]


def sequence_shard(x: Tensor, dim: int, *, is_causal: bool = False, group: GroupLike = None) -> Tensor:
    """This rank's rows of a whole sequence, in the order that `attention` takes them."""
    return x.index_select(dim, torch.from_numpy(base.sequence_rows(x.shape[dim], causal=is_causal, group=group)).to(x.device))


@operator("ring_attention", "(Tensor q, Tensor k, Tensor v, bool causal, float scale, str group) -> (Tensor, Tensor)")
def _ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    """q is [batch, heads, rows, dimension]; the results are the output, like q, and the log-sum-exp [batch, heads, rows]. Both lie row by row."""
    chosen = get_group(group)
    base.check_shapes(chosen, q.shape, k.shape, v.shape)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise invalid(f"ring_attention: elements of {q.dtype}, {k.dtype}, {v.dtype}: all must be torch.bfloat16 or all torch.float16", chosen.rank)
    if not q.device == k.device == v.device or q.device.type not in ("cpu", "cuda"):
        raise invalid(f"ring_attention: tensors on {q.device}, {k.device}, {v.device}: all must be on CPUs or on one GPU", chosen.rank)
    batch, heads, rows, size = q.shape
    taken = [_as_taken(x) for x in (q, k, v)]  # copies live until the launch; on a GPU they are freed in the order of the same stream
    out, lse = _like_output(q)
    tensors = {"out": out.data_ptr(), "lse": lse.data_ptr()}
    for name, x in zip("qkv", taken):
        tensors[name] = x.data_ptr()
        tensors.update({f"{name}_batch_stride": x.stride(0), f"{name}_stride": x.stride(2)})
        if x.is_cuda:
            tensors[f"{name}_head_stride"] = x.stride(1)
    shape = dict(query_heads=heads, key_heads=k.shape[1], head_dim=size, causal=int(causal), dtype=_DTYPES[q.dtype], batch=batch)
    if q.device.type == "cpu":
        base.launch(chosen, tensors, shape, rows * chosen.world, scale)
        return out, lse
    with torch.cuda.device(q.device):
        base.launch(chosen, tensors, shape, rows * chosen.world, scale, device=q.device.index, stream=torch.cuda.current_stream().cuda_stream)
    return out, lse


def _as_taken(x: Tensor) -> Tensor:
    """x where the library can read it: on a GPU in any order but for the dimension, on CPUs head after head within a row."""
    batch, heads, rows, size = x.stride()
    # A stride of 0 would mean the default, so a repeated tensor is copied; sizes of 1 have any stride.
    fits = all(stride % 8 == 0 for stride in (batch, heads, rows)) if x.is_cuda else heads == x.shape[3]
    if size == 1 and min(batch, heads, rows) > 0 and fits and not misaligned(x):
        return x
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _like_output(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, size = q.shape
    return q.new_empty((batch, rows, heads, size)).transpose(1, 2), q.new_empty((batch, rows, heads), dtype=torch.float32).transpose(1, 2)


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: str) -> tuple[Tensor, Tensor]:
    return _like_output(q)


@operator(
    "ring_attention_backward",
    "(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale, str group) -> (Tensor, Tensor, Tensor)",
    waits=True,
)
def _backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    warn_once("ring_attention")
    chosen = get_group(group)
    batch, key_heads, rows, size = k.shape
    seq = rows * chosen.world
    packed = torch.stack([k, v]).permute(3, 1, 0, 2, 4)  # [rows, batch, k and v, heads, dimension]
    everyone = all_gather(packed.reshape(rows, -1), chosen).view(seq, batch, 2, key_heads, size)
    everyones_rows = [torch.from_numpy(base.sequence_rows(seq, causal=causal, group=chosen, rank=r)) for r in range(chosen.world)]
    mine, theirs = everyones_rows[chosen.rank].to(q.device), torch.cat(everyones_rows).to(q.device)
    hidden = mine[:, None] < theirs[None, :] if causal else None
    each = q.shape[1] // key_heads
    dq = q.new_empty((batch, rows, q.shape[1], size)).transpose(1, 2)
    parts = torch.zeros(everyone.shape, dtype=torch.float32, device=q.device)
    for b in range(batch):
        for head in range(q.shape[1]):
            of = head // each
            one = (q[b, head], everyone[:, b, 0, of], everyone[:, b, 1, of], out[b, head], lse[b, head], dout[b, head], dlse[b, head])
            of_q, dk, dv = gradients.attention_of_head(torch, [x.float() for x in one], scale, hidden)
            dq[b, head] = of_q.to(q.dtype)
            parts[:, b, 0, of] += dk
            parts[:, b, 1, of] += dv
    mine_of_all = reduce_scatter(parts.reshape(seq, -1).to(k.dtype), chosen).view(rows, batch, 2, key_heads, size)
    # Copies, each with its rows one after the other, also where they lie so: an operator's results must not share memory.
    of_k, of_v = (x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in mine_of_all.unbind(2))
    return dq, of_k, of_v


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_output(q)[0], _like_output(k)[0], _like_output(v)[0]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple:
    return (*torch.ops.mkernel.ring_attention_backward(dout, dlse, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.group), None, None, None)


_ring_attention.register_autograd(in_own_types(_gradients), setup_context=_save)
