"""`mkernel::ag_gemm`, `gemm_rs`, `gemm_ar` and `copy_gemm` of torch.library, with fakes and gradients.

Tensors on CPUs are computed when the call returns. Tensors on GPUs are launched on the current stream: the call returns at once,
and a failure shows at a later call or at `Group.check`.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _c, gradients
from ..errors import invalid
from ..group import Group, GroupLike, get_group

_DTYPES = {torch.bfloat16: _c.BF16, torch.float16: _c.F16}


# --- What people call -------------------------------------------------------------------------------


def ag_gemm(
    a: Tensor, b: Tensor, *, group: GroupLike = None, keep_gathered: bool = True, return_gathered: bool = False
) -> Any:
    """AllGather + GEMM: (all ranks' rows of A) B. Every rank has as many rows.

    `keep_gathered` keeps the gathered A for the gradient of B; without it the backward pass gathers again, which
    takes time instead of memory. `return_gathered`: (C, A gathered).
    """
    keep = return_gathered or (keep_gathered and b.requires_grad)
    out, gathered = torch.ops.mkernel.ag_gemm(a, b, _name(group), keep)
    return (out, gathered) if return_gathered else out


def gemm_rs(a: Tensor, b: Tensor, *, group: GroupLike = None) -> Tensor:
    """GEMM + ReduceScatter: this rank's rows of the sum over all ranks of A B; the ranks divide the rows."""
    return torch.ops.mkernel.gemm_rs(a, b, _name(group))


def gemm_ar(a: Tensor, b: Tensor, *, group: GroupLike = None) -> Tensor:
    """GEMM + AllReduce: the sum over all ranks of A B, the same bits on every rank.

    The gradient takes dY to be the same on all ranks, as it is where what follows is the same on all.
    """
    return torch.ops.mkernel.gemm_ar(a, b, _name(group))


def copy_gemm(a: Tensor, b: Tensor, *, group: GroupLike = None) -> Tensor:
    """A B with the same A on all ranks and the columns of B of each: local, and dA is GEMM + AllReduce."""
    return torch.ops.mkernel.copy_gemm(a, b, _name(group))


def all_gather(a: Tensor, *, group: GroupLike = None) -> Tensor:
    """All ranks' rows of A. It is an AllGather + GEMM of eight columns, which brings the rows."""
    return torch.ops.mkernel.ag_gemm(a, a.new_zeros((a.shape[1], 8)), _name(group), True)[1]


def _name(group: GroupLike) -> str:
    if group is None:
        return ""
    return group if isinstance(group, str) else group.name


# --- The operators ----------------------------------------------------------------------------------


@torch.library.custom_op("mkernel::ag_gemm", mutates_args=(), schema="(Tensor a, Tensor b, str group, bool keep) -> (Tensor, Tensor)")
def _ag_gemm(a: Tensor, b: Tensor, group: str, keep: bool) -> tuple[Tensor, Tensor]:
    chosen = _checked("ag_gemm", a, b, group)
    m = a.shape[0] * chosen.world
    c = a.new_empty((m, b.shape[1]))
    gathered = a.new_empty((m if keep else 0, a.shape[1]))
    _launch(chosen, "ag-gemm", a, b, c, m, gathered if keep else None)
    return c, gathered


@torch.library.custom_op("mkernel::gemm_rs", mutates_args=(), schema="(Tensor a, Tensor b, str group) -> Tensor")
def _gemm_rs(a: Tensor, b: Tensor, group: str) -> Tensor:
    chosen = _checked("gemm_rs", a, b, group)
    _check_divides(a.shape[0], chosen)
    c = a.new_empty((a.shape[0] // chosen.world, b.shape[1]))
    _launch(chosen, "gemm-rs", a, b, c, a.shape[0], None)
    return c


@torch.library.custom_op("mkernel::gemm_ar", mutates_args=(), schema="(Tensor a, Tensor b, str group) -> Tensor")
def _gemm_ar(a: Tensor, b: Tensor, group: str) -> Tensor:
    chosen = _checked("gemm_ar", a, b, group)
    c = a.new_empty((a.shape[0], b.shape[1]))
    _launch(chosen, "gemm-ar", a, b, c, a.shape[0], None)
    return c


@torch.library.custom_op("mkernel::copy_gemm", mutates_args=(), schema="(Tensor a, Tensor b, str group) -> Tensor")
def _copy_gemm(a: Tensor, b: Tensor, group: str) -> Tensor:
    _checked("copy_gemm", a, b, group)
    return torch.mm(a, b)


@_ag_gemm.register_fake
def _(a: Tensor, b: Tensor, group: str, keep: bool) -> tuple[Tensor, Tensor]:
    m = a.shape[0] * get_group(group).world
    return a.new_empty((m, b.shape[1])), a.new_empty((m if keep else 0, a.shape[1]))


@_gemm_rs.register_fake
def _(a: Tensor, b: Tensor, group: str) -> Tensor:
    chosen = get_group(group)
    _check_divides(a.shape[0], chosen)
    return a.new_empty((a.shape[0] // chosen.world, b.shape[1]))


@_gemm_ar.register_fake
def _(a: Tensor, b: Tensor, group: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@_copy_gemm.register_fake
def _(a: Tensor, b: Tensor, group: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


# --- Their gradients --------------------------------------------------------------------------------


class _TorchOps:
    """What gradients.py needs, on PyTorch's tensors."""

    @staticmethod
    def ag_gemm(a: Tensor, b: Tensor, group: str) -> tuple[Tensor, Tensor]:
        return torch.ops.mkernel.ag_gemm(a, b, group, True)

    @staticmethod
    def gemm_rs(a: Tensor, b: Tensor, group: str) -> Tensor:
        return torch.ops.mkernel.gemm_rs(a, b, group)

    @staticmethod
    def gemm_ar(a: Tensor, b: Tensor, group: str) -> Tensor:
        return torch.ops.mkernel.gemm_ar(a, b, group)

    @staticmethod
    def all_gather(a: Tensor, group: str) -> Tensor:
        return all_gather(a, group=group)

    @staticmethod
    def mm(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y)

    @staticmethod
    def mm_t(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        # As b lies: the gradient of a linear layer's weight is then dense, without a copy.
        return torch.mm(x.t(), y) if b.is_contiguous() else torch.mm(y.t(), x).t()


def _save_ag_gemm(ctx: Any, inputs: tuple, output: tuple) -> None:
    a, b, ctx.group, ctx.keep = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.keep else a, b)


def _ag_gemm_backward(ctx: Any, dy: Optional[Tensor], dgathered: Optional[Tensor]) -> tuple:
    kept, b = ctx.saved_tensors
    want_a, want_b = ctx.needs_input_grad[:2]
    gathered, a = (kept, None) if ctx.keep else (None, kept)
    da = db = None
    if dy is not None:
        # What flows back into the gathered A is one more product, by the identity, of the same reduce-scatter.
        beside = ctx.keep and want_a and dgathered is not None
        da, db = gradients.ag_gemm(_TorchOps, dy, a, b, gathered, ctx.group, want_a and not beside, want_b)
        if beside and dgathered is not None:
            one = torch.eye(b.shape[0], dtype=b.dtype, device=b.device)
            da = torch.ops.mkernel.gemm_rs(torch.cat([dy, dgathered], 1), torch.cat([b.t(), one], 0), ctx.group)
    elif dgathered is not None and ctx.keep and want_a:
        da = torch.ops.mkernel.gemm_rs(dgathered, torch.eye(b.shape[0], dtype=b.dtype, device=b.device), ctx.group)
    return da, db, None, None


def _save_operands(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, ctx.group = inputs
    ctx.save_for_backward(a, b)


def _gemm_rs_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    want_a, want_b = ctx.needs_input_grad[:2]
    if not want_a and not want_b:
        return None, None, None
    da, db = gradients.gemm_rs(_TorchOps, dy, a, b, ctx.group, want_b)
    return da if want_a else None, db, None


def _gemm_ar_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    return (*gradients.gemm_ar(_TorchOps, dy, a, b, *ctx.needs_input_grad[:2]), None)


def _copy_gemm_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    return (*gradients.copy_gemm(_TorchOps, dy, a, b, ctx.group, *ctx.needs_input_grad[:2]), None)


_ag_gemm.register_autograd(_ag_gemm_backward, setup_context=_save_ag_gemm)
_gemm_rs.register_autograd(_gemm_rs_backward, setup_context=_save_operands)
_gemm_ar.register_autograd(_gemm_ar_backward, setup_context=_save_operands)
_copy_gemm.register_autograd(_copy_gemm_backward, setup_context=_save_operands)


# --- The launch -------------------------------------------------------------------------------------


def _checked(what: str, a: Tensor, b: Tensor, group: str) -> Group:
    chosen = get_group(group)
    if a.dim() != 2 or b.dim() != 2:
        raise invalid(f"{what}: a has {a.dim()} dimensions and b {b.dim()}; both must be matrices: reshape them", chosen.rank)
    if a.shape[1] != b.shape[0]:
        raise invalid(f"{what}: a is {tuple(a.shape)} and b {tuple(b.shape)}: the inner dimensions differ", chosen.rank)
    if a.dtype != b.dtype or a.dtype not in _DTYPES:
        raise invalid(f"{what}: elements of {a.dtype} and {b.dtype}: both must be torch.bfloat16 or torch.float16", chosen.rank)
    if a.device != b.device or a.device.type not in ("cpu", "cuda"):
        raise invalid(f"{what}: tensors on {a.device} and {b.device}: both must be on CPUs or on one GPU", chosen.rank)
    return chosen


def _check_divides(rows: int, group: Group) -> None:
    if rows % group.world != 0:
        raise invalid(f"gemm_rs: {rows} rows do not divide over {group.world} ranks: pad them", group.rank)


def _launch(group: Group, name: str, a: Tensor, b: Tensor, c: Tensor, m: int, gathered: Optional[Tensor]) -> None:
    a = a.contiguous()
    if not b.is_contiguous() and not b.t().is_contiguous():
        b = b.contiguous()
    arguments: dict[str, Any] = dict(
        a=a.data_ptr(),
        b=b.data_ptr(),
        c=c.data_ptr(),
        m=m,
        n=b.shape[1],
        k=a.shape[1],
        dtype=_DTYPES[a.dtype],
        layout=_c.KN if b.is_contiguous() else _c.NK,
        gathered=0 if gathered is None else gathered.data_ptr(),
    )
    if a.device.type == "cpu":
        group.launch_gemm(name, **arguments)
        return
    with torch.cuda.device(a.device):
        # Copies made here are freed in the order of the same stream.
        group.launch_gemm(name, device=a.device.index, stream=torch.cuda.current_stream().cuda_stream, **arguments)
