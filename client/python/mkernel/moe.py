"""MoE Dispatch+GEMM and GEMM+Combine on NumPy arrays: the two halves of a layer whose experts are dealt out over the ranks."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Optional

import numpy

from . import _c, arrays, gradients, operators
from .errors import invalid
from .group import Group, GroupLike, get_group

#: A row of the library: whose token it is, and its weight.
ROW = numpy.dtype([("rank", "u4"), ("token", "u4"), ("slot", "u4"), ("weight", "f4")])


@dataclasses.dataclass(frozen=True)
class Routed:
    """The rows of this rank's experts. Expert `first_expert` + i has the rows offsets[i] to offsets[i + 1].

    Row j is of the token `token[j]` of rank `rank[j]`, for the slot `slot[j]` of its experts, with the weight `weight[j]`.
    `ids` are the experts of this rank's own tokens, and `tokens_max` is the most tokens that any rank has, 1 at least: `gemm_combine` needs both.
    """

    y: numpy.ndarray
    first_expert: int
    offsets: numpy.ndarray
    rank: numpy.ndarray
    token: numpy.ndarray
    slot: numpy.ndarray
    weight: numpy.ndarray
    ids: numpy.ndarray
    experts_total: int
    tokens_max: int


def moe_dispatch_gemm(
    tokens: Any, ids: Any, weights: Any, experts: Any, *, experts_total: int, bias: Optional[Any] = None, group: GroupLike = None
) -> Routed:
    """Sends each token to the ranks of its experts, and multiplies it by their weights.

    `tokens` is [count, hidden], and counts may differ between ranks. `ids` and `weights` are [count, k]: the experts of each token, -1 for none,
    and their weights, which only travel along. `experts` is [experts of this rank, hidden, features]. Hidden and features are multiples of 8.
    `bias` is [experts of this rank, features], and is added to the products of each expert; all ranks have one, or none has.
    """
    arrays.refuse_torch(tokens, "moe_dispatch_gemm", "mkernel.torch.moe_dispatch_gemm")
    chosen = get_group(group)
    tokens, experts = arrays.tensor(tokens, "moe_dispatch_gemm: tokens"), arrays.tensor(experts, "moe_dispatch_gemm: experts")
    ids, weights = numpy.ascontiguousarray(ids, numpy.int32), numpy.ascontiguousarray(weights, numpy.float32)
    if experts.dtype != tokens.dtype:
        raise invalid(f"moe_dispatch_gemm: tokens of {tokens.dtype} and experts of {experts.dtype}", chosen.rank)
    check_shapes(chosen, tokens.shape, ids.shape, weights.shape, experts.shape, experts_total)
    if bias is not None:
        bias = arrays.tensor(bias, "moe_dispatch_gemm: bias")
        expected = (experts.shape[0], experts.shape[2])
        if bias.shape != expected or bias.dtype != experts.dtype:
            raise invalid(
                f"moe_dispatch_gemm: bias is {bias.shape} of {bias.dtype}: it must be {expected} of {experts.dtype}",
                chosen.rank,
            )
    # All ranks make room alike: for the most tokens that any of them has.
    counts = [int.from_bytes(blob, "little") for blob in chosen.exchange("mkernel.moe", len(tokens).to_bytes(8, "little"))]
    capacity = rows_at_most(sum(counts), ids.shape[1], experts.shape[0])
    y = numpy.empty((capacity, experts.shape[2]), dtype=tokens.dtype)
    addresses = [x.ctypes.data for x in (tokens, ids, weights, experts, y)]
    shape = dispatch_shape(chosen, experts.shape, experts_total, ids.shape[1], arrays.dtype_of(tokens.dtype), bias is not None)
    of_bias = 0 if bias is None else bias.ctypes.data
    first, offsets, rows = dispatch(chosen, addresses, len(tokens), shape, capacity, max(counts), of_bias)
    rank, token, slot, weight = (rows[name].copy() for name in ("rank", "token", "slot", "weight"))
    return Routed(y[: len(rows)], first, offsets, rank, token, slot, weight, ids, experts_total, max(1, *counts))


def gemm_combine(y: Any, routed: Routed, experts: Any, *, residual: Optional[Any] = None, group: GroupLike = None) -> numpy.ndarray:
    """For each token of this rank, the weighted sum of its experts' products: sum of weight (row of `y`) (its expert's weights).

    `routed` is what `moe_dispatch_gemm` answered, `y` [rows, features] what became of routed.y. `experts` is [experts of this rank, features,
    hidden], and `residual` [count, hidden], which is added. The sums are in float32.
    """
    arrays.refuse_torch(y, "gemm_combine", "mkernel.torch.gemm_combine")
    chosen = get_group(group)
    y, experts = arrays.tensor(y, "gemm_combine: y"), arrays.tensor(experts, "gemm_combine: experts")
    check_combine(chosen, y.shape, len(routed.rank), experts.shape, routed.experts_total)
    if experts.dtype != y.dtype:
        raise invalid(f"gemm_combine: y has elements of {y.dtype} and experts of {experts.dtype}", chosen.rank)
    if residual is not None:
        residual = arrays.tensor(residual, "gemm_combine: residual")
        out = (len(routed.ids), experts.shape[2])
        if residual.shape != out or residual.dtype != y.dtype:
            raise invalid(f"gemm_combine: residual is {residual.shape} of {residual.dtype}, and the result {out} of {y.dtype}", chosen.rank)
    return _combined(chosen, y, routed, routed.weight, experts, residual)


def moe_dispatch_gemm_backward(
    dy: Any, routed: Routed, tokens: Any, experts: Any, *, dweight: Optional[Any] = None, group: GroupLike = None
) -> tuple[numpy.ndarray, Optional[numpy.ndarray], numpy.ndarray]:
    """(dtokens, dweights, dexperts) of ``moe_dispatch_gemm``, which answered `routed`; `dy` has its rows, and `dweight` its rows' weights.

    It is composed: tokens are gathered for the experts' gradients. Those of tokens return by GEMM+Combine.
    """
    chosen = get_group(group)
    everyone, source = _everyones(chosen, tokens, routed)
    dexperts = numpy.zeros_like(experts)
    for i, mine in enumerate(_slices(routed)):
        dexperts[i] = arrays.to_like(arrays.to_float(everyone[source[mine]]).T @ arrays.to_float(dy[mine]), experts.dtype)
    dtokens = _combined(chosen, numpy.ascontiguousarray(dy), routed, numpy.float32(1), numpy.ascontiguousarray(experts), None, transposed=True)
    if dweight is None:
        return dtokens, None, dexperts
    parts = numpy.zeros((chosen.world * routed.tokens_max, routed.ids.shape[1]), numpy.float32)
    parts[source, routed.slot] = dweight
    first = chosen.rank * routed.tokens_max
    return dtokens, chosen.sum_f32(parts)[first : first + len(routed.ids)], dexperts


def gemm_combine_backward(dout: Any, y: Any, routed: Routed, experts: Any, *, group: GroupLike = None) -> tuple[numpy.ndarray, ...]:
    """(dy, dweight, dexperts) of ``gemm_combine(y, routed, experts)``; dweight is by row, and a residual's gradient is `dout` itself."""
    everyone, source = _everyones(get_group(group), dout, routed)
    dy, dexperts, dweight = numpy.zeros_like(y), numpy.zeros_like(experts), numpy.zeros(len(y), numpy.float32)
    for i, mine in enumerate(_slices(routed)):
        given, row, expert = (arrays.to_float(x) for x in (everyone[source[mine]], y[mine], experts[i]))
        of_y, dweight[mine], of_expert = gradients.combine_of_expert(given, row, routed.weight[mine], expert)
        dy[mine], dexperts[i] = arrays.to_like(of_y, y.dtype), arrays.to_like(of_expert, experts.dtype)
    return dy, dweight, dexperts


