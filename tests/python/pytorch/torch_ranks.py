"""What single ranks do in the tests with PyTorch. References are float64, in one process, by torch.autograd."""
import os
import signal

import numpy
import torch
from reference import behind_the_sum, product, sum_of_products
from torch import nn

import mkernel
import mkernel.torch as mt
from mkernel import gradients

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def random_tensor(seed, *shape, dtype=torch.bfloat16):
    """The same on every rank that asks for it."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) / 4).to(dtype)


def init_on(device):
    """Joins the job; "cuda" is the GPU of this rank, which ranks share where there are too few."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["MKERNEL_LOCAL_RANK"]) % torch.cuda.device_count())
    return mkernel.init()


def within(got, exact, allowed, what):
    wrong = ~((got.detach().double().cpu().numpy() - exact.numpy()).__abs__() <= allowed)
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} elements are off"


def f64(tensor):
    return tensor.detach().double().requires_grad_()


def gradients_are_right(kind, device="cpu", m=32, n=24, k=16):
    """Each operator's result and gradients, within the rounding error of float64's by autograd."""
    group = init_on(device)
    dtype, rank, world, local = DTYPES[kind], group.rank, group.world, group.place.local_size

    def arrays(tensors):
        return [tensor.detach().double().numpy() for tensor in tensors]

    for by_columns in (False, True):
        bs = [random_tensor(100 + r, n, k, dtype=dtype).t() if by_columns else random_tensor(100 + r, k, n, dtype=dtype) for r in range(world)]
        for name, keep in (("ag_gemm", True), ("ag_gemm", False), ("gemm_rs", None), ("gemm_ar", None), ("copy_gemm", None)):
            rows = m // world if name == "ag_gemm" else m
            one_a = name == "copy_gemm"
            as_ = [random_tensor(0 if one_a else r, rows, k, dtype=dtype) for r in range(world)]
            one_dy = name == "gemm_ar"  # which the operator is told: the same on all ranks
            dys = [random_tensor(200 + (0 if one_dy else r), m // world if name == "gemm_rs" else m, n, dtype=dtype) for r in range(world)]

            exact_as, exact_bs = [f64(as_[0])] * world if one_a else list(map(f64, as_)), list(map(f64, bs))
            if name == "ag_gemm":
                exact_ys = [torch.cat(exact_as) @ b for b in exact_bs]
            elif name == "copy_gemm":
                exact_ys = [exact_as[0] @ b for b in exact_bs]
            else:
                total = sum(a @ b for a, b in zip(exact_as, exact_bs))
                exact_ys = list(total.chunk(world)) if name == "gemm_rs" else [total]
            sum((y * dy.double()).sum() for y, dy in zip(exact_ys, dys)).backward()

            a, b = (x.detach().to(device, copy=True).requires_grad_() for x in (as_[rank], bs[rank]))
            call = {"ag_gemm": lambda: mt.ag_gemm(a, b, keep_gathered=keep)}.get(name, lambda: getattr(mt, name)(a, b))
            y = call()
            y.backward(dys[rank].to(device))

            at = f"{name} {device} {kind} by_columns={by_columns} keep={keep} on rank {rank}"
            npa, npb, npdy = arrays(as_), arrays(bs), arrays(dys)
            mine = slice(rank * m // world, (rank + 1) * m // world)
            back = sum_of_products([(dy, b_.T) for dy, b_ in zip(npdy, npb)], local, kind)[1]
            if name in ("ag_gemm", "copy_gemm"):
                whole = numpy.concatenate(npa) if name == "ag_gemm" else npa[0]
                allowed = product(whole, npb[rank], kind)[1]
                allowed_da = back[mine] if name == "ag_gemm" else back
                allowed_db = product(whole.T, npdy[rank], kind)[1]
            else:
                allowed = sum_of_products(list(zip(npa, npb)), local, kind)[1]
                allowed = allowed[mine] if name == "gemm_rs" else allowed
                whole = numpy.concatenate(npdy) if name == "gemm_rs" else npdy[0]
                allowed_da = product(whole, npb[rank].T, kind)[1]
                allowed_db = product(npa[rank].T, whole, kind)[1]
            within(y, exact_ys[rank if name != "gemm_ar" else 0].detach(), allowed, at)
            within(a.grad, exact_as[rank].grad, allowed_da, f"dA of {at}")
            within(b.grad, exact_bs[rank].grad, allowed_db, f"dB of {at}")
    return True


def _epilogue_of(name):
    return {
        None: lambda s: s,
        "relu": torch.relu,
        "gelu": nn.functional.gelu,
        "silu": nn.functional.silu,
        "gated_silu": lambda s: nn.functional.silu(s[:, 0::2]) * s[:, 1::2],
    }[name]


def epilogues_are_right(kind, device="cpu", m=32, n=48, k=16):
    """Bias, activation and partial sums in float32: results element by element, gradients as a whole, against float64; A has gaps between rows."""
    group = init_on(device)
    dtype, rank, world, local = DTYPES[kind], group.rank, group.world, group.place.local_size
    as_ = [random_tensor(r, m, k + 8, dtype=dtype)[:, :k] for r in range(world)]
    bs = [random_tensor(100 + r, n, k, dtype=dtype).t() for r in range(world)]
    for activation in (None, "relu", "gelu", "silu", "gated_silu"):
        for name, partials in (("ag_gemm", None), ("gemm_rs", None), ("gemm_rs", "f32"), ("gemm_ar", "f32")):
            # Of gemm_rs each rank's bias is its own, as it is added to the rank's rows.
            biases = [random_tensor(300 if name == "gemm_ar" else 300 + r, n, dtype=dtype) for r in range(world)]
            width = n // 2 if activation == "gated_silu" else n
            rows = {"ag_gemm": m * world, "gemm_rs": m // world, "gemm_ar": m}[name]
            dys = [random_tensor(200 if name == "gemm_ar" else 200 + r, rows, width, dtype=dtype) for r in range(world)]
            exact_as, exact_bs, exact_biases = (list(map(f64, x)) for x in (as_, bs, biases))
            if name == "ag_gemm":
                sums = [torch.cat(exact_as) @ b for b in exact_bs]
                bound = product(torch.cat(as_).double().numpy(), bs[rank].double().numpy(), kind)[1]
            else:
                total = sum(a @ b for a, b in zip(exact_as, exact_bs))
                bound = sum_of_products([(a.double().numpy(), b.double().numpy()) for a, b in zip(as_, bs)], local, kind)[1]
                sums = list(total.chunk(world)) if name == "gemm_rs" else [total]
                bound = bound[rank * rows : (rank + 1) * rows] if name == "gemm_rs" else bound
            exact_ys = [_epilogue_of(activation)(s + bias) for s, bias in zip(sums, exact_biases)]
            sum((y * dy.double()).sum() for y, dy in zip(exact_ys, dys)).backward()

            wide = torch.zeros(m, k + 8, dtype=dtype, device=device)
            wide[:, :k] = as_[rank]
            wide.requires_grad_()
            b, bias = (x[rank].detach().to(device, copy=True).requires_grad_() for x in (bs, biases))
            more = {} if name == "ag_gemm" else {"partials": partials}
            call = getattr(mt, name)
            with torch.no_grad():
                fused = call(wide[:, :k], b, bias=bias, activation=activation, **more)
            at = f"{name} {device} {kind} {activation} {partials} on rank {rank}"
            own = 0 if name == "gemm_ar" else rank
            exact = behind_the_sum(sums[own].detach().numpy(), bound, biases[rank].double().numpy(), activation, kind)
            assert abs(exact[0] - exact_ys[own].detach().numpy()).max() < 1e-9
            within(fused, exact_ys[own].detach(), exact[1], at)
            y = call(wide[:, :k], b, bias=bias, activation=activation, **more)
            y.backward(dys[rank].to(device))
            # Sums that rounding moves across zero lose or gain their whole gradient: of relu, about one in 200 here.
            most = 0.08 if activation == "relu" else 0.015
            for what, got, want in (
                ("y", y, exact_ys[own]),
                ("dA", wide.grad[:, :k], exact_as[rank].grad),
                ("dB", b.grad, exact_bs[rank].grad),
                ("dbias", bias.grad, exact_biases[own].grad),
            ):
                assert error_of(got.cpu(), want) < most, f"{what} of {at}: {error_of(got.cpu(), want)}"
    return True


def collectives_are_each_others_gradients(kind, device="cpu", rows=6, n=40):
    """all_gather, reduce_scatter and their gradients against float64; also that fakes and schemas fit, by opcheck."""
    group = init_on(device)
    dtype, rank, world = {**DTYPES, "f32": torch.float32}[kind], group.rank, group.world
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}[kind]

    def sums(parts):
        """The rank's rows of a sum, and how far roundings may be from it."""
        exact, magnitude = sum(p.double() for p in parts), sum(p.double().abs() for p in parts)
        mine = slice(rank * rows, (rank + 1) * rows)
        return exact[mine], (2 * unit * magnitude + 2.0**-24)[mine].numpy()

    xs = [random_tensor(r, rows, n, dtype=dtype) for r in range(world)]
    dys = [random_tensor(50 + r, world * rows, n, dtype=dtype) for r in range(world)]
    x = xs[rank].to(device).clone().requires_grad_()
    y = mt.all_gather(x)
    assert torch.equal(y.detach().cpu(), torch.cat(xs))
    y.backward(dys[rank].to(device))
    within(x.grad, *sums(dys), "gradient of all_gather")
    for partials in (None, "f32"):
        parts = dys[rank].to(device).clone().requires_grad_()
        y = mt.reduce_scatter(parts, partials=partials)
        within(y, *sums(dys), "reduce_scatter")
        y.backward(xs[rank].to(device))
        assert torch.equal(parts.grad.cpu(), torch.cat(xs)), "gradient of reduce_scatter"
    if device == "cpu":
        torch.library.opcheck(torch.ops.mkernel.all_gather.default, (xs[rank].clone().requires_grad_(), "", world))
        torch.library.opcheck(torch.ops.mkernel.reduce_scatter.default, (dys[rank].clone().requires_grad_(), "", world, None))
    mkernel.shutdown()
    return True


def wrong_bias_gradient_is_seen():
    from mkernel.torch import operators

    right = operators._bias_gradient
    operators._bias_gradient = lambda ctx, dy, place: None if right(ctx, dy, place) is None else right(ctx, dy, place).roll(1)
    try:
        epilogues_are_right("bf16")
    except AssertionError as error:
        return str(error)
    return "nothing"


def fused_activation_refuses_a_gradient():
    """The operator itself keeps nothing for the gradient of its activation, and says so; the function has one."""
    mkernel.init()
    a, b = random_tensor(1, 8, 16).requires_grad_(), random_tensor(2, 16, 24)
    try:
        torch.ops.mkernel.gemm_ar(a, b, "", None, "gelu").sum().backward()
    except mkernel.Error as error:
        return error.sentence


def gradient_of_the_gathered_input():
    """What uses the gathered A gets a gradient, too."""
    group = mkernel.init()
    as_ = [random_tensor(r, 8, 16) for r in range(group.world)]
    bs = [random_tensor(100 + r, 16, 24) for r in range(group.world)]
    exact = list(map(f64, as_))
    sum(((torch.cat(exact) @ b.double()).sum() + torch.cat(exact).square().sum()) for b in bs).backward()
    for with_product in (True, False):
        a = as_[group.rank].clone().requires_grad_()
        y, gathered = mt.ag_gemm(a, bs[group.rank].requires_grad_(), return_gathered=True)
        gathered.backward(2 * gathered.detach()) if not with_product else torch.autograd.backward(
            [y, gathered], [torch.ones_like(y), 2 * gathered.detach()]
        )
        want = exact[group.rank].grad
        if not with_product:
            want = want - sum(b.detach().double().sum(1) for b in bs)
        assert (a.grad.double() - want).norm() / want.norm() < 0.01
    return True


def wrong_db_is_seen(which):
    right = getattr(gradients, which)

    def wrong(ops, *arguments, **more):
        da, db = right(ops, *arguments, **more)
        return da, None if db is None else db.roll(1, 0)

    setattr(gradients, which, wrong)
    try:
        gradients_are_right("bf16")
    except AssertionError as error:
        return str(error)
    return "nothing"


def operators_pass_opcheck():
    world = mkernel.init().world
    a, b = random_tensor(1, 8, 16).requires_grad_(), random_tensor(2, 24, 16).requires_grad_()
    outcomes = {}
    for name, more in (
        ("ag_gemm", (world, True)), ("ag_gemm", (world, False)), ("gemm_rs", (world,)), ("gemm_ar", ()), ("copy_gemm", ()), ("copy_gemm", (True,))
    ):
        for second in (b.t(), b.detach().t().contiguous().requires_grad_()):
            seen = torch.library.opcheck(getattr(torch.ops.mkernel, name), (a, second, "", *more))
            outcomes.update({f"{name}{more} {key}": value for key, value in seen.items()})
    bias = random_tensor(3, 24).requires_grad_()
    for name, more in (("ag_gemm", (world, True)), ("gemm_rs", (world,)), ("gemm_ar", ())):
        # With an activation the operator has no gradient, which is the function's.
        for x, y, behind in ((a, b, (bias,)), (a.detach(), b.detach(), (bias.detach(), "gated_silu"))):
            seen = torch.library.opcheck(getattr(torch.ops.mkernel, name), (x, y.t(), "", *more, *behind))
            outcomes.update({f"{name} with {len(behind)} more: {key}": value for key, value in seen.items()})
    return outcomes


class Mlp(nn.Module):
    """A norm, then two layers, as in a transformer block; x is [sequence, batch, width]."""

    def __init__(self, up, down, width):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), up, down

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def reference_mlp(width=32, hidden=64, bias=True):
    torch.manual_seed(7)
    return Mlp(nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias), width).bfloat16()


def run_reference(model, dtype, x, dy, compiled=""):
    """(output, gradient of x, gradients of the parameters) in one process."""
    model = reference_mlp_like(model).to(dtype)
    x = x.to(dtype).requires_grad_()
    y = torch.compile(model, fullgraph=True, backend=compiled)(x) if compiled else model(x)
    y.backward(dy.to(dtype))
    return [y, x.grad, *(p.grad for p in model.parameters())]


def reference_mlp_like(model):
    copy = reference_mlp(bias=model.up.bias is not None)
    copy.load_state_dict(model.state_dict())
    return copy


def error_of(got, exact):
    return float((got.detach().double() - exact.detach()).norm() / exact.detach().norm())


def check_like_one_process(results, rows, group, x, dy, reference, compiled=""):
    """Errors against float64 of at most twice those of bf16 in one process.

    Sums over ranks and nodes are rounded once more each: the square root of 3 instead of 1 where nothing else is rounded.
    """
    exact = run_reference(reference, torch.float64, x, dy)
    rounded = run_reference(reference, torch.bfloat16, x, dy, compiled)
    names = ["y", "dx", *(name for name, _ in reference.named_parameters())]
    assert len(results) == len(names) == len(exact)
    for name, got, right, near in zip(names, results, exact, rounded):
        if name in ("y", "dx"):
            right, near = right[rows], near[rows]
        elif name.startswith("up."):
            right, near = (t.chunk(group.world, 0)[group.rank] for t in (right, near))
        elif name == "down.weight":
            right, near = (t.chunk(group.world, 1)[group.rank] for t in (right, near))
        assert got.shape == right.shape, f"{name}: {tuple(got.shape)}, not {tuple(right.shape)}"
        mine, theirs = error_of(got, right), error_of(near, right)
        assert mine <= 2 * theirs, f"{name}: error {mine:.2e}, and {theirs:.2e} in one process"


def modules_are_like_one_process(sequence_parallel, compiled="", device="cpu"):
    """ColumnParallelLinear and RowParallelLinear, eager or compiled in one graph."""
    group = init_on(device)
    for bias in (True, False):
        reference = reference_mlp(bias=bias)
        model = Mlp(
            mt.ColumnParallelLinear.from_linear(reference.up, sequence_parallel=sequence_parallel),
            mt.RowParallelLinear.from_linear(reference.down, sequence_parallel=sequence_parallel),
            32,
        ).bfloat16().to(device)
        if sequence_parallel:
            mt.mark_sequence_parallel(model.norm)
        assert "sequence_parallel=" in repr(model.up)
        x, dy = random_tensor(1, 64, 2, 32) * 4, random_tensor(2, 64, 2, 32)
        share = 64 // group.world
        rows = slice(share * group.rank, share * (group.rank + 1)) if sequence_parallel else slice(None)
        run = torch.compile(model, fullgraph=True, backend=compiled) if compiled else model
        mine = x[rows].to(device, copy=True).requires_grad_()
        y = run(mine)
        y.backward(dy[rows].to(device))
        mt.finish_gradients(model)
        results = [one.cpu() for one in (y, mine.grad, *(p.grad for p in model.parameters()))]
        check_like_one_process(results, rows, group, x, dy, reference, compiled)
    return True


def autocast_is_followed():
    group = mkernel.init()
    layer = mt.ColumnParallelLinear(16, 32, sequence_parallel=True)
    assert layer.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(8, 1, 16))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and y.shape == (8 * group.world, 1, 32 // group.world)
    assert layer.weight.grad.dtype == torch.float32
    return True


def join_torch_distributed(folder, mesh_shape=None, **mesh_options):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(os.environ["MKERNEL_RANK"]), world_size=int(os.environ["MKERNEL_WORLD_SIZE"])
    )
    return dist.init_device_mesh("cpu", mesh_shape, **mesh_options) if mesh_shape else None


