"""Which parameters of a model are shards, and what a training step and a checkpoint do with that.

A layer names its shards in `shard_dims`: by parameter, the dimension that is split over the layer's group. All other parameters are the same
on all ranks. Those marked by `mark_sequence_parallel` see a part of the sequence, so that their gradients are parts, too.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Optional, Union

import torch
from torch import Tensor, nn

from ..errors import invalid
from ..group import Group, GroupLike, get_group

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

#: Where a module keeps the names of its own parameters that are marked. It outlives the parameters, which FSDP replaces.
_MARKED = "_mkernel_sequence_parallel"


def mark_sequence_parallel(*what: Union[nn.Module, nn.Parameter]) -> None:
    """Says that these parameters are the same on all ranks, and their gradients of each rank's part of the sequence.

    That is so for norms, biases and embeddings that see a split sequence. `finish_gradients` sums their gradients. A module stays marked when
    `fully_shard` or `use_dtensors` replaces its parameters; a parameter that is given by itself does not.
    """
    for one in what:
        for module in one.modules() if isinstance(one, nn.Module) else ():
            _mark(module, [name for name, _ in module.named_parameters(recurse=False)])
        for parameter in one.parameters() if isinstance(one, nn.Module) else [one]:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def mark_own(module: nn.Module, name: str) -> None:
    """The same of one parameter of a module."""
    _mark(module, [name])
    getattr(module, name).sequence_parallel = True


def _mark(module: nn.Module, names: list[str]) -> None:
    setattr(module, _MARKED, getattr(module, _MARKED, frozenset()) | frozenset(names))


def finish_gradients(parameters: Union[nn.Module, Iterable[nn.Parameter]], group: GroupLike = None) -> None:
    """Sums the gradients of parameters marked by `mark_sequence_parallel` over the group, in float32.

    Call it after the backward pass, on all ranks. Where nothing is marked it does nothing. It uses torch.distributed where the group was made
    of a ProcessGroup, and else the group's own control plane, which is for small parameters.
    """
    if isinstance(parameters, nn.Module):
        found: Iterable[nn.Parameter] = (
            p for module, name, p in _parameters(parameters) if name in getattr(module, _MARKED, ()) or getattr(p, "sequence_parallel", False)
        )
    else:
        found = (p for p in parameters if getattr(p, "sequence_parallel", False))
    chosen = get_group(group)
    # Of a gradient that FSDP has dealt out, this rank's part: the ranks of the group have the same parts.
    gradients = [local_of(p.grad) for p in found if p.grad is not None]
    if not gradients or chosen.world == 1:
        return
    flat = _sum_over(chosen, torch.cat([gradient.detach().float().reshape(-1) for gradient in gradients]))
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))


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
        total = total + (square if name is None else _sum_over(get_group(name), square))
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
        if mesh.size() != group.world or (group.process_group is not None and not _is_of(group, mesh.get_group())):
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
            if getattr(parameter, "sequence_parallel", False):
                made.sequence_parallel = True  # type: ignore[attr-defined]
            module.register_parameter(name, made)


def local_of(tensor: Any) -> Any:
    """What this rank has of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, _DTensor) else tensor


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


def _sum_over(group: Group, values: Tensor) -> Tensor:
    """The sum over a group of a float32 tensor, which may be changed."""
    if group.world == 1:
        return values
    if group.process_group is not None:
        torch.distributed.all_reduce(values, group=group.process_group)
        return values
    return torch.from_numpy(group.sum_f32(values.cpu().numpy())).to(values.device)
