"""Parameters that see a part of the sequence, and the sums of their gradients over the ranks that see the other parts."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Optional, Sequence, Union

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..errors import invalid
from ..group import Group, GroupLike, get_group, groups
from .shards import from_local, is_dtensor, local_of, sum_over

#: The names of the groups that a parameter is marked for; None is the group that `finish_gradients` is given.
Marks = frozenset[Optional[str]]
#: Where a module keeps the marks of its own parameters, by name. They outlive the parameters, which FSDP replaces.
_OF_MODULE = "_mkernel_sequence_parallel"
_OF_PARAMETER = "_mkernel_groups"


def mark_sequence_parallel(*what: Union[nn.Module, nn.Parameter], group: GroupLike = None) -> None:
    """Says that these parameters are the same on all ranks, and their gradients of each rank's part of the sequence.

    That is so for norms, biases and embeddings that see a split sequence. `finish_gradients` sums their gradients over `group`; without one, over
    the group that it is given itself. A parameter may be marked for several groups, over which the sequence is split one way and another: its
    gradient is summed over each. A module stays marked when `fully_shard` or `use_dtensors` replaces its parameters; a parameter that is given by
    itself does not.
    """
    for one in what:
        for module in one.modules() if isinstance(one, nn.Module) else ():
            for name, parameter in module.named_parameters(recurse=False):
                mark_own(module, name, group)
        if not isinstance(one, nn.Module):
            _mark_parameter(one, group)


def mark_own(module: nn.Module, name: str, group: GroupLike = None) -> None:
    """The same of one parameter of a module."""
    marks: dict[str, Marks] = dict(getattr(module, _OF_MODULE, {}))
    marks[name] = marks.get(name, frozenset()) | {_name(group)}
    setattr(module, _OF_MODULE, marks)
    _mark_parameter(getattr(module, name), group)


def _mark_parameter(parameter: Any, group: GroupLike) -> None:
    setattr(parameter, _OF_PARAMETER, getattr(parameter, _OF_PARAMETER, frozenset()) | {_name(group)})
    parameter.sequence_parallel = True  # the name that Megatron gives it


def _name(group: GroupLike) -> Optional[str]:
    return group.name if isinstance(group, Group) else group


def finish_gradients(parameters: Union[nn.Module, Iterable[nn.Parameter]], group: GroupLike = None) -> None:
    """Sums the gradients of parameters marked by `mark_sequence_parallel`, in float32: each over the groups that its marks name.

    Where a mark names no group it is `group`, or the default. Call it on all ranks, after the last backward pass of a step. It may be called after
    each, too: it sums what came since the last call. Then every call sends as much, and rounds once more. Where nothing is marked it does nothing.
    It uses torch.distributed where a group was made of a ProcessGroup, and else the group's own control plane, which is for small parameters.
    """
    with torch.no_grad():
        sums = [one for parameter, marks in _marked(parameters) if (one := _sum_of(parameter, _named(marks, group))) is not None]
        for over in _in_order({each.name: each for one in sums for each in one.over}.values()):
            those = [one for one in sums if over in one.over]
            flat = sum_over(over, torch.cat([one.values for one in those]))
            for one, total in zip(those, flat.split([one.values.numel() for one in those])):
                one.values = total
        for one in sums:
            one.write()


def _marked(parameters: Union[nn.Module, Iterable[nn.Parameter]]) -> list[tuple[nn.Parameter, Marks]]:
    """The marked parameters that have gradients, each once, and all their marks."""
    found: dict[int, tuple[nn.Parameter, Marks]] = {}

    def add(parameter: Any, more: Marks) -> None:
        own = getattr(parameter, _OF_PARAMETER, frozenset([None]) if getattr(parameter, "sequence_parallel", False) else frozenset())
        marks = found.get(id(parameter), (parameter, frozenset()))[1] | own | more
        if marks and parameter.grad is not None:
            found[id(parameter)] = parameter, marks

    if isinstance(parameters, nn.Module):
        for module in parameters.modules():
            marks = getattr(module, _OF_MODULE, {})
            for name, parameter in module.named_parameters(recurse=False):
                add(parameter, marks.get(name, frozenset()))
    else:
        for parameter in parameters:
            add(parameter, frozenset())
    return list(found.values())


def _named(marks: Marks, group: GroupLike) -> list[Group]:
    """The groups to sum over. One whose ranks are all in another's is left out: the sum over that one has theirs."""
    named = _in_order({get_group(group if mark is None else mark) for mark in marks})
    chosen: list[Group] = []
    for one in sorted(named, key=lambda one: -one.world):
        if one.world > 1 and not any(_has(other, one) for other in chosen):
            chosen.append(one)
    return chosen


def _has(whole: Group, part: Group) -> bool:
    """Whether the ranks of one group are all in another's."""
    return part is whole or (part.ranks is not None and whole.ranks is not None and set(part.ranks) <= set(whole.ranks))


def _in_order(chosen: Iterable[Group]) -> list[Group]:
    """In the order in which `init` made them, which is that of all their ranks."""
    made = groups()
    return sorted(chosen, key=lambda one: made.index(one) if one in made else -1)


