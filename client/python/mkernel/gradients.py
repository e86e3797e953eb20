"""The gradients of all operators, stated once for every tensor library.

Those of the tensor-parallel operators are the operators themselves: `ops` brings ag_gemm, gemm_rs and gemm_ar on its tensors,
`all_gather`, the local product `mm(x, y, like)`, and `copy_gemm(x, y, like, group)`, the same of an x that all ranks have alike. A local product may
lie in memory as `like` does.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence


def ag_gemm(ops: Any, dy: Any, a: Any, b: Any, gathered: Optional[Any], group: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = gather(A) B: dA is GEMM+ReduceScatter with B transposed, dB comes from the gathered A.

    `gathered` is what the forward launch kept; None gathers A again.
    """
    da = ops.gemm_rs(dy, b.T, group) if want_a else None
    db = None
    if want_b:
        db = ops.mm((ops.all_gather(a, group) if gathered is None else gathered).T, dy, b)
    return da, db


def gemm_rs(ops: Any, dy: Any, a: Any, b: Any, group: Any, want_b: bool = True) -> tuple:
    """Of Y = scatter(sum of A B): dA is AllGather+GEMM with B transposed, whose gathered dY gives dB."""
    da, gathered = ops.ag_gemm(dy, b.T, group)
    return da, ops.mm(a.T, gathered, b) if want_b else None


def gemm_ar(ops: Any, dy: Any, a: Any, b: Any, group: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = sum of A B on every rank: dY is the same on all ranks, so both gradients are local."""
    return ops.copy_gemm(dy, b.T, a, group) if want_a else None, ops.copy_gemm(dy.T, a, b.T, group).T if want_b else None


def copy_gemm(ops: Any, dy: Any, a: Any, b: Any, group: Any, want_a: bool = True, want_b: bool = True) -> tuple:
    """Of Y = A B with the same A on all ranks and a B of each: dA is GEMM+AllReduce, dB is local."""
    return ops.gemm_ar(dy, b.T, group) if want_a else None, ops.copy_gemm(a.T, dy, b, group) if want_b else None


# --- Local parts of composed gradients: everything is float, and `library` is numpy or torch ----------


def attention_of_head(library: Any, tensors: Sequence[Any], scale: float, hidden: Any) -> tuple:
    """(dq, dk, dv) of this rank's queries with all keys: out = softmax(scale q k^T) v, and lse its log-sum-exp, which the forward pass kept.

    `tensors` are q, k, v, out, lse, and the gradients of the last two. `hidden`, queries by keys, says what a causal mask hides; None: nothing.
    """
    q, k, v, out, lse, dout, dlse = tensors
    scores = scale * (q @ k.T) - lse[:, None]
    weights = library.exp(scores if hidden is None else library.where(hidden, -library.inf, scores))
    dscores = scale * weights * (dout @ v.T - ((dout * out).sum(1) - dlse)[:, None])
    return dscores @ k, dscores.T @ q, weights.T @ dout


def combine_of_expert(dout: Any, y: Any, weight: Any, expert: Any) -> tuple:
    """(dy, dweight, dexpert) of an expert's rows: out = weight (y expert), with the dout of each row's token."""
    unweighted = dout @ expert.T
    return unweighted * weight[:, None], (unweighted * y).sum(1), (y * weight[:, None]).T @ dout
