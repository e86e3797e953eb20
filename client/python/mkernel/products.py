"""One launch of the three tensor-parallel operators, or of a collective, on addresses, and what may follow the sum: a bias, an activation."""

from __future__ import annotations

import dataclasses
from typing import Optional

from . import _c
from .errors import invalid
from .group import Group

#: By name, the library's activations. "gated_silu": columns alternate, a gate g and its up projection u, and the result has silu(g) u.
ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "gated_silu": 4}
#: The type in which partial sums travel: None rounds them to the element type.
PARTIALS = {None: _c.PARTIALS_ELEMENT, "f32": _c.PARTIALS_F32}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix in memory: its address, and elements from row to row (of the transpose, where it lies by columns)."""

    address: int
    pitch: int


def columns_of_result(group: Optional[Group], what: str, n: int, activation: Optional[str]) -> int:
    """How many columns the result of a product with n columns has; Error for an activation that there is not."""
    if activation is None:
        return n
    rank = None if group is None else group.rank
    if activation not in ACTIVATIONS:
        raise invalid(f"{what}: activation {activation!r}: there are {', '.join(ACTIVATIONS)}", rank)
    if activation != "gated_silu":
        return n
    if n % 2 != 0:
        raise invalid(f"{what}: b has {n} columns, and gated_silu takes them by twos", rank)
    return n // 2


def launch(
    group: Group,
    name: str,
    a: Operand,
    b: Operand,
    c: Operand,
    *,
    m: int,
    n: int,
    k: int,
    dtype: int,
    layout: int,
    gathered: int = 0,
    bias: int = 0,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
    device: int = -1,
    stream: int = 0,
) -> None:
    """Launches "ag-gemm", "gemm-rs" or "gemm-ar". `bias`: the address of n elements, 0 for none."""
    if partials not in PARTIALS:
        raise invalid(f"{name}: partials={partials!r}: it must be None or 'f32'", group.rank)
    shape = dict(n=n, k=k, dtype=dtype, b_layout=layout)
    # What is not asked for is not named, and so is not in the way where a group says what it keeps.
    asked = dict(activation=ACTIVATIONS[activation] if activation else 0, bias=int(bias != 0), partials=PARTIALS[partials])
    shape.update((field, value) for field, value in asked.items() if value)
    arguments = _c.GemmArguments(
        a=a.address or None,
        b=b.address or None,
        c=c.address or None,
        m=m,
        gathered=gathered or None,
        bias=bias or None,
        lda=a.pitch,
        ldb=b.pitch,
        ldc=c.pitch,
    )
    group.launch(name, shape, m, arguments, device=device, stream=stream)


def launch_collective(
    group: Group,
    name: str,
    given: int,
    out: int,
    *,
    m: int,
    n: int,
    dtype: int,
    partials: Optional[str] = None,
    device: int = -1,
    stream: int = 0,
) -> None:
    """Launches "all-gather" or "reduce-scatter" of `m` rows of the whole, `n` elements each, which lie without gaps."""
    if partials not in PARTIALS:
        raise invalid(f"{name}: partials={partials!r}: it must be None or 'f32'", group.rank)
    shape = dict(n=n, dtype=dtype)
    if partials is not None:
        shape["partials"] = PARTIALS[partials]
    arguments = _c.CollectiveArguments(input=given or None, output=out or None, m=m)
    group.launch(name, shape, m, arguments, device=device, stream=stream)
