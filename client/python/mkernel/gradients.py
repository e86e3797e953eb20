"""The gradients of the tensor-parallel operators, by the operators themselves.

They are stated once, for every tensor library: `ops` brings ag_gemm, gemm_rs and gemm_ar on its tensors,
`all_gather`, the local product `mm(x, y)`, and `mm_t(x, y, b)`, the product of the transpose of x with y, which is
a gradient of b and may lie in memory as b does.
"""

from __future__ import annotations

from typing import Any, Optional


def ag_gemm(ops: Any, dy: Any, a: Any, b: Any, gathered: Optional[Any], group: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = gather(A) B: dA is GEMM+ReduceScatter with B transposed, dB comes from the gathered A.

    `gathered` is what the forward launch kept; None gathers A again.
    """
    da = ops.gemm_rs(dy, b.T, group) if want_a else None
    db = None
    if want_b:
        db = ops.mm_t(ops.all_gather(a, group) if gathered is None else gathered, dy, b)
    return da, db


def gemm_rs(ops: Any, dy: Any, a: Any, b: Any, group: Any, want_b: bool = True) -> tuple:
    """Of Y = scatter(sum of A B): dA is AllGather+GEMM with B transposed, whose gathered dY gives dB."""
    da, gathered = ops.ag_gemm(dy, b.T, group)
    return da, ops.mm_t(a, gathered, b) if want_b else None


def gemm_ar(ops: Any, dy: Any, a: Any, b: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = sum of A B on every rank: dY is the same on all ranks, so both gradients are local."""
    return ops.mm(dy, b.T) if want_a else None, ops.mm_t(a, dy, b) if want_b else None


def copy_gemm(ops: Any, dy: Any, a: Any, b: Any, group: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = A B with the same A on all ranks and a B of each: dA is GEMM+AllReduce, dB is local."""
    return ops.gemm_ar(dy, b.T, group) if want_a else None, ops.mm_t(a, dy, b) if want_b else None
