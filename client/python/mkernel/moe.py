"""MoE Dispatch + GEMM on NumPy arrays: each rank's experts times the tokens of all ranks that go to them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy

from . import _c, arrays
from .errors import invalid
from .group import Group, GroupLike, get_group


@dataclasses.dataclass(frozen=True)
class Routed:
    """The rows of this rank's experts. Expert `first_expert` + i has the rows offsets[i] to offsets[i + 1].

    Row j is of the token `token[j]` of rank `rank[j]`, for the slot `slot[j]` of its experts, with the weight `weight[j]`.
    """

    y: numpy.ndarray
    first_expert: int
    offsets: numpy.ndarray
    rank: numpy.ndarray
    token: numpy.ndarray
    slot: numpy.ndarray
    weight: numpy.ndarray


_ROW = numpy.dtype([("rank", "u4"), ("token", "u4"), ("slot", "u4"), ("weight", "f4")])


def moe_dispatch_gemm(tokens: Any, ids: Any, weights: Any, experts: Any, *, experts_total: int, group: GroupLike = None) -> Routed:
    """Sends each token to the ranks of its experts, and multiplies it by their weights.

    `tokens` is [count, hidden], and counts may differ between ranks. `ids` and `weights` are [count, k]: the experts of each token, -1 for none,
    and their weights, which only travel along. `experts` is [experts of this rank, hidden, features]. Hidden and features are multiples of 8.
    """
    chosen = get_group(group)
    tokens, experts = numpy.ascontiguousarray(tokens), numpy.ascontiguousarray(experts)
    ids, weights = numpy.ascontiguousarray(ids, numpy.int32), numpy.ascontiguousarray(weights, numpy.float32)
    if experts.dtype != tokens.dtype:
        raise invalid(f"moe_dispatch_gemm: tokens of {tokens.dtype} and experts of {experts.dtype}", chosen.rank)
    check_shapes(chosen, tokens.shape, ids.shape, weights.shape, experts.shape, experts_total)
    # All ranks make room alike: for the most tokens that any of them has.
    counts = [int.from_bytes(blob, "little") for blob in chosen.exchange("mkernel.moe", len(tokens).to_bytes(8, "little"))]
    capacity = rows_at_most(sum(counts), ids.shape[1], experts.shape[0])
    y = numpy.empty((capacity, experts.shape[2]), dtype=tokens.dtype)
    addresses = [x.ctypes.data for x in (tokens, ids, weights, experts, y)]
    first, offsets, rows = launch(
        chosen, addresses, tokens.shape, ids.shape[1], experts.shape, experts_total, capacity, max(counts), arrays.dtype_of(tokens.dtype), _c.KN
    )
    return Routed(y[: len(rows)], first, offsets, rows["rank"].copy(), rows["token"].copy(), rows["slot"].copy(), rows["weight"].copy())


def rows_at_most(tokens: int, top_k: int, experts: int) -> int:
    """The rows that a rank gets at most, of that many tokens of all ranks."""
    return tokens * min(top_k, experts)


def experts_of_rank(group: Group, experts_total: int) -> tuple[int, int]:
    """(first, count) of the experts that a rank has."""
    first = group.rank * experts_total // group.world
    return first, (group.rank + 1) * experts_total // group.world - first


def check_shapes(group: Group, tokens: Any, ids: Any, weights: Any, experts: Any, experts_total: int) -> None:
    """Raises what is wrong with the shapes."""
    count = experts_of_rank(group, experts_total)[1]
    if len(tokens) != 2 or len(ids) != 2 or tuple(ids) != tuple(weights) or ids[0] != tokens[0]:
        raise invalid(f"moe: tokens are {tuple(tokens)}, ids {tuple(ids)} and weights {tuple(weights)}", group.rank)
    if len(experts) != 3 or experts[0] != count:
        raise invalid(f"moe: experts are {tuple(experts)}, and of {experts_total} experts this rank has {count}", group.rank)


def launch(
    group: Group,
    addresses: list[int],
    tokens: Any,
    top_k: int,
    experts: Any,
    experts_total: int,
    capacity: int,
    tokens_max: int,
    dtype: int,
    layout: int,
) -> tuple[int, numpy.ndarray, numpy.ndarray]:
    """Launches on addresses; answers the first expert, the offsets and the rows."""
    hidden, features = (experts[1], experts[2]) if layout == _c.KN else (experts[2], experts[1])
    x, ids, weights, w, y = addresses
    arguments = _c.MoeArguments(tokens=x, ids=ids, weights=weights, count=tokens[0], expert_weights=w, y=y, capacity=capacity)
    shape = dict(hidden=hidden, features=features, experts=experts_total, top_k=top_k, dtype=dtype, b_layout=layout)
    answer: list[Any] = []

    def ask(operator: ctypes.c_void_p) -> None:
        for what in (_c.FIRST_EXPERT, _c.EXPERT_OFFSETS, _c.ROWS):
            data, count = ctypes.c_void_p(), ctypes.c_uint64()
            _c.call("mk_op_query", operator, what, ctypes.byref(data), ctypes.byref(count), rank=group.rank)
            answer.append((data.value, count.value))

    group.launch("moe", shape, max(1, tokens_max), arguments, after=ask)
    (_, first), offsets, rows = answer
    return first, _array(offsets, numpy.dtype("u4")), _array(rows, _ROW)


def _array(found: tuple[int, int], dtype: numpy.dtype) -> numpy.ndarray:
    """A copy of the operator's memory."""
    address, count = found
    return numpy.frombuffer(ctypes.string_at(address, count * dtype.itemsize) if count else b"", dtype=dtype)
