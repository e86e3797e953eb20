"""Which parameters of a model are shards, and what a training step and a checkpoint do with that.

A layer names its shards in `shard_dims`: by parameter, the dimension that is split over the layer's group. All other parameters are the same
on all ranks.
"""

from __future__ import annotations

from typing import Any, Iterator, Optional

import torch
from torch import Tensor, nn

from ..errors import invalid
from ..group import Group, get_group

_DTensor: Any
try:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _DTensor = (DTensor,)
except ImportError:
    try:  # PyTorch 2.4
        from torch.distributed._tensor import DTensor, Replicate, Shard  # type: ignore[no-redef]

        _DTensor = (DTensor,)
    except ImportError:  # a build without torch.distributed
        _DTensor = ()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the model's gradients so that their 2-norm is at most `max_norm`, and returns the norm that they had, in float32.

    The norm is that of the whole model: shards count once each, and what ranks have alike counts once. PyTorch's function of this name knows
    no shards that are plain tensors, and refuses a model that has DTensors and plain tensors. Call it on all ranks, after `finish_gradients`.
    """
    sums: dict[tuple, Tensor] = {}
    gradients = []
    for module, name, parameter in _parameters(model):
        if parameter.grad is None:
            continue
        summed = _summed(parameter.grad)
        over = _groups_of(summed)
        group = _group_of_shard(module, name, over)
        square = torch.linalg.vector_norm(local_of(summed).detach(), dtype=torch.float32).square()
        key = (group.name if group else None, over)
        sums[key] = sums[key] + square if key in sums else square
        gradients.append(local_of(parameter.grad))
    if not sums:
        return torch.zeros(())
    total: Any = 0
    for (name, over), square in sums.items():
        for process_group in over:
            torch.distributed.all_reduce(square, group=process_group)
        total = total + (square if name is None else sum_over(get_group(name), square))
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(factor.to(gradient.device))
    return norm


def use_dtensors(model: nn.Module, mesh: Any) -> None:
    """From now on, the shards of the model's layers are DTensors on `mesh`, one dimension of a DeviceMesh over the layers' ranks.

    Optimizers and torch.distributed.checkpoint then know how the whole lies, and a checkpoint may be loaded over another number of ranks.
    The whole is the shards in the order of the ranks. Call it before the optimizer is made, and before `fully_shard`.
    """
    for module in list(model.modules()):
        group = _shard_group(module)
        if group is None:
            continue
        if group.ranks is None and mesh.size() == group.world:  # made by a place, which numbers ranks anew
            group.ranks = tuple(torch.distributed.get_process_group_ranks(mesh.get_group()))
        if not _is_of(group, mesh.get_group()):
            raise invalid(f"use_dtensors: {type(module).__name__} is split over {group!r}, and the mesh {mesh} has other ranks", group.rank)
        whole = getattr(module, "experts_total", 0)
        if whole % group.world != 0:
            raise invalid(f"use_dtensors: {whole} experts do not divide over {group.world} ranks", group.rank)
        dims = _shard_dims(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, _DTensor):
                continue
            placement = Shard(dims[name]) if name in dims else Replicate()
            made = nn.Parameter(DTensor.from_local(parameter.data, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # marks, and what others have put there
            module.register_parameter(name, made)


def is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, _DTensor)


def local_of(tensor: Any) -> Any:
    """What this rank has of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, _DTensor) else tensor


def from_local(local: Tensor, like: Any) -> Any:
    """A DTensor that lies as another does."""
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module that has it, its name there, the parameter), each parameter once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name, parameter


def _shard_dims(module: nn.Module) -> dict[str, int]:
    return getattr(module, "shard_dims", {})


def _shard_group(module: nn.Module) -> Optional[Group]:
    return get_group(module.group) if _shard_dims(module) else None  # type: ignore[arg-type]


def _group_of_shard(module: nn.Module, name: str, over: tuple) -> Optional[Group]:
    """The group over which a parameter is split in plain tensors; None where it is not, or where a DTensor says so."""
    group = _shard_group(module)
    if group is None or name not in _shard_dims(module) or any(_is_of(group, one) for one in over):
        return None
    return group


def _summed(gradient: Any) -> Any:
    """The gradient, without parts that still have to be added: PyTorch's norms of a split sequence leave such."""
    if not any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        return gradient
    return gradient.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in gradient.placements])


def _groups_of(gradient: Any) -> tuple:
    """The ProcessGroups whose ranks have different parts of a gradient."""
    placements = getattr(gradient, "placements", ())
    return tuple(gradient.device_mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _is_of(group: Group, process_group: Any) -> bool:
    from .process_groups import is_of  # which not every build of PyTorch can import

    return is_of(group, process_group)


def sum_over(group: Group, values: Tensor) -> Tensor:
    """The sum over a group of a float32 tensor, which may be changed."""
    if group.world == 1:
        return values
    if group.process_group is not None:
        torch.distributed.all_reduce(values, group=group.process_group)
        return values
    return torch.from_numpy(group.sum_f32(values.cpu().numpy())).to(values.device)
