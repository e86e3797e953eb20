"""What composed gradients share: one warning for each operator, a sum over ranks that each rank gets its rows of, and an operator's memory."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch
from torch import Tensor

from .. import _c
from ..group import Group

_warned: set[str] = set()


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


def reduce_scatter(parts: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over the group."""
    return torch.ops.mkernel.reduce_scatter(parts, group)


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
