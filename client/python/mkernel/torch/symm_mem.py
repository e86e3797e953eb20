"""`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, by the operators of this package.

Inductor's pass for async tensor parallelism puts these two into a compiled graph. `use_for_async_tp` makes the graph's calls
come here, for groups that `mkernel.init` made of a ProcessGroup. Results lie in memory as PyTorch's do, which the graph relies on. Where the
operators do not take a tensor, PyTorch's collectives and products do.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from ..errors import Error, ErrorCode, invalid
from ..group import Group, groups
from . import operators

_overrides: dict[str, torch.library.Library] = {}
#: On GPUs, widths and inner dimensions are multiples of it.
_GPU_MULTIPLE = 8


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Optional[Tensor], list[Tensor]]:
    """(gathered A or None, its products with each of Bs). The first product is fused, the others use the gathered A."""
    gather_dim = _from_front(A, gather_dim)
    group = _group_for(A, Bs, gather_dim, group_name)
    if group is None:
        return _by_pytorch("_fused_all_gather_matmul_fallback", A, Bs, gather_dim, group_name, **({} if return_A else {"return_A": False}))
    front = A.movedim(gather_dim, 0)
    flat = front.reshape(-1, front.shape[-1])
    keep = return_A or len(Bs) > 1

    def back(y: Tensor) -> Tensor:
        return y.view(-1, *front.shape[1:-1], y.shape[-1]).movedim(0, gather_dim)

    first, gathered = torch.ops.mkernel.ag_gemm(flat, Bs[0], *operators.name_and_world(group), keep)
    products = [first, *(gathered @ b for b in Bs[1:])]
    return back(gathered) if return_A else None, [back(y) for y in products]


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part, by `scatter_dim`, of the sum or the mean over the group of A B."""
    scatter_dim = _from_front(A, scatter_dim)
    group = _group_for(A, [B], scatter_dim, group_name)
    if group is None or reduce_op not in ("sum", "avg") or A.shape[scatter_dim] % group.world != 0:
        return _by_pytorch("_fused_matmul_reduce_scatter_fallback", A, B, reduce_op, scatter_dim, group_name)
    front = A.movedim(scatter_dim, 0)
    y = operators.gemm_rs(front.reshape(-1, front.shape[-1]), B, group=group.name)
    y = y.view(-1, *front.shape[1:-1], B.shape[1])
    if scatter_dim != 0:  # contiguous() keeps strange strides of dimensions of 1
        y = y.movedim(0, scatter_dim).clone(memory_format=torch.contiguous_format)
    return y / group.world if reduce_op == "avg" else y


def _from_front(A: Tensor, dim: int) -> int:
    return dim + A.dim() if -A.dim() <= dim < 0 else dim


def _group_for(A: Tensor, Bs: Sequence[Tensor], dim: int, name: str) -> Optional[Group]:
    """The group whose operators take these tensors, split by the dimension `dim`; None where there is none."""
    group = next((one for one in groups() if one.name == name or getattr(one.process_group, "group_name", None) == name), None)
    matrices = A.dim() >= 2 and len(Bs) > 0 and all(B.dim() == 2 and B.shape[0] == A.shape[-1] for B in Bs)
    if group is None or not matrices or not 0 <= dim < A.dim() - 1 or A.numel() == 0 or Bs[0].numel() == 0:
        return None
    if A.dtype not in operators._DTYPES or any(B.dtype != A.dtype or B.device != A.device for B in Bs):
        return None
    if A.is_cuda and any(size % _GPU_MULTIPLE != 0 for size in Bs[0].shape):
        return None
    return group


def _by_pytorch(function: str, A: Tensor, *arguments: Any, **more: Any) -> Any:
    """PyTorch's function for where it does not fuse. The last of the arguments is the group's name, which may be ours."""
    import torch.distributed._symmetric_memory as symmetric_memory

    *others, name = arguments
    group = next((one for one in groups() if one.name == name), None)
    if group is not None:
        if group.process_group is None:
            raise invalid(
                f"symm_mem: elements of {A.dtype}, or these shapes, go by torch.distributed, and group '{name}' has no ProcessGroup: make it by "
                "mkernel.init(a ProcessGroup), or cast to bfloat16",
                group.rank,
            )
        name = group.process_group.group_name
    return getattr(symmetric_memory, function)(A, *others, name, **more)


def use_for_async_tp(device: str = "cuda") -> None:
    """From now on, torch.ops.symm_mem's two operators run by this package on that kind of device.

    Call it after `mkernel.init`. Inductor's pass then takes the groups that were made of a ProcessGroup: turn it on by
    ``torch._inductor.config._micro_pipeline_tp = True``. Element types other than bf16 and f16 run by PyTorch's collectives, unfused.
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
