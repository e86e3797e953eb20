"""The tensor-parallel operators on NumPy arrays and DLPack tensors; PyTorch's go to mkernel.torch.

Shapes: A lies by rows; B may lie by rows (k x n) or by columns (the transpose of an n x k array,
which is how a linear layer keeps its weight). Gaps between the rows are no reason to copy. Everything is collective: all ranks of the
group make the same calls.

`bias` has an element for each column of B, and is added to the whole sum; then comes `activation`: "relu", "gelu", "silu" or "gated_silu", of
whose alternating columns, gate and up projection, one of two remains. All is in float32, before the only rounding. `partials="f32"` lets
partial sums travel in float32: twice the bytes, and no rounding.

The `_backward` functions are of the product alone: give them the gradient behind the activation. A bias's gradient is the sum of its rows.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy

from . import _c, arrays, gradients, products
from .errors import invalid
from .group import Group, GroupLike, get_group


def ag_gemm(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    group: GroupLike = None,
    m: Optional[int] = None,
    out: Any = None,
    return_gathered: bool = False,
) -> Any:
    """AllGather+GEMM: (all ranks' rows of A) B.

    `a` is this rank's rows of A, `b` this rank's k x n. Without `m`, the rows of the whole A, every rank has
    as many rows as this one. `return_gathered`: (C, A gathered), which the gradient of B needs.
    """
    if arrays.is_torch(a):
        _refuse_for_torch("ag_gemm", out=out, m=m)
        from .torch import operators as torch_operators

        return torch_operators.ag_gemm(a, b, bias=bias, activation=activation, group=group, return_gathered=return_gathered)
    chosen = get_group(group)
    a_, b_ = _operands(chosen, "ag_gemm", a, b)
    m = a_.rows * chosen.world if m is None else m
    if a_.rows != chosen.rows(m)[1]:
        raise invalid(f"ag_gemm: a has {a_.rows} rows, and of m = {m} this rank has {chosen.rows(m)[1]} (Group.rows)", chosen.rank)
    result, c = arrays.output(out, "out", m, products.columns_of_result(chosen, "ag_gemm", b_.columns, activation), a_.like)
    gathered = numpy.empty((m, a_.columns), dtype=a_.like) if return_gathered else None
    _launch(chosen, "ag-gemm", a_, b_, c, m, bias, gathered, activation=activation)
    return (result, gathered) if return_gathered else result


def gemm_rs(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
    group: GroupLike = None,
    out: Any = None,
) -> Any:
    """GEMM+ReduceScatter: this rank's rows of the sum over all ranks of A B.

    `a` is m x k and `b` k x n, of this rank's share of the inner dimension; `Group.rows(m)` says which rows the rank gets.
    """
    if arrays.is_torch(a):
        _refuse_for_torch("gemm_rs", out=out)
        from .torch import operators as torch_operators

        return torch_operators.gemm_rs(a, b, bias=bias, activation=activation, partials=partials, group=group)
    chosen = get_group(group)
    a_, b_ = _operands(chosen, "gemm_rs", a, b)
    columns = products.columns_of_result(chosen, "gemm_rs", b_.columns, activation)
    result, c = arrays.output(out, "out", chosen.rows(a_.rows)[1], columns, a_.like)
    _launch(chosen, "gemm-rs", a_, b_, c, a_.rows, bias, activation=activation, partials=partials)
    return result


def gemm_ar(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
    group: GroupLike = None,
    out: Any = None,
) -> Any:
    """GEMM+AllReduce: the sum over all ranks of A B, the same bits on every rank.

    `a` is m x k and `b` k x n, of this rank's share of the inner dimension.
    """
    if arrays.is_torch(a):
        _refuse_for_torch("gemm_ar", out=out)
        from .torch import operators as torch_operators

        return torch_operators.gemm_ar(a, b, bias=bias, activation=activation, partials=partials, group=group)
    chosen = get_group(group)
    a_, b_ = _operands(chosen, "gemm_ar", a, b)
    result, c = arrays.output(out, "out", a_.rows, products.columns_of_result(chosen, "gemm_ar", b_.columns, activation), a_.like)
    _launch(chosen, "gemm-ar", a_, b_, c, a_.rows, bias, activation=activation, partials=partials)
    return result


def all_gather(a: Any, *, group: GroupLike = None, m: Optional[int] = None) -> Any:
    """All ranks' rows of A, of bf16, f16 or float32.

    Without `m`, the rows of the whole A, every rank has as many rows as this one.
    """
    if arrays.is_torch(a):
        _refuse_for_torch("all_gather", m=m)
        from .torch import operators as torch_operators

        return torch_operators.all_gather(a, group=group)
    chosen = get_group(group)
    array, dtype = arrays.rows_of_any(a, "a")
    rows, columns = array.shape
    m = rows * chosen.world if m is None else m
    if rows != chosen.rows(m)[1]:
        raise invalid(f"all_gather: a has {rows} rows, and of m = {m} this rank has {chosen.rows(m)[1]} (Group.rows)", chosen.rank)
    out = numpy.empty((m, columns), dtype=array.dtype)
    products.launch_collective(chosen, "all-gather", array.ctypes.data if rows else 0, out.ctypes.data, m=m, n=columns, dtype=dtype)
    return out


def reduce_scatter(parts: Any, *, partials: Optional[str] = None, group: GroupLike = None) -> Any:
    """This rank's rows of the sum over all ranks of `parts`, m x n of bf16, f16 or float32; `Group.rows(m)` says which.

    Sums are float32, in a fixed order, and rounded once; over several nodes of several ranks each node's sum is, too, unless `partials="f32"`.
    """
    if arrays.is_torch(parts):
        from .torch import operators as torch_operators

        return torch_operators.reduce_scatter(parts, partials=partials, group=group)
    chosen = get_group(group)
    array, dtype = arrays.rows_of_any(parts, "parts")
    m, columns = array.shape
    out = numpy.empty((chosen.rows(m)[1], columns), dtype=array.dtype)
    to = out.ctypes.data if len(out) else 0
    products.launch_collective(chosen, "reduce-scatter", array.ctypes.data, to, m=m, n=columns, dtype=dtype, partials=partials)
    return out


def ag_gemm_backward(dy: Any, a: Any, b: Any, *, gathered: Any = None, group: GroupLike = None) -> tuple:
    """(dA, dB) of ``ag_gemm(a, b)``; `gathered` is the gathered A if the forward call returned it."""
    return gradients.ag_gemm(_NumpyOps(m=dy.shape[0]), dy, a, b, gathered, get_group(group))


def gemm_rs_backward(dy: Any, a: Any, b: Any, *, group: GroupLike = None) -> tuple:
    """(dA, dB) of ``gemm_rs(a, b)``; `dy` has this rank's rows."""
    return gradients.gemm_rs(_NumpyOps(m=a.shape[0]), dy, a, b, get_group(group))


def gemm_ar_backward(dy: Any, a: Any, b: Any, *, group: GroupLike = None) -> tuple:
    """(dA, dB) of ``gemm_ar(a, b)``; `dy` is the same on all ranks."""
    return gradients.gemm_ar(_numpy_ops, dy, a, b, group)


def copy_gemm_backward(dy: Any, a: Any, b: Any, *, group: GroupLike = None) -> tuple:
    """(dA, dB) of the local product a b, where `a` is the same on all ranks and `b` is this rank's columns."""
    return gradients.copy_gemm(_numpy_ops, dy, a, b, get_group(group))


class _NumpyOps:
    """What gradients.py needs, on NumPy arrays. Local products are summed in float32."""

    def __init__(self, m: Optional[int] = None) -> None:
        self._m = m

    def ag_gemm(self, a: Any, b: Any, group: Group) -> tuple:
        return ag_gemm(a, b, group=group, m=self._m, return_gathered=True)

    def gemm_rs(self, a: Any, b: Any, group: Group) -> Any:
        return gemm_rs(a, b, group=group)

    def gemm_ar(self, a: Any, b: Any, group: Group) -> Any:
        return gemm_ar(a, b, group=group)

    def all_gather(self, a: Any, group: Group) -> Any:
        return all_gather(a, group=group, m=self._m)

    def mm(self, x: Any, y: Any, like: Any) -> Any:
        return arrays.to_like(arrays.to_float(x) @ arrays.to_float(y), x.dtype)

    def copy_gemm(self, x: Any, y: Any, like: Any, group: Group) -> Any:
        return self.mm(x, y, like)


_numpy_ops = _NumpyOps()


def _refuse_for_torch(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise invalid(f"{what}: {name}= is for NumPy arrays; PyTorch's operators are functional, and all ranks have as many rows")


def _operands(group: Group, what: str, a: Any, b: Any) -> tuple[arrays.Matrix, arrays.Matrix]:
    a_, b_ = arrays.by_rows(a, f"{what}: a"), arrays.either(b, f"{what}: b")
    if a_.columns != b_.rows:
        raise invalid(f"{what}: a is {a_.rows} x {a_.columns} and b {b_.rows} x {b_.columns}: the inner dimensions differ", group.rank)
    if a_.dtype != b_.dtype:
        raise invalid(f"{what}: a has elements of {a_.like} and b of {b_.like}", group.rank)
    return a_, b_


def _launch(
    group: Group,
    name: str,
    a: arrays.Matrix,
    b: arrays.Matrix,
    c: numpy.ndarray,
    m: int,
    bias: Any,
    gathered: Optional[numpy.ndarray] = None,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
) -> None:
    if bias is not None:
        bias = arrays.tensor(bias, f"{name}: bias")
        if bias.shape != (b.columns,) or bias.dtype != a.like:
            raise invalid(f"{name}: bias is {bias.shape} of {bias.dtype}: it must be {(b.columns,)} of {a.like}", group.rank)
    products.launch(
        group,
        name,
        products.Operand(a.address, a.pitch),
        products.Operand(b.address, b.pitch),
        products.Operand(c.ctypes.data, arrays.pitch_of(c) or 0),
        m=m,
        n=b.columns,
        k=a.columns,
        dtype=a.dtype,
        layout=_c.NK if b.transposed else _c.KN,
        gathered=0 if gathered is None else gathered.ctypes.data,
        bias=0 if bias is None else bias.ctypes.data,
        activation=activation,
        partials=partials,
    )
