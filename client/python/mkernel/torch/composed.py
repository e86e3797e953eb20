"""What composed gradients share: one warning for each operator, and a sum over ranks that each rank gets its rows of."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_warned: set[str] = set()


def warn_once(name: str) -> None:
    """Says that the gradient is right, and not fast."""
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"the gradient of mkernel::{name} is composed of gathers, local products and reduce-scatters: it is right, but not fused, and each "
            "rank holds what all ranks gathered",
            stacklevel=2,
        )


def reduce_scatter(parts: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over the group, by GEMM+ReduceScatter with the identity."""
    return torch.ops.mkernel.gemm_rs(parts, torch.eye(parts.shape[1], dtype=parts.dtype, device=parts.device), group)