def _everyones(group: Group, mine: Any, routed: Routed) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(the rows of all ranks' tokens, each rank's made up to as many; by routed row, where its token is among them)."""
    padded = numpy.zeros((routed.tokens_max, mine.shape[1]), dtype=mine.dtype)
    padded[: len(mine)] = mine
    return operators.all_gather(padded, group=group), routed.rank.astype(numpy.int64) * routed.tokens_max + routed.token


def _slices(routed: Routed) -> list[slice]:
    return [slice(begin, end) for begin, end in zip(routed.offsets[:-1], routed.offsets[1:])]


def _combined(
    group: Group, y: numpy.ndarray, routed: Routed, weight: Any, experts: numpy.ndarray, residual: Optional[numpy.ndarray], transposed: bool = False
) -> numpy.ndarray:
    """GEMM+Combine with a weight for each row. `transposed`: by the experts' weights transposed, and sums travel in float32, for a gradient."""
    out = numpy.empty((len(routed.ids), experts.shape[1 if transposed else 2]), dtype=y.dtype)
    addresses = {"y": y.ctypes.data, "expert_weights": experts.ctypes.data, "out": out.ctypes.data}
    if residual is not None:
        addresses["residual"] = residual.ctypes.data
    rows = numpy.empty(len(routed.rank), dtype=ROW)
    rows["rank"], rows["token"], rows["slot"], rows["weight"] = routed.rank, routed.token, routed.slot, weight
    shape = combine_shape(experts.shape, routed.experts_total, routed.ids.shape[1], arrays.dtype_of(y.dtype), transposed)
    combine(group, addresses, rows, routed.offsets, routed.ids, shape, routed.tokens_max)
    return out


def rows_at_most(tokens: int, top_k: int, experts: int) -> int:
    """The rows that a rank gets at most, of that many tokens of all ranks."""
    return tokens * min(top_k, experts)


