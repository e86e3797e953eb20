"""Single ranks in the tests of torch.ops.symm_mem's two operators."""
import torch
from torch import nn
from torch_ranks import error_of, join_torch_distributed, random_tensor, within

import mkernel
import mkernel.torch as mt


def _launches(group):
    """The launches of a group from here on."""
    launches, launch = [], group.launch

    def seen(name, *arguments, **more):
        launches.append(name)
        return launch(name, *arguments, **more)

    group.launch = seen
    return launches


def _is_like(got, exact, magnitude, reference, unit, what):
    """Each element within roundings of float64's, and in memory as PyTorch's own result is."""
    within(got, exact, unit * magnitude.numpy() + 1e-9, what)
    assert got.shape == reference.shape and got.stride() == reference.stride(), f"{what}: {got.stride()}, and PyTorch's {reference.stride()}"


def fused_operators_are_ours(folder, dtype):
    """Both operators along each dimension that may be split, against float64, and PyTorch's own for their layout; answers what was launched."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as theirs

    join_torch_distributed(folder)
    group = mkernel.init(dist.group.WORLD)
    mt.use_for_async_tp("cpu")
    name, world, rank = dist.group.WORLD.group_name, group.world, group.rank
    launches = _launches(group)
    unit = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-20, torch.float64: 2.0**-48}[dtype]
    seed = 0
    for shape in ((4, 16), (4, 6, 16), (8, 4, 12, 16), (4, 0, 16)):
        for dim in range(len(shape) - 1):
            for widths in ((24,), (24, 7)):
                seed += 100
                weights = [random_tensor(seed + 50 + i, 16, n, dtype=dtype) for i, n in enumerate(widths)]
                parts = [random_tensor(seed + r, *shape, dtype=dtype) for r in range(world)]
                at = f"{dtype} {shape} by {dim}, widths {widths}"
                mine = parts[rank]
                if seed % 200:  # not contiguous
                    mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
                reference = theirs._fused_all_gather_matmul_fallback(mine, weights, dim, name)
                whole = torch.cat(parts, dim)
                for return_a in (True, False):
                    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(mine, weights, dim, name, return_A=return_a)
                    if return_a:
                        assert torch.equal(gathered, whole) and gathered.stride() == reference[0].stride(), at
                    else:
                        assert gathered is None
                    for got, weight, like in zip(products, weights, reference[1]):
                        exact, magnitude = whole.double() @ weight.double(), whole.double().abs() @ weight.double().abs()
                        _is_like(got, exact, magnitude, like, unit, f"gather, {at}")
    for shape in ((8, 16), (8, 4, 16), (4, 8, 12, 16), (0, 16)):
        for dim in range(len(shape)):  # the last is split, too, which the operators do not do
            seed += 100
            weight = random_tensor(seed + 50, 16, 24, dtype=dtype)
            parts = [random_tensor(seed + r, *shape, dtype=dtype) for r in range(world)]
            mine = parts[rank]
            if seed % 200:
                mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
            exact = sum(a.double() @ weight.double() for a in parts).chunk(world, dim)[rank]
            magnitude = sum(a.double().abs() @ weight.double().abs() for a in parts).chunk(world, dim)[rank]
            like = theirs._fused_matmul_reduce_scatter_fallback(mine, weight, "sum", dim, name)
            got = torch.ops.symm_mem.fused_matmul_reduce_scatter(mine, weight, "sum", dim, name)
            _is_like(got, exact, magnitude, like, unit, f"scatter, {dtype} {shape} by {dim}")
            assert got.is_contiguous()
            if dtype in (torch.bfloat16, torch.float16) and dim < len(shape) - 1 and got.numel():  # gloo has no mean
                got = torch.ops.symm_mem.fused_matmul_reduce_scatter(mine, weight, "avg", dim, name)
                _is_like(got, exact / world, magnitude / world, like, unit, f"mean, {dtype} {shape} by {dim}")
    return sorted(set(launches))


def async_tp_pass_calls_ours(folder, dim, dtype):
    """Inductor's pass for async tensor parallelism finds gather and product, product and scatter; the graph then runs by our operators."""
    join_torch_distributed(folder)
    import torch._inductor.config as inductor
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as funcol

    torch.set_num_threads(1)
    group = mkernel.init(dist.group.WORLD)
    mt.use_for_async_tp("cpu")

    def layers(x, up, down):
        y = nn.functional.silu(funcol.all_gather_tensor(x, dim, dist.group.WORLD) @ up)
        return torch.relu(funcol.reduce_scatter_tensor(y @ down, "sum", dim, dist.group.WORLD)) + 1

    inputs = [random_tensor(i + 10 * group.rank, *shape, dtype=dtype) for i, shape in enumerate(((4, 6, 16), (16, 32), (32, 16)))]
    eager = layers(*inputs)
    launches, fused = _launches(group), []
    group_for = mt.symm_mem._group_for

    def seen(*arguments):
        fused.append(arguments[2])
        return group_for(*arguments)

    mt.symm_mem._group_for = seen
    with inductor.patch(_micro_pipeline_tp=True):
        compiled = torch.compile(layers, fullgraph=True)(*inputs)
    assert compiled.stride() == eager.stride()
    assert error_of(compiled, eager.double()) < {torch.bfloat16: 0.01, torch.float32: 1e-5}[dtype]
    return fused, launches


def groups_that_are_not_ours(folder):
    """A ProcessGroup that `init` was not given is PyTorch's business; a group without one says what it needs for float32."""
    import torch.distributed as dist

    join_torch_distributed(folder)
    mkernel.init([0, 1], name="listed")
    mt.use_for_async_tp("cpu")
    rank = dist.get_rank()
    parts, weight = [random_tensor(r, 4, 16) for r in range(2)], random_tensor(9, 16, 8)
    _, (got,) = torch.ops.symm_mem.fused_all_gather_matmul(parts[rank], [weight], 0, dist.group.WORLD.group_name)
    exact = torch.cat(parts).double() @ weight.double()
    within(got, exact, 2.0**-7 * exact.abs().numpy() + 2.0**-9, "a group of PyTorch alone")
    try:
        mt.fused_matmul_reduce_scatter(parts[rank].float(), weight.float(), "sum", 0, "listed")
    except mkernel.Error as error:
        return error.sentence