# --- The part that has been summed, and the part that came since ---------------------------------------


class _Finished:
    """A parameter whose gradient `finish_gradients` has summed. Its hooks see that a backward pass adds to that."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = TensorWeakRef(parameter)
        self._gradient: Optional[TensorWeakRef] = None
        self._version = 0
        self._adding = False
        self.over: Sequence[Group] = ()
        #: Of a DTensor, its part as it was then: FSDP calls no hook before it adds.
        self._copy: Optional[Tensor] = None
        #: The gradient as it was when something was first added; None: nothing has been.
        self.base: Optional[Tensor] = None
        if parameter.requires_grad:
            parameter.register_hook(self._before)
            parameter.register_post_accumulate_grad_hook(self._behind)

    def write(self, parameter: Any, over: Sequence[Group], total: Tensor) -> None:
        """Makes the total the gradient."""
        gradient, self._copy, self.base = parameter.grad, None, None
        local = local_of(gradient)
        if is_dtensor(gradient):
            self._copy = total.to(local.dtype, copy=True)
        if self._copy is not None and local._is_view():
            # FSDP's gradients are views of one tensor, whose version says nothing of one of them.
            parameter.grad = gradient = from_local(self._copy.clone(), gradient)
        else:
            local.copy_(total)
        self._is_now(gradient)
        self.over = over

    def is_about(self, gradient: Any) -> bool:
        """Whether it has summed this gradient, perhaps not all of it. A `zero_grad` that drops gradients makes it forget."""
        if gradient is None or (self.base is None and not self._is(gradient)):
            self._forget()
        return self._gradient is not None

    def _forget(self) -> None:
        self._gradient = self._copy = self.base = None

    def _is(self, gradient: Any) -> bool:
        return self._gradient is not None and self._gradient() is gradient

    def _is_now(self, gradient: Any) -> None:
        self._gradient = TensorWeakRef(gradient)
        self._version = self._version_of(gradient)

    @staticmethod
    def _version_of(gradient: Any) -> int:
        """Changes with each operation on the gradient."""
        return gradient._version + (local_of(gradient)._version if is_dtensor(gradient) else 0)

    @torch.no_grad()
    def _before(self, _: Tensor) -> None:
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self._forget()
        # Also where DistributedDataParallel has moved it.
        self._adding = self._gradient is not None
        # Whatever it is now counts as summed: the total, or the zeros of zero_grad. Zeros may come later, too.
        changed = self._adding and (not self._is(gradient) or self._version != self._version_of(gradient))
        if self._adding and (self.base is None or (changed and not local_of(gradient).any())):
            self.base = local_of(gradient).clone()

    @torch.no_grad()
    def _behind(self, parameter: Any) -> None:
        gradient = parameter.grad
        if not self._adding:
            if not self._is(gradient):
                self._forget()
                return
            # Of FSDP. Its one operation is all that has happened, or zero_grad came in between.
            if self._version_of(gradient) != self._version + 1:
                self.base = torch.zeros_like(local_of(gradient))
            elif self.base is None:
                self.base = self._copy
        self._adding = False
        self._is_now(gradient)  # create_graph=True makes a new one


#: By parameter.
_finished = WeakTensorKeyDictionary()


@dataclasses.dataclass
class _Sum:
    """One gradient that is to be summed."""

    parameter: Any
    over: Sequence[Group]
    #: Over which it has been summed already.
    before: Sequence[Group]
    values: Tensor
    base: Optional[Tensor]

    def write(self) -> None:
        total = self.values.view_as(local_of(self.parameter.grad))
        if self.base is not None:
            total = total + self.base
        if self.parameter not in _finished:
            _finished[self.parameter] = _Finished(self.parameter)
        _finished[self.parameter].write(self.parameter, [*self.before, *self.over], total)


def _sum_of(parameter: Any, over: list[Group]) -> Optional[_Sum]:
    """The part of a gradient that is to be summed; None where all of it has been."""
    finished, local = _finished.get(parameter), local_of(parameter.grad)
    before: Sequence[Group] = ()
    base = None
    if finished is not None and not finished.is_about(parameter.grad):
        finished = None
    if finished is not None and finished.base is None:
        before = finished.over
        over = [one for one in over if not any(_has(other, one) for other in before)]
    elif finished is not None and _alike(finished.over, over):
        base = finished.base
    elif finished is not None and finished.base.any():
        raise invalid(
            f"finish_gradients: a gradient of {tuple(local.shape)} was summed over {_listed(finished.over)} and added to, and is now to be summed over "
            f"{_listed(over)}: mark its parameter for all of them by mark_sequence_parallel(..., group=...)"
        )
    if not over:
        return None
    values = local.float() if base is None else local.float() - base.float()
    return _Sum(parameter, over, before, values.reshape(-1), base)


def _alike(some: Sequence[Group], others: Sequence[Group]) -> bool:
    return all(any(_has(b, a) for b in others) for a in some) and all(any(_has(a, b) for a in some) for b in others)


def _listed(over: Sequence[Group]) -> str:
    return ", ".join(f"'{one.name}'" for one in over)
