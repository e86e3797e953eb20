"""Linear layers split over a group, with sequence parallelism: Megatron's semantics.

Activations are [sequence, batch, width]. With sequence parallelism the activations between the layers are split by
the sequence, their first dimension, and a column-parallel layer gathers what a row-parallel layer has scattered.
Without it they are the same on all ranks.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import invalid
from ..group import Group, GroupLike, get_group
from . import operators
from .sequence_parallel import mark_own
from .shards import local_of


def column_parallel(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], group: str, sequence_parallel: bool, keep_gathered: bool = True
) -> Tensor:
    """x W^T + bias with the rows of W split over the group."""
    x, weight, bias = _cast_for_autocast(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if sequence_parallel:
        y = operators.ag_gemm(flat, weight.t(), bias=bias, group=group, keep_gathered=keep_gathered)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])
    y = operators.copy_gemm(flat, weight.t(), group=group).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def row_parallel(x: Tensor, weight: Tensor, bias: Optional[Tensor], group: str, sequence_parallel: bool) -> Tensor:
    """The sum over the group of x W^T, plus the bias, with the columns of W split over the group."""
    x, weight, bias = _cast_for_autocast(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if sequence_parallel:
        return operators.gemm_rs(flat, weight.t(), bias=bias, group=group).view(-1, *x.shape[1:-1], weight.shape[0])
    return operators.gemm_ar(flat, weight.t(), bias=bias, group=group).view(*x.shape[:-1], weight.shape[0])


class _ParallelLinear(nn.Module):
    #: By parameter, the dimension that is split over the group (shards.py).
    shard_dims: dict[str, int]

    def __init__(
        self, in_features: int, out_features: int, rows: int, columns: int, bias: int, group: Group, sequence_parallel: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.world = group.name, group.world
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(bias, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        bound = 1 / math.sqrt(in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if bias:
                self.bias.zero_()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, ranks={self.world}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + bias, with the output's features split over the group.

    The weight of each rank is [out_features / ranks, in_features]. Every rank initialises its own share, so seed each rank
    differently; `from_linear` takes the shares of a whole layer.

    `keep_gathered=False` gathers the input once more in the backward pass, instead of keeping it.
    """

    shard_dims = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        group: GroupLike = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        chosen = get_group(group)
        share = _share(out_features, chosen, "out_features")
        super().__init__(in_features, out_features, share, in_features, share if bias else 0, chosen, sequence_parallel, device, dtype)
        self.keep_gathered = keep_gathered

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, local_of(self.weight), local_of(self.bias), self.group, self.sequence_parallel, self.keep_gathered)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> ColumnParallelLinear:
        """This rank's share of a layer that all ranks have alike."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, **_as(linear, options))
        chosen = get_group(made.group)
        with torch.no_grad():
            made.weight.copy_(linear.weight.chunk(chosen.world, 0)[chosen.rank])
            if made.bias is not None:
                made.bias.copy_(linear.bias.chunk(chosen.world, 0)[chosen.rank])
        return _frozen_as(made, linear)


class RowParallelLinear(_ParallelLinear):
    """y = sum over the group of x W^T, plus the bias, with the input's features split over the group.

    The weight of each rank is [out_features, in_features / ranks]; the bias is the same on all. With sequence parallelism
    its gradient is of this rank's part of the sequence, until `finish_gradients`.
    """

    shard_dims = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        group: GroupLike = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        chosen = get_group(group)
        share = _share(in_features, chosen, "in_features")
        super().__init__(in_features, out_features, out_features, share, out_features if bias else 0, chosen, sequence_parallel, device, dtype)
        if bias and sequence_parallel:
            mark_own(self, "bias", chosen)

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, local_of(self.weight), local_of(self.bias), self.group, self.sequence_parallel)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> RowParallelLinear:
        """This rank's share of a layer that all ranks have alike."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, **_as(linear, options))
        chosen = get_group(made.group)
        with torch.no_grad():
            made.weight.copy_(linear.weight.chunk(chosen.world, 1)[chosen.rank])
            if made.bias is not None:
                made.bias.copy_(linear.bias)
        return _frozen_as(made, linear)


def _share(features: int, group: Group, what: str) -> int:
    if features % group.world != 0:
        raise invalid(f"{what}={features} does not divide over {group.world} ranks", group.rank)
    return features // group.world


def _frozen_as(made: Any, linear: nn.Linear) -> Any:
    """The layer, with those parameters frozen that are so in the whole layer."""
    for name, parameter in linear.named_parameters(recurse=False):
        getattr(made, name).requires_grad_(parameter.requires_grad)
    return made


def _as(linear: nn.Linear, options: dict[str, Any]) -> dict[str, Any]:
    return {"device": linear.weight.device, "dtype": linear.weight.dtype, **options}


def _cast_for_autocast(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Under torch.autocast, all in its type, as torch.nn.functional.linear does."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = autocast_dtype(x)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The element type that torch.autocast asks for, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
