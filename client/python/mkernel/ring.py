"""Ring Attention on NumPy arrays: one sequence, spread over the ranks of the group."""

from __future__ import annotations

from typing import Any, Optional

import numpy

from . import _c, arrays, gradients, operators
from .errors import invalid
from .group import Group, GroupLike, get_group


def sequence_rows(seq: int, *, causal: bool = False, group: GroupLike = None, rank: Optional[int] = None) -> numpy.ndarray:
    """The positions of the sequence that a rank has, in the order of its tensors; without `rank`, this one.

    Without a mask the sequence is dealt out in one part for each rank. Causal, rank r of W has the parts r and 2W-1-r of 2W, so that all ranks have
    the same work.
    """
    chosen = get_group(group)
    its = chosen.rank if rank is None else rank
    if not 0 <= its < chosen.world:
        raise invalid(f"sequence_rows: there is no rank {its}; the group has ranks 0 to {chosen.world - 1}", chosen.rank)
    if not 0 <= seq < 2**31:
        raise invalid(f"sequence_rows: a sequence of {seq} rows is not possible; 0 to {2**31 - 1} are", chosen.rank)
    parts = _c.sequence_rows_of_rank(seq, causal, chosen.world, its)
    return numpy.concatenate([numpy.arange(first, first + count) for first, count in parts])


def ring_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: Optional[float] = None, seq: Optional[int] = None, group: GroupLike = None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """softmax(scale Q K^T) V over the sequence of all ranks: (output, log-sum-exp of each query and head).

    `q` is [rows, heads, 64 or 128] and `k` and `v` are [rows, key heads, the same], of this rank's `sequence_rows`. Without `seq`, the length of
    the sequence, every rank has as many rows. `scale` is 1 / sqrt(head dimension) unless given.
    """
    arrays.refuse_torch(q, "ring_attention", "mkernel.attention")
    chosen = get_group(group)
    q, k, v = (arrays.tensor(x, f"ring_attention: {name}") for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if not q.ndim == k.ndim == v.ndim == 3:
        raise invalid(f"ring_attention: q is {q.shape}, k {k.shape} and v {v.shape}: they must be [rows, heads, dimension]", chosen.rank)
    check_shapes(chosen, *((1, x.shape[1], x.shape[0], x.shape[2]) for x in (q, k, v)))
    dtype = arrays.dtype_of(q.dtype)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise invalid(f"ring_attention: elements of {q.dtype}, {k.dtype} and {v.dtype}: they must be alike", chosen.rank)
    out, lse = numpy.empty_like(q), numpy.empty(q.shape[:2], dtype=numpy.float32)
    seq = q.shape[0] * chosen.world if seq is None else seq
    expected = len(sequence_rows(seq, causal=causal, group=chosen))
    if q.shape[0] != expected:
        raise invalid(f"ring_attention: q has {q.shape[0]} rows, and of {seq} this rank has {expected} (sequence_rows)", chosen.rank)
    addresses = {name: x.ctypes.data for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse))}
    shape = dict(query_heads=q.shape[1], key_heads=k.shape[1], head_dim=q.shape[2], causal=int(causal), dtype=dtype, batch=1)
    launch(chosen, addresses, shape, seq, scale)
    return out, lse


def ring_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    scale: Optional[float] = None,
    seq: Optional[int] = None,
    dlse: Optional[Any] = None,
    group: GroupLike = None,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """(dq, dk, dv) of ``ring_attention(q, k, v)``, which answered (out, lse); `dlse` is the gradient of lse, if it has one.

    It is composed: each rank gathers all keys and values, and the sums of their gradients are scattered.
    """
    chosen = get_group(group)
    rows, key_heads, size = k.shape
    seq = rows * chosen.world if seq is None else seq
    factor = size**-0.5 if scale is None else scale
    theirs = [sequence_rows(seq, causal=causal, group=chosen, rank=r) for r in range(chosen.world)]
    most = max(map(len, theirs))  # ranks may have a row more or less: all gather as many
    packed = numpy.zeros((most, 2, key_heads, size), dtype=k.dtype)
    packed[:rows, 0], packed[:rows, 1] = k, v
    gathered = operators.all_gather(packed.reshape(most, -1), group=chosen, m=most * chosen.world)
    there = numpy.concatenate([r * most + numpy.arange(len(mine)) for r, mine in enumerate(theirs)])
    everyone = arrays.to_float(gathered[there]).reshape(seq, 2, key_heads, size)
    hidden = theirs[chosen.rank][:, None] < numpy.concatenate(theirs)[None, :] if causal else None
    q_, out_, dout_ = (arrays.to_float(numpy.asarray(x)) for x in (q, out, dout))
    dlse_ = numpy.zeros_like(lse) if dlse is None else dlse
    dq, parts = numpy.empty(q.shape, numpy.float32), numpy.zeros((seq, 2, key_heads, size), numpy.float32)
    for head in range(q.shape[1]):
        of = head // (q.shape[1] // key_heads)
        one = (q_[:, head], everyone[:, 0, of], everyone[:, 1, of], out_[:, head], lse[:, head], dout_[:, head], dlse_[:, head])
        dq[:, head], dk, dv = gradients.attention_of_head(numpy, one, factor, hidden)
        parts[:, 0, of] += dk
        parts[:, 1, of] += dv
    spread = numpy.zeros((most * chosen.world, 2 * key_heads * size), k.dtype)
    spread[there] = arrays.to_like(parts.reshape(seq, -1), k.dtype)
    mine = operators.reduce_scatter(spread, group=chosen)[:rows].reshape(rows, 2, key_heads, size)
    return arrays.to_like(dq, q.dtype), mine[:, 0].copy(), mine[:, 1].copy()


def check_shapes(group: Group, q: Any, k: Any, v: Any) -> None:
    """Raises what is wrong with the shapes [batch, heads, rows, dimension] of q, k and v."""
    if not len(q) == len(k) == len(v) == 4 or tuple(k) != tuple(v) or (q[0], *q[2:]) != (k[0], *k[2:]):
        raise invalid(
            f"ring_attention: q is {tuple(q)}, k {tuple(k)} and v {tuple(v)}: they must be [batch, heads, rows, dimension], alike but for the heads",
            group.rank,
        )


def launch(group: Group, tensors: dict[str, int], shape: dict[str, int], seq: int, scale: Optional[float], device: int = -1, stream: int = 0) -> None:
    """Launches on `tensors`: addresses, and strides where the tensors have gaps."""
    if scale == 0:
        raise invalid("ring_attention: a scale of 0 makes all keys alike, and means the default to the library: leave scale out", group.rank)
    arguments = _c.RingArguments(seq=seq, scale=scale or 0.0, **tensors)
    group.launch("ring", shape, seq, arguments, device=device, stream=stream)