def experts_of_rank(group: Group, experts_total: int) -> tuple[int, int]:
    """(first, count) of the experts that a rank has."""
    first = group.rank * experts_total // group.world
    return first, (group.rank + 1) * experts_total // group.world - first


def check_shapes(group: Group, tokens: Any, ids: Any, weights: Any, experts: Any, experts_total: int) -> None:
    """Raises what is wrong with the shapes of a dispatch."""
    count = experts_of_rank(group, experts_total)[1]
    if len(tokens) != 2 or len(ids) != 2 or tuple(ids) != tuple(weights) or ids[0] != tokens[0]:
        raise invalid(f"moe: tokens are {tuple(tokens)}, ids {tuple(ids)} and weights {tuple(weights)}", group.rank)
    if len(experts) != 3 or experts[0] != count or experts[1] != tokens[1]:
        raise invalid(
            f"moe: experts are {tuple(experts)} and tokens {tuple(tokens)}: experts must be [{count}, hidden, features], as this rank has "
            f"{count} of {experts_total} experts",
            group.rank,
        )


def check_combine(group: Group, y: Any, rows: int, experts: Any, experts_total: int) -> None:
    """Raises what is wrong with the shapes of a combine."""
    count = experts_of_rank(group, experts_total)[1]
    if len(y) != 2 or y[0] != rows or len(experts) != 3 or experts[0] != count or experts[1] != y[1]:
        raise invalid(
            f"gemm_combine: y is {tuple(y)} with {rows} rows routed, and experts are {tuple(experts)}: y must be [{rows}, features] and experts "
            f"[{count}, features, hidden]",
            group.rank,
        )


def dispatch_shape(group: Group, experts: Any, experts_total: int, top_k: int, dtype: int, bias: bool = False) -> dict[str, int]:
    """The fields of the library's shape for experts of [count, hidden, features]."""
    shape = dict(hidden=experts[1], features=experts[2], experts=experts_total, top_k=top_k, dtype=dtype, b_layout=_c.KN, bias=int(bias))
    # The room of all ranks alike, whichever of them has an expert more. It grows with the tokens, so that one operator serves all counts.
    shape["rows_per_token"] = rows_at_most(group.world, top_k, -(-experts_total // group.world))
    return shape


def combine_shape(experts: Any, experts_total: int, top_k: int, dtype: int, transposed: bool = False) -> dict[str, int]:
    """The same for experts of [count, features, hidden]. `transposed`: of [count, hidden, features], and sums in float32."""
    features, hidden = reversed(experts[1:]) if transposed else experts[1:]
    layout, partials = (_c.NK, _c.PARTIALS_F32) if transposed else (_c.KN, _c.PARTIALS_ELEMENT)
    return dict(hidden=hidden, features=features, experts=experts_total, top_k=top_k, dtype=dtype, b_layout=layout, partials=partials)


def dispatch(
    group: Group, addresses: list[int], count: int, shape: dict[str, int], capacity: int, tokens_max: int, bias: int = 0
) -> tuple[int, Any, Any]:
    """Launches on the addresses of tokens, ids, weights, experts and y, in host memory; answers the first expert, the offsets and the rows.

    `bias`: the address of one, 0 for none."""
    x, ids, weights, w, y = addresses
    arguments = _c.MoeArguments(tokens=x, ids=ids, weights=weights, count=count, expert_weights=w, y=y, capacity=capacity, bias=bias or None)
    answer: list[Any] = []

    def ask(operator: ctypes.c_void_p) -> None:
        for what in (_c.FIRST_EXPERT, _c.EXPERT_OFFSETS, _c.ROWS):
            data, found = ctypes.c_void_p(), ctypes.c_uint64()
            _c.call("mk_op_query", operator, what, ctypes.byref(data), ctypes.byref(found), rank=group.rank)
            answer.append((data.value, found.value))

    group.launch("moe", shape, max(1, tokens_max), arguments, after=ask)
    (_, first), offsets, rows = answer
    return first, _array(offsets, numpy.dtype("u4")), _array(rows, ROW)


def combine(
    group: Group, addresses: dict[str, int], rows: numpy.ndarray, offsets: numpy.ndarray, ids: numpy.ndarray, shape: dict[str, int], tokens_max: int
) -> None:
    """Launches on the addresses of y, expert_weights, out and perhaps residual, in host memory."""
    arguments = _c.CombineArguments(
        rows=rows.ctypes.data,
        row_count=len(rows),
        expert_offsets=offsets.ctypes.data,
        expert_offset_count=len(offsets),
        ids=ids.ctypes.data,
        count=len(ids),
        **addresses,
    )
    group.launch("combine", shape, max(1, tokens_max), arguments)


def _array(found: tuple[int, int], dtype: numpy.dtype) -> numpy.ndarray:
    """A copy of the operator's memory."""
    address, count = found
    return numpy.frombuffer(ctypes.string_at(address, count * dtype.itemsize) if count else b"", dtype=dtype)
