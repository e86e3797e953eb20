"""What the operators of torch.library share: how they are made, tensors as the library reads them, a warning for each composed gradient."""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, Callable

import torch
from torch import Tensor

from .. import _c
from ..group import Group

#: Of addresses that kernels read by vectors, in bytes.
_GPU_ALIGNMENT = 16
_warned: set[str] = set()


def operator(name: str, schema: str, *, waits: bool = False) -> Callable[[Callable], Any]:
    """Makes a function the operator mkernel::`name`.

    A cache of graphs knows an operator by its arguments. So where shapes of results follow from the group's size, `world` is an argument. `waits`: the
    operator waits for the device, or copies from pageable memory. No CUDA graph can hold that.
    """
    more: dict[str, Any] = {}
    if waits and hasattr(torch.Tag, "cudagraph_unsafe"):
        more["tags"] = (torch.Tag.cudagraph_unsafe,)

    def make(body: Callable) -> Any:
        return torch.library.custom_op(f"mkernel::{name}", in_own_types(body), mutates_args=(), schema=schema, **more)

    return make


def in_own_types(body: Callable) -> Callable:
    """An operator's function, or its gradient's, that also under torch.autocast computes in the types that its tensors have."""

    @functools.wraps(body)
    def run(*arguments: Any) -> Any:
        device = next((x.device.type for x in arguments if isinstance(x, Tensor)), "")
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return body(*arguments)
        with torch.autocast(device, enabled=False):
            return body(*arguments)

    return run


def misaligned(x: Tensor) -> bool:
    """Whether x begins where a GPU's kernels cannot read it."""
    return x.is_cuda and x.data_ptr() % _GPU_ALIGNMENT != 0


def dense(x: Tensor) -> Tensor:
    """x row after row, where the library can read it; a copy if it is not so."""
    return x.clone(memory_format=torch.contiguous_format) if misaligned(x) else x.contiguous()


def warn_once(name: str, what: str = "gradient") -> None:
    """Says that what is composed is right, and not fast."""
    if name not in _warned:
        _warned.add(name)
        subject = f"the gradient of mkernel::{name}" if what == "gradient" else f"mkernel::{name}"
        warnings.warn(
            f"{subject} is composed of gathers, local products and reduce-scatters: it is right, but not fused, and each rank holds what all "
            "ranks gathered",
            stacklevel=2,
        )


def all_gather(a: Tensor, group: Group) -> Tensor:
    """All ranks' rows, one rank after the other."""
    return torch.ops.mkernel.all_gather(a, group.name, group.world)


def reduce_scatter(parts: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over the group."""
    return torch.ops.mkernel.reduce_scatter(parts, group.name, group.world)


class _Words:
    """Words in a GPU's memory, as PyTorch takes them from other libraries."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i4", "data": (address, False), "version": 3}


def on_device(group: Group, operator: Any, what: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What an operator keeps in the GPU's memory, as int32; valid until its next launch."""
    data, count = ctypes.c_void_p(), ctypes.c_uint64()
    _c.call("mk_op_query", operator, what, ctypes.byref(data), ctypes.byref(count), rank=group.rank)
    if 0 in shape:
        return torch.empty(shape, dtype=torch.int32, device=device)
    return torch.as_tensor(_Words(data.value or 0, shape), device=device)