def styles_of_parallelize_module(folder):
    """The plan of parallelize_module, with DTensor weights and an optimizer."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = join_torch_distributed(folder, (4,))
    for dim in (0, 1, None):
        reference = reference_mlp()
        model = reference_mlp_like(reference)
        plan = {"up": mt.ColwiseParallel(sequence_dim=dim), "down": mt.RowwiseParallel(sequence_dim=dim)}
        parallelize_module(model, mesh, plan)
        group = mkernel.get_group()
        shape = (64, 4, 32) if dim != 1 else (4, 64, 32)
        x, dy = random_tensor(1, *shape) * 4, random_tensor(2, *shape)
        rows = slice(None)
        if dim is not None:
            part = slice(16 * group.rank, 16 * (group.rank + 1))
            rows = part if dim == 0 else (slice(None), part)
            mt.mark_sequence_parallel(model.norm)
        mine = x[rows].clone().requires_grad_()
        y = model(mine)
        y.backward(dy[rows])
        mt.finish_gradients([model.norm.weight])
        grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        check_like_one_process([y, mine.grad, *grads], rows, group, x, dy, reference)
        torch.optim.AdamW([p for p in model.parameters() if isinstance(p, DTensor)]).step()
        with torch.no_grad():
            again = model(x[rows])
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x[rows])
        compiled.backward(dy[rows])
        assert error_of(compiled, again.double()) < 0.01
    return repr(plan["up"])


def groups_of_a_mesh(folder):
    """Groups of both dimensions of a mesh, side by side; the mesh as a whole is refused."""
    mesh = join_torch_distributed(folder, (2, 2), mesh_dim_names=("dp", "tp"))
    try:
        mkernel.init(mesh)
        refused = None
    except mkernel.Error as error:
        refused = error.sentence
    dp, tp = mkernel.init(mesh["dp"], name="dp"), mkernel.init(mesh["tp"], name="tp")
    a, one = torch.full((4, 8), float(int(os.environ["MKERNEL_RANK"]) + 1)).half(), torch.ones(8, 8).half()
    sums = [float(mt.gemm_ar(a, one, group=group)[0, 0]) / 8 for group in (dp, "tp", mesh["tp"].get_group().group_name)]
    return refused, (dp.rank, tp.rank), sums


def rank_dies_in_a_training_step(victim):
    group = mkernel.init(wait_timeout=60)
    layer = mt.ColumnParallelLinear(16, 32, sequence_parallel=True, dtype=torch.bfloat16)
    y = layer(torch.randn(8, 1, 16).bfloat16().requires_grad_())
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        y.sum().backward()
        while True:
            layer(torch.randn(8, 1, 16).bfloat16())
    except mkernel.Error as error:
        mkernel.shutdown()
        return error


def wrong_tensors():
    mkernel.init()
    half, single = torch.ones(8, 8).half(), torch.ones(8, 8)
    errors = []
    for call in (
        lambda: mt.gemm_ar(single, single),
        lambda: mt.gemm_ar(half, half.bfloat16()),
        lambda: mt.gemm_ar(half, half[:4]),
        lambda: mt.gemm_ar(half[0], half),
        lambda: mt.gemm_rs(half[:5], half),
        lambda: mt.ColumnParallelLinear(8, 6),
        lambda: mkernel.gemm_ar(half, half, out=half),
    ):
        try:
            call()
            errors.append(None)
        except mkernel.Error as error:
            errors.append(error.sentence)
    return errors


def names_of_torch_are_at_hand():
    """mkernel itself offers attention and the layers."""
    mkernel.init()
    assert mkernel.attention is mt.attention and mkernel.MoELayer is mt.MoELayer and mkernel.ColwiseParallel.__name__ == "ColwiseParallel"
    errors = []
    half = torch.ones(4, 2, 64).half()
    for call in (lambda: mkernel.ring_attention(half, half, half), lambda: mkernel.moe_dispatch_gemm(half, half, half, half, experts_total=4)):
        try:
            call()
            errors.append(None)
        except mkernel.Error as error:
            errors.append(error.sentence)
    return errors


def thousand_steps():
    """(pages of memory, descriptors) after 300 training steps and after 1,000."""
    torch.set_num_threads(1)
    mkernel.init()
    up = mt.ColumnParallelLinear(16, 32, sequence_parallel=True, dtype=torch.bfloat16)
    down = mt.RowParallelLinear(32, 16, sequence_parallel=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=1e-4)
    x = torch.randn(8, 1, 16).bfloat16()

    def use():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]), len(os.listdir("/proc/self/fd"))

    for step in range(1000):
        if step == 300:
            before = use()
        optimizer.zero_grad()
        down(up(x)).float().square().sum().backward()
        mt.finish_gradients(down)
        optimizer.step()
    return before, use()
