"""`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, by the operators of this package.

Inductor's pass for async tensor parallelism puts these two into a compiled graph. `use_for_async_tp` makes the graph's calls
come here, for groups that `mkernel.init` made of a ProcessGroup.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from ..errors import Error, ErrorCode, invalid
from ..group import get_group, groups
from . import operators

_overrides: dict[str, torch.library.Library] = {}


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Optional[Tensor], list[Tensor]]:
    """(gathered A or None, its products with each of Bs). The first product is fused, the others use the gathered A."""
    if not Bs:
        raise invalid("fused_all_gather_matmul: Bs is empty")
    front = A.movedim(gather_dim, 0)
    flat = front.reshape(-1, front.shape[-1])
    keep = return_A or len(Bs) > 1

    def back(y: Tensor) -> Tensor:
        return y.view(-1, *front.shape[1:-1], y.shape[-1]).movedim(0, gather_dim)

    first, gathered = torch.ops.mkernel.ag_gemm(flat, Bs[0], get_group(group_name).name, keep)
    products = [first, *(gathered @ b for b in Bs[1:])]
    return back(gathered) if return_A else None, [back(y) for y in products]


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part, by `scatter_dim`, of the sum or the mean over the group of A B."""
    if reduce_op not in ("sum", "avg"):
        raise invalid(f"fused_matmul_reduce_scatter: reduce_op '{reduce_op}': it must be sum or avg")
    group = get_group(group_name)
    front = A.movedim(scatter_dim, 0)
    y = operators.gemm_rs(front.reshape(-1, front.shape[-1]), B, group=group.name)
    y = y.view(-1, *front.shape[1:-1], B.shape[1]).movedim(0, scatter_dim)
    return y / group.world if reduce_op == "avg" else y


def use_for_async_tp(device: str = "cuda") -> None:
    """From now on, torch.ops.symm_mem's two operators run by this package on that kind of device.

    Call it after `mkernel.init`. Inductor's pass then takes the groups that were made of a ProcessGroup: turn it on by
    ``torch._inductor.config._micro_pipeline_tp = True``.
    """
    try:
        import torch.distributed._symmetric_memory as symmetric_memory  # it defines the operators

        for group in groups():
            if group.process_group is not None:
                symmetric_memory.enable_symm_mem_for_group(group.process_group.group_name)
        if device in _overrides:
            return
        library = torch.library.Library("symm_mem", "IMPL")
        key = {"cuda": "CUDA", "cpu": "CPU"}[device]
        for function in (fused_all_gather_matmul, fused_matmul_reduce_scatter):
            library.impl(function.__name__, function, key, allow_override=True)
    except (AttributeError, ImportError, TypeError) as error:
        raise Error(
            ErrorCode.UNSUPPORTED, f"PyTorch {torch.__version__} cannot have its async tensor parallelism replaced ({error}): use a later one"
        ) from None
    _overrides[device] = library
