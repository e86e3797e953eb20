"""Styles for torch.distributed.tensor.parallelize_module, which run linear layers by the fused operators.

    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

Weights become DTensors, so optimizers, checkpoints and clipping see what they know. Inputs and outputs are local tensors.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.tensor.parallel import ParallelStyle

try:
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor  # type: ignore[no-redef]

from ..errors import invalid
from ..group import groups, init
from .layers import column_parallel, row_parallel
from .process_groups import is_of
from .shards import local_of


class _Style(ParallelStyle):
    """`sequence_dim`: the dimension by which activations between the layers are split; None: they are not."""

    #: Of a linear layer's parameters.
    _placements: dict[str, Any]

    def __init__(self, *, sequence_dim: Any = 0) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise invalid(f"{type(self).__name__} is for nn.Linear, not for {type(module).__name__}")
        group, dim = _group_of(device_mesh), self.sequence_dim
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [self._placements[name]])
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        run, bias_of = self._run, self._bias

        def forward(layer: nn.Linear, x: Tensor) -> Tensor:
            bias = None if layer.bias is None else bias_of(layer.bias)
            first = x if dim in (None, 0) else x.transpose(0, dim)
            y = run(first, local_of(layer.weight), bias, group, dim is not None)
            return y if dim in (None, 0) else y.transpose(0, dim)

        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        return module

    def _bias(self, bias: Any) -> Tensor:
        return local_of(bias)

    @staticmethod
    def _run(x: Tensor, weight: Tensor, bias: Any, group: str, sequence_parallel: bool) -> Tensor:
        raise NotImplementedError


class ColwiseParallel(_Style):
    """Splits a linear layer's output features: AllGather+GEMM, or with ``sequence_dim=None`` a local product."""

    _placements = {"weight": Shard(0), "bias": Shard(0)}

    _run = staticmethod(column_parallel)


class RowwiseParallel(_Style):
    """Splits a linear layer's input features: GEMM+ReduceScatter, or with ``sequence_dim=None`` GEMM+AllReduce."""

    _placements = {"weight": Shard(1), "bias": Replicate()}

    def _bias(self, bias: Any) -> Tensor:
        return local_of(bias) if self.sequence_dim is None else _WithSummedGradient.apply(local_of(bias), bias.device_mesh.get_group().group_name)

    _run = staticmethod(row_parallel)


class _WithSummedGradient(torch.autograd.Function):
    """A bias that sees a part of the sequence. A hook of the parameter would be lost where `fully_shard` replaces it."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, group: str) -> Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return functional_collectives.all_reduce(gradient.float(), "sum", ctx.group).to(gradient.dtype), None


def _group_of(mesh: DeviceMesh) -> str:
    """The name of the group on that mesh; `init` made it, or makes it now."""
    wanted = mesh.get_group()
    for group in groups():
        if is_of(group, wanted):
            return group.name
    return init(mesh, name=f"mesh-{wanted.group_name}").name
