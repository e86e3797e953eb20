"""`mkernel::ag_gemm`, `gemm_rs`, `gemm_ar`, `copy_gemm`, `all_gather` and `reduce_scatter` of torch.library, with fakes and gradients.

Tensors on CPUs are computed when the call returns. Tensors on GPUs are launched on the current stream: the call returns at once,
and a failure shows at a later call or at `Group.check`.

Rows may have gaps between them. `bias`, `activation` and `partials` are as in mkernel.operators. A bias has a gradient: of `gemm_rs`, that of this
rank's rows. Where a gradient is wanted, the sum behind the bias is kept, and the activation is PyTorch's; else it is fused.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional

import torch
from torch import Tensor

from .. import _c, gradients, products
from ..errors import invalid
from ..group import Group, GroupLike, get_group
from .composed import dense, in_own_types, misaligned, operator

_DTYPES = {torch.bfloat16: _c.BF16, torch.float16: _c.F16}
_ANY_DTYPES = {**_DTYPES, torch.float32: _c.F32}


# --- What people call -------------------------------------------------------------------------------


def ag_gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    group: GroupLike = None,
    keep_gathered: bool = True,
    return_gathered: bool = False,
) -> Any:
    """AllGather+GEMM: (all ranks' rows of A) B. Every rank has as many rows.

    `keep_gathered` keeps the gathered A for the gradient of B; without it the backward pass gathers again, which
    takes time instead of memory. `return_gathered`: (C, A gathered).
    """
    keep = return_gathered or (keep_gathered and b.requires_grad)
    fused, behind = _divided(activation, a, b, bias)
    out, gathered = torch.ops.mkernel.ag_gemm(a, b, *name_and_world(group), keep, bias, fused)
    out = activated(out, behind)
    return (out, gathered) if return_gathered else out


def gemm_rs(
    a: Tensor,
    b: Tensor,
    *,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
    group: GroupLike = None,
) -> Tensor:
    """GEMM+ReduceScatter: this rank's rows of the sum over all ranks of A B; the ranks divide the rows."""
    fused, behind = _divided(activation, a, b, bias)
    return activated(torch.ops.mkernel.gemm_rs(a, b, *name_and_world(group), bias, fused, partials), behind)


def gemm_ar(
    a: Tensor,
    b: Tensor,
    *,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    partials: Optional[str] = None,
    group: GroupLike = None,
) -> Tensor:
    """GEMM+AllReduce: the sum over all ranks of A B, the same bits on every rank; the bias is the same on all.

    The gradient takes dY to be the same on all ranks, as it is where what follows is the same on all.
    """
    fused, behind = _divided(activation, a, b, bias)
    return activated(torch.ops.mkernel.gemm_ar(a, b, _name(group), bias, fused, partials), behind)


def copy_gemm(a: Tensor, b: Tensor, *, group: GroupLike = None) -> Tensor:
    """A B with the same A on all ranks and the columns of B of each: local, and dA is GEMM+AllReduce."""
    return torch.ops.mkernel.copy_gemm(a, b, _name(group))


def all_gather(a: Tensor, *, group: GroupLike = None) -> Tensor:
    """All ranks' rows of A, of bf16, f16 or float32. Every rank has as many. Its gradient is reduce_scatter."""
    return torch.ops.mkernel.all_gather(a, *name_and_world(group))


def reduce_scatter(parts: Tensor, *, partials: Optional[str] = None, group: GroupLike = None) -> Tensor:
    """This rank's rows of the sum over all ranks of `parts`; the ranks divide the rows. Its gradient is all_gather."""
    return torch.ops.mkernel.reduce_scatter(parts, *name_and_world(group), partials)


def _name(group: GroupLike) -> str:
    if group is None:
        return ""
    return group if isinstance(group, str) else group.name


def name_and_world(group: GroupLike) -> tuple[str, int]:
    """What an operator takes for a group where the shapes of its results follow from the group's size."""
    return _name(group), get_group(group).world


def activated(z: Tensor, activation: Optional[str]) -> Tensor:
    """An activation of products.ACTIVATIONS, by PyTorch, in float32; None: z itself."""
    if activation is None:
        return z
    one = z.float()
    if activation == "gated_silu":
        gate, up = one.unflatten(-1, (-1, 2)).unbind(-1)
        return (torch.nn.functional.silu(gate) * up).to(z.dtype)
    return {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[activation](one).to(z.dtype)


def _divided(activation: Optional[str], *inputs: Optional[Tensor]) -> tuple[Optional[str], Optional[str]]:
    """(the activation that the launch has, the one that follows it): where a gradient is wanted, its input must be kept."""
    if activation in products.ACTIVATIONS and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return None, activation
    return activation, None


# --- The operators ----------------------------------------------------------------------------------

_EPILOGUE = "Tensor? bias=None, str? activation=None"


@operator("ag_gemm", f"(Tensor a, Tensor b, str group, int world, bool keep, {_EPILOGUE}) -> (Tensor, Tensor)")
def _ag_gemm(
    a: Tensor, b: Tensor, group: str, world: int, keep: bool, bias: Optional[Tensor] = None, activation: Optional[str] = None
) -> tuple[Tensor, Tensor]:
    chosen = _checked("ag_gemm", a, b, group, world)
    m = a.shape[0] * world
    c = a.new_empty((m, products.columns_of_result(chosen, "ag_gemm", b.shape[1], activation)))
    gathered = a.new_empty((m if keep else 0, a.shape[1]))
    _launch(chosen, "ag-gemm", a, b, c, m, gathered if keep else None, bias, activation=activation)
    return c, gathered


@operator("gemm_rs", f"(Tensor a, Tensor b, str group, int world, {_EPILOGUE}, str? partials=None) -> Tensor")
def _gemm_rs(
    a: Tensor, b: Tensor, group: str, world: int, bias: Optional[Tensor] = None, activation: Optional[str] = None, partials: Optional[str] = None
) -> Tensor:
    chosen = _checked("gemm_rs", a, b, group, world)
    _check_divides("gemm_rs", a.shape[0], world, chosen.rank)
    c = a.new_empty((a.shape[0] // world, products.columns_of_result(chosen, "gemm_rs", b.shape[1], activation)))
    _launch(chosen, "gemm-rs", a, b, c, a.shape[0], None, bias, activation=activation, partials=partials)
    return c


@operator("gemm_ar", f"(Tensor a, Tensor b, str group, {_EPILOGUE}, str? partials=None) -> Tensor")
def _gemm_ar(
    a: Tensor, b: Tensor, group: str, bias: Optional[Tensor] = None, activation: Optional[str] = None, partials: Optional[str] = None
) -> Tensor:
    chosen = _checked("gemm_ar", a, b, group)
    c = a.new_empty((a.shape[0], products.columns_of_result(chosen, "gemm_ar", b.shape[1], activation)))
    _launch(chosen, "gemm-ar", a, b, c, a.shape[0], None, bias, activation=activation, partials=partials)
    return c


@operator("copy_gemm", "(Tensor a, Tensor b, str group, bool by_columns=False) -> Tensor")
def _copy_gemm(a: Tensor, b: Tensor, group: str, by_columns: bool = False) -> Tensor:
    _checked("copy_gemm", a, b, group)
    return torch.mm(b.t(), a.t()).t() if by_columns else torch.mm(a, b)


@operator("all_gather", "(Tensor a, str group, int world) -> Tensor")
def _all_gather(a: Tensor, group: str, world: int) -> Tensor:
    chosen = _checked_rows("all_gather", a, group, world)
    out = a.new_empty((a.shape[0] * world, a.shape[1]))
    _launch_collective(chosen, "all-gather", a, out, out.shape[0])
    return out


@operator("reduce_scatter", "(Tensor parts, str group, int world, str? partials=None) -> Tensor")
def _reduce_scatter(parts: Tensor, group: str, world: int, partials: Optional[str] = None) -> Tensor:
    chosen = _checked_rows("reduce_scatter", parts, group, world)
    _check_divides("reduce_scatter", parts.shape[0], world, chosen.rank)
    out = parts.new_empty((parts.shape[0] // world, parts.shape[1]))
    _launch_collective(chosen, "reduce-scatter", parts, out, parts.shape[0], partials)
    return out


# Fakes know the arguments alone: no group, which may be another one when a cache brings the graph back.


@_all_gather.register_fake
def _(a: Tensor, group: str, world: int) -> Tensor:
    return a.new_empty((a.shape[0] * world, a.shape[1]))


@_reduce_scatter.register_fake
def _(parts: Tensor, group: str, world: int, partials: Optional[str] = None) -> Tensor:
    _check_divides("reduce_scatter", parts.shape[0], world)
    return parts.new_empty((parts.shape[0] // world, parts.shape[1]))


@_ag_gemm.register_fake
def _(
    a: Tensor, b: Tensor, group: str, world: int, keep: bool, bias: Optional[Tensor] = None, activation: Optional[str] = None
) -> tuple[Tensor, Tensor]:
    m = a.shape[0] * world
    return a.new_empty((m, products.columns_of_result(None, "ag_gemm", b.shape[1], activation))), a.new_empty((m if keep else 0, a.shape[1]))


@_gemm_rs.register_fake
def _(a: Tensor, b: Tensor, group: str, world: int, bias: Optional[Tensor] = None, activation: Optional[str] = None, *_: Any) -> Tensor:
    _check_divides("gemm_rs", a.shape[0], world)
    return a.new_empty((a.shape[0] // world, products.columns_of_result(None, "gemm_rs", b.shape[1], activation)))


@_gemm_ar.register_fake
def _(a: Tensor, b: Tensor, group: str, bias: Optional[Tensor] = None, activation: Optional[str] = None, *_: Any) -> Tensor:
    return a.new_empty((a.shape[0], products.columns_of_result(None, "gemm_ar", b.shape[1], activation)))


@_copy_gemm.register_fake
def _(a: Tensor, b: Tensor, group: str, by_columns: bool = False) -> Tensor:
    return a.new_empty((b.shape[1], a.shape[0])).t() if by_columns else a.new_empty((a.shape[0], b.shape[1]))


# --- Their gradients --------------------------------------------------------------------------------


class _TorchOps:
    """What gradients.py needs, on PyTorch's tensors. A group is what the operators take for it: its name, perhaps with its world."""

    @staticmethod
    def ag_gemm(a: Tensor, b: Tensor, group: tuple[str, int]) -> tuple[Tensor, Tensor]:
        return torch.ops.mkernel.ag_gemm(a, b, *group, True)

    @staticmethod
    def gemm_rs(a: Tensor, b: Tensor, group: tuple[str, int]) -> Tensor:
        return torch.ops.mkernel.gemm_rs(a, b, *group)

    @staticmethod
    def gemm_ar(a: Tensor, b: Tensor, group: str) -> Tensor:
        return torch.ops.mkernel.gemm_ar(a, b, group)

    @staticmethod
    def all_gather(a: Tensor, group: tuple[str, int]) -> Tensor:
        return torch.ops.mkernel.all_gather(a, *group)

    @staticmethod
    def mm(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
        # The gradient of a linear layer's weight is then dense, without a copy.
        return torch.mm(x, y) if like.is_contiguous() else torch.mm(y.t(), x.t()).t()

    @staticmethod
    def copy_gemm(x: Tensor, y: Tensor, like: Tensor, group: str) -> Tensor:
        # Only a gradient that has one itself needs the operator. Compilers know PyTorch's product.
        if not torch.is_grad_enabled():
            return _TorchOps.mm(x, y, like)
        return torch.ops.mkernel.copy_gemm(x, y, group, not like.is_contiguous())


def _save_epilogue(ctx: Any, what: str, activation: Optional[str], bias: Optional[Tensor]) -> None:
    ctx.refused = f"{what} with activation={activation!r}" if activation else None
    ctx.bias = None if bias is None else bias.dtype


def _bias_gradient(ctx: Any, dy: Optional[Tensor], place: int) -> Optional[Tensor]:
    """Of a bias, the sum of dY's rows. A gradient through a fused activation is refused, as what it needs was not kept."""
    if ctx.refused:
        raise invalid(f"the gradient of torch.ops.mkernel.{ctx.refused} needs what was not kept: call the function of mkernel.torch")
    if dy is None or ctx.bias is None or not ctx.needs_input_grad[place]:
        return None
    return dy.sum(0, dtype=torch.float32).to(ctx.bias)


def _save_ag_gemm(ctx: Any, inputs: tuple, output: tuple) -> None:
    a, b, *ctx.group, ctx.keep, bias, activation = inputs
    _save_epilogue(ctx, "ag_gemm", activation, bias)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.keep else a, b)


def _ag_gemm_backward(ctx: Any, dy: Optional[Tensor], dgathered: Optional[Tensor]) -> tuple:
    kept, b = ctx.saved_tensors
    want_a, want_b = ctx.needs_input_grad[:2]
    gathered, a = (kept, None) if ctx.keep else (None, kept)
    dbias = _bias_gradient(ctx, dy, 5)
    da = db = None
    if dy is not None:
        # What flows back into the gathered A is one more product, by the identity, of the same reduce-scatter.
        beside = ctx.keep and want_a and dgathered is not None
        da, db = gradients.ag_gemm(_TorchOps, dy, a, b, gathered, ctx.group, want_a and not beside, want_b)
        if beside and dgathered is not None:
            one = torch.eye(b.shape[0], dtype=b.dtype, device=b.device)
            da = torch.ops.mkernel.gemm_rs(torch.cat([dy, dgathered], 1), torch.cat([b.t(), one], 0), *ctx.group)
    elif dgathered is not None and ctx.keep and want_a:
        da = torch.ops.mkernel.gemm_rs(dgathered, torch.eye(b.shape[0], dtype=b.dtype, device=b.device), *ctx.group)
    return da, db, None, None, None, dbias, None


def _save_gemm_rs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, *ctx.group, bias, activation, _ = inputs
    _save_epilogue(ctx, "gemm_rs", activation, bias)
    ctx.save_for_backward(a, b)


def _gemm_rs_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    want_a, want_b = ctx.needs_input_grad[:2]
    dbias = _bias_gradient(ctx, dy, 4)
    da = db = None
    if want_a or want_b:
        da, db = gradients.gemm_rs(_TorchOps, dy, a, b, ctx.group, want_b)
    return da if want_a else None, db, None, None, dbias, None, None


def _save_gemm_ar(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, ctx.group, bias, activation, _ = inputs
    _save_epilogue(ctx, "gemm_ar", activation, bias)
    ctx.save_for_backward(a, b)


def _gemm_ar_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    dbias = _bias_gradient(ctx, dy, 3)
    return (*gradients.gemm_ar(_TorchOps, dy, a, b, ctx.group, *ctx.needs_input_grad[:2]), None, dbias, None, None)


def _save_copy_gemm(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, ctx.group, _ = inputs
    ctx.save_for_backward(a, b)


def _copy_gemm_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    return (*gradients.copy_gemm(_TorchOps, dy, a, b, ctx.group, *ctx.needs_input_grad[:2]), None, None)


_ag_gemm.register_autograd(in_own_types(_ag_gemm_backward), setup_context=_save_ag_gemm)
_gemm_rs.register_autograd(in_own_types(_gemm_rs_backward), setup_context=_save_gemm_rs)
_gemm_ar.register_autograd(in_own_types(_gemm_ar_backward), setup_context=_save_gemm_ar)
_copy_gemm.register_autograd(in_own_types(_copy_gemm_backward), setup_context=_save_copy_gemm)


def _save_group(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[1:3]


# Each is the other's.
_all_gather.register_autograd(lambda ctx, dy: (torch.ops.mkernel.reduce_scatter(dy, *ctx.group), None, None), setup_context=_save_group)
_reduce_scatter.register_autograd(lambda ctx, dy: (torch.ops.mkernel.all_gather(dy, *ctx.group), None, None, None), setup_context=_save_group)


# --- The launch -------------------------------------------------------------------------------------


def group_of(what: str, name: str, world: int) -> Group:
    """The group, which must be as large as the one that the shapes of results were made for."""
    chosen = get_group(name)
    if chosen.world != world:
        raise invalid(f"{what}: made for {world} ranks, and {chosen!r} has {chosen.world}: trace or compile again", chosen.rank)
    return chosen


def _checked(what: str, a: Tensor, b: Tensor, group: str, world: Optional[int] = None) -> Group:
    chosen = get_group(group) if world is None else group_of(what, group, world)
    if a.dim() != 2 or b.dim() != 2:
        raise invalid(f"{what}: a has {a.dim()} dimensions and b {b.dim()}; both must be matrices: reshape them", chosen.rank)
    if a.shape[1] != b.shape[0]:
        raise invalid(f"{what}: a is {tuple(a.shape)} and b {tuple(b.shape)}: the inner dimensions differ", chosen.rank)
    if a.dtype != b.dtype or a.dtype not in _DTYPES:
        raise invalid(f"{what}: elements of {a.dtype} and {b.dtype}: both must be torch.bfloat16 or torch.float16", chosen.rank)
    if a.device != b.device or a.device.type not in ("cpu", "cuda"):
        raise invalid(f"{what}: tensors on {a.device} and {b.device}: both must be on CPUs or on one GPU", chosen.rank)
    return chosen


def _checked_rows(what: str, a: Tensor, group: str, world: int) -> Group:
    chosen = group_of(what, group, world)
    if a.dim() != 2:
        raise invalid(f"{what}: the tensor has {a.dim()} dimensions, and must be a matrix: reshape it", chosen.rank)
    if a.dtype not in _ANY_DTYPES or a.device.type not in ("cpu", "cuda"):
        raise invalid(f"{what}: {a.dtype} on {a.device}: it takes torch.bfloat16, float16 and float32, on CPUs or on a GPU", chosen.rank)
    return chosen


def _check_divides(what: str, rows: int, world: int, rank: Optional[int] = None) -> None:
    if rows % world != 0:
        raise invalid(f"{what}: {rows} rows do not divide over {world} ranks: pad them", rank)


def _launch(
    group: Group, name: str, a: Tensor, b: Tensor, c: Tensor, m: int, gathered: Optional[Tensor], bias: Optional[Tensor], **more: Optional[str]
) -> None:
    n = b.shape[1]
    # Copies live until the launch; on a GPU they are freed in the order of the same stream.
    a, a_ = _operand(a)
    by_columns = _by_rows(b) is None and (_by_rows(b.t()) is not None or b.t().is_contiguous())
    b, b_ = _operand(b.t() if by_columns else b)
    if bias is not None:
        if tuple(bias.shape) != (n,) or bias.dtype != a.dtype or bias.device != a.device:
            raise invalid(f"{name}: bias is {tuple(bias.shape)} of {bias.dtype} on {bias.device}: it must be {(n,)} of {a.dtype} on {a.device}", group.rank)
        bias = dense(bias)
    arguments: dict[str, Any] = dict(
        m=m,
        n=n,
        k=a.shape[1],
        dtype=_DTYPES[a.dtype],
        layout=_c.NK if by_columns else _c.KN,
        gathered=0 if gathered is None else gathered.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        **more,
    )
    with _place(a) as place:
        arguments.update(place)
        products.launch(group, name, a_, b_, products.Operand(c.data_ptr(), c.shape[1]), **arguments)


def _launch_collective(group: Group, name: str, given: Tensor, out: Tensor, m: int, partials: Optional[str] = None) -> None:
    given = dense(given)
    with _place(given) as place:
        arguments: dict[str, Any] = dict(m=m, n=given.shape[1], dtype=_ANY_DTYPES[given.dtype], partials=partials, **place)
        products.launch_collective(group, name, given.data_ptr(), out.data_ptr(), **arguments)


@contextlib.contextmanager
def _place(x: Tensor) -> Iterator[dict[str, int]]:
    """Where a launch with x runs: on CPUs, or on x's GPU in its current stream, where copies made for the launch are freed in order."""
    if not x.is_cuda:
        yield {}
        return
    with torch.cuda.device(x.device):
        yield dict(device=x.device.index, stream=torch.cuda.current_stream().cuda_stream)


def _operand(x: Tensor) -> tuple[Tensor, products.Operand]:
    """x as it lies, if the library can take it so; else a copy."""
    found = _by_rows(x)
    if found is None:
        x = x.clone(memory_format=torch.contiguous_format)
        found = products.Operand(x.data_ptr(), x.shape[1])
    return x, found


def _by_rows(x: Tensor) -> Optional[products.Operand]:
    """x as it lies, if its rows have no gaps and the GPU can take it; else None."""
    rows, columns = x.shape
    pitch = columns if rows <= 1 else x.stride(0)
    if (columns > 1 and x.stride(1) != 1) or pitch < columns:
        return None
    if misaligned(x) or (x.is_cuda and pitch != columns and pitch % 8 != 0):
        return None
    return products.Operand(x.data_ptr(), pitch)
