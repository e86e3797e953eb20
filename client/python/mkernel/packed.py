"""Ring Attention over packed sequences of different lengths, on NumPy arrays."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy

from . import _c, arrays
from .errors import invalid
from .group import Group, GroupLike, get_group
from .ring import check_shapes, sequence_rows


def packed_rows(lengths: Sequence[int], *, causal: bool = False, group: GroupLike = None, rank: Optional[int] = None) -> numpy.ndarray:
    """The positions that a rank has among the rows of sequences that follow each other; without `rank`, this one.

    Each sequence is dealt out by itself, as `sequence_rows` says. A rank has its rows of the first, then those of the second, and so on.
    """
    starts = numpy.cumsum([0, *lengths])[:-1]
    rows = [start + sequence_rows(int(length), causal=causal, group=group, rank=rank) for start, length in zip(starts, lengths)]
    return numpy.concatenate(rows) if rows else numpy.arange(0)


def ring_attention_packed(
    q: Any, k: Any, v: Any, lengths: Sequence[int], *, causal: bool = False, scale: Optional[float] = None, group: GroupLike = None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """softmax(scale Q K^T) V within each sequence: (output, log-sum-exp of each query and head).

    `lengths` are those of the sequences over all ranks, the same on each; one may be 0. `q` is [rows, heads, 64 or 128] and `k` and `v` are
    [rows, key heads, the same], of this rank's `packed_rows`.
    """
    arrays.refuse_torch(q, "ring_attention_packed", "mkernel.torch.attention_varlen")
    chosen = get_group(group)
    q, k, v = (arrays.tensor(x, f"ring_attention_packed: {name}") for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if not q.ndim == k.ndim == v.ndim == 3:
        raise invalid(f"ring_attention_packed: q is {q.shape}, k {k.shape} and v {v.shape}: they must be [rows, heads, dimension]", chosen.rank)
    check_shapes(chosen, *((1, x.shape[1], x.shape[0], x.shape[2]) for x in (q, k, v)))
    dtype = arrays.dtype_of(q.dtype)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise invalid(f"ring_attention_packed: elements of {q.dtype}, {k.dtype} and {v.dtype}: they must be alike", chosen.rank)
    if not len(lengths) or any(length < 0 for length in lengths):
        raise invalid(f"ring_attention_packed: lengths of {list(lengths)}: at least one, and none below 0", chosen.rank)
    expected = len(packed_rows(lengths, causal=causal, group=chosen))
    if q.shape[0] != expected:
        raise invalid(f"ring_attention_packed: q has {q.shape[0]} rows, and of these lengths this rank has {expected} (packed_rows)", chosen.rank)
    starts = numpy.cumsum([0, *lengths]).astype(numpy.uint32)
    out, lse = numpy.empty_like(q), numpy.empty(q.shape[:2], dtype=numpy.float32)
    addresses = {name: x.ctypes.data for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse))}
    shape = dict(query_heads=q.shape[1], key_heads=k.shape[1], head_dim=q.shape[2], causal=int(causal), dtype=dtype)
    launch_packed(chosen, addresses, shape, starts.ctypes.data, len(lengths), int(starts[-1]), q.shape[0], scale)
    return out, lse


def launch_packed(
    group: Group,
    tensors: dict[str, int],
    shape: dict[str, int],
    starts: int,
    sequences: int,
    seq: int,
    rows: int,
    scale: Optional[float],
    device: int = -1,
    stream: int = 0,
) -> None:
    """Launches on addresses of tensors without gaps, which have room for `rows` rows. `starts`: an address, in the same memory."""
    if scale == 0:
        raise invalid("ring_attention_packed: a scale of 0 makes all keys alike, and means the default to the library: leave scale out", group.rank)
    # An operator serves any number of sequences up to its own: so that few are made, a power of two.
    room = 1 << (sequences - 1).bit_length()
    arguments = _c.RingArguments(seq=seq, scale=scale or 0.0, sequence_starts=starts, sequences=sequences, rows=rows, **tensors)
    group.launch("ring", dict(shape, batch=1, sequences_max=room), max(seq, 1), arguments, device=device, stream=stream)
