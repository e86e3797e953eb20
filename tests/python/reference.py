"""What the operators must answer: float64 products, and for each element the error that rounding allows.

The bound is the one of kernels/ops/gemm_ar/README.md; there is no constant to tune.
"""
import math

import numpy

from mkernel import from_bf16, to_bf16

#: By element type: half a unit in the last place, half the spacing of subnormals.
ROUNDING = {"f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}


def elements(values, dtype):
    """Float values in the element type, and the float64 values that they have there."""
    if dtype == "f16":
        stored = values.astype(numpy.float16)
        return stored, stored.astype(numpy.float64)
    stored = to_bf16(values.astype(numpy.float32))
    return stored, from_bf16(stored).astype(numpy.float64)


def values_of(stored):
    """The float64 values of an f16 array or of the bits of bf16."""
    return (from_bf16(stored) if stored.dtype == numpy.uint16 else stored).astype(numpy.float64)


def random_matrix(seed, rows, columns, dtype):
    """The same on every rank that asks for it: (stored, float64)."""
    return elements(numpy.random.default_rng(seed).standard_normal((rows, columns)) / 4, dtype)


def _sum_error(terms):
    unit = terms * 2.0**-24
    return unit / (1 - unit)


def product(a, b, dtype, bias=None):
    """(exact, allowed error) of one rank's product, summed in float32, perhaps with a bias, and rounded to the type."""
    half, tiny = ROUNDING[dtype]
    exact = a @ b
    error = _sum_error(a.shape[1]) * (abs(a) @ abs(b)) + a.shape[1] * 2.0**-126
    if bias is not None:
        exact = exact + bias
        error = error + 2.0**-24 * (abs(exact) + error)
    return exact, error + half * (abs(exact) + error) + tiny


def sum_of_products(pairs, local, dtype):
    """(exact, allowed error) of the sum over ranks of A_r B_r, ranks node by node, `local` of them a node."""
    half, tiny = ROUNDING[dtype]

    def rounded(exact, error):
        return error + half * (abs(exact) + error) + tiny

    nodes = []
    parts = [product(a, b, dtype) for a, b in pairs]
    for first in range(0, len(parts), local):
        mine = parts[first : first + local]
        exact = sum(p for p, _ in mine)
        error = sum(e for _, e in mine) + _sum_error(local - 1) * sum(abs(p) + e for p, e in mine)
        nodes.append((exact, error if local == 1 else rounded(exact, error)))
    exact = sum(p for p, _ in nodes)
    error = sum(e for _, e in nodes) + _sum_error(len(nodes) - 1) * sum(abs(p) + e for p, e in nodes)
    return exact, error if len(nodes) == 1 else rounded(exact, error)


_erf = numpy.vectorize(math.erf)
#: By name, on float64; "gated_silu" of columns that alternate is apart.
ACTIVATIONS = {
    "relu": lambda s: numpy.maximum(s, 0),
    "gelu": lambda s: s * (1 + _erf(s / math.sqrt(2))) / 2,
    "silu": lambda s: s / (1 + numpy.exp(-s)),
}
#: No activation's slope is larger, and float32 computes each to a few units in the last place.
_SLOPE, _STEPS = 1.13, 2.0**-20


def behind_the_sum(exact, allowed, bias, activation, dtype):
    """(exact, allowed error) of a sum, which is known up to `allowed`, behind its bias and its activation."""
    half, tiny = ROUNDING[dtype]
    exact, allowed = exact + bias, allowed + 2.0**-23 * (abs(exact) + abs(bias) + allowed)
    if activation == "gated_silu":
        gate, up = exact[:, 0::2], exact[:, 1::2]
        of_gate, of_up = _SLOPE * allowed[:, 0::2] + _STEPS * (1 + abs(gate)), allowed[:, 1::2]
        allowed = of_gate * (abs(up) + of_up) + abs(gate) * of_up
        exact = ACTIVATIONS["silu"](gate) * up
    elif activation is not None:
        allowed = _SLOPE * allowed + _STEPS * (1 + abs(exact))
        exact = ACTIVATIONS[activation](exact)
    return exact, allowed + half * (abs(exact) + allowed) + tiny


def combined(rows, residual, features, top_k, nodes, dtype):
    """(exact, allowed error) of a token's sum over `rows` (weight, row, expert's weights) and its residual: the bound of kernels/ops/combine/README.md."""
    half, tiny = ROUNDING[dtype]
    exact = sum((float(weight) * (row @ expert) for weight, row, expert in rows), residual)
    size = sum((abs(float(weight) * (row @ expert)) for weight, row, expert in rows), 0 * abs(residual))
    off = sum((abs(float(weight)) * _sum_error(features) * (abs(row) @ abs(expert)) for weight, row, expert in rows), 0 * abs(residual))
    added = _sum_error(top_k + nodes + 1)
    error = off + ((1 + added) * (1 + half) ** 2 - 1) * (size + off) + added * abs(residual) + (top_k + nodes) * tiny
    return exact, error + half * (abs(exact) + error) + tiny


def assert_close(got, expected, what):
    exact, allowed = expected
    values = values_of(numpy.asarray(got))
    assert values.shape == exact.shape, f"{what}: {values.shape}, not {exact.shape}"
    wrong = ~(abs(values - exact) <= allowed)
    if wrong.any():
        at = tuple(int(i[0]) for i in numpy.nonzero(wrong))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements are off; at {at}: {values[at]}, exactly {exact[at]}, allowed {allowed[at]}"
        )
