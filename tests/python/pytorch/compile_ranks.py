"""Single ranks in the tests of compiled graphs: what their caches know of a group."""
import os

import torch
from torch_ranks import error_of, f64, init_on, random_tensor

import mkernel
import mkernel.torch as mt


def shapes_of_fakes():
    """By world, the shapes that each operator's fake says where no group is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = {}
    ops = torch.ops.mkernel
    with FakeTensorMode():
        a, b, experts = torch.empty(8, 16).bfloat16(), torch.empty(16, 24).bfloat16(), torch.empty(2, 16, 24).bfloat16()
        ids, weights, sequence = torch.empty(8, 3, dtype=torch.int64), torch.empty(8, 3), torch.empty(1, 2, 4, 64).bfloat16()
        starts = torch.empty(3, dtype=torch.int32)
        for world in (1, 2, 4):
            answers = {
                "ag_gemm": ops.ag_gemm(a, b, "", world, True),
                "ag_gemm, gated": ops.ag_gemm(a, b, "", world, False, None, "gated_silu"),
                "gemm_rs": ops.gemm_rs(a, b, "", world),
                "gemm_ar": ops.gemm_ar(a, b, ""),
                "copy_gemm": ops.copy_gemm(a, b, ""),
                "all_gather": ops.all_gather(a, "", world),
                "reduce_scatter": ops.reduce_scatter(a, "", world),
                "moe_dispatch_gemm": ops.moe_dispatch_gemm(a, ids, weights, experts, 2 * world, "", world),
                "ring_attention": ops.ring_attention(sequence, sequence, sequence, False, 1.0, ""),
                "ring_attention_packed": ops.ring_attention_packed(sequence[0], sequence[0], sequence[0], starts, 8, False, 1.0, ""),
            }
            found[world] = {name: [tuple(x.shape) for x in (ys if isinstance(ys, (tuple, list)) else [ys])] for name, ys in answers.items()}
    return found


def _step(a, parts, b):
    return mt.ag_gemm(a, b), mt.gemm_rs(parts, b), mt.all_gather(a), mt.reduce_scatter(parts)


def _check_step(group, run):
    """One step and its gradients, on tensors whose shapes do not follow from the group's size, against float64."""
    world, rank = group.world, group.rank
    of_ranks = [[random_tensor(seed + r, *shape) for seed, shape in ((0, (4, 16)), (20, (8, 16)), (40, (16, 24)))] for r in range(world)]
    exact = [[f64(x) for x in inputs] for inputs in of_ranks]
    as_, parts, bs = zip(*exact)
    product, total = sum(x @ b for x, b in zip(parts, bs)), sum(parts)
    ys = [[torch.cat(as_) @ bs[r], product.chunk(world)[r], torch.cat(as_), total.chunk(world)[r]] for r in range(world)]
    dys = [[random_tensor(60 + 10 * r + i, *y.shape) for i, y in enumerate(of_rank)] for r, of_rank in enumerate(ys)]
    torch.autograd.backward(sum(ys, []), [dy.double() for of_rank in dys for dy in of_rank])
    mine = [x.clone().requires_grad_() for x in of_ranks[rank]]
    got = run(*mine)
    torch.autograd.backward(got, dys[rank])
    for i, (x, right) in enumerate(zip((*got, *(x.grad for x in mine)), (*ys[rank], *(x.grad for x in exact[rank])))):
        assert x.shape == right.shape, f"result {i}: {tuple(x.shape)}, not {tuple(right.shape)}"
        assert error_of(x, right) < 0.01, f"result {i} on rank {rank} of {world}: {error_of(x, right)}"


def compiled_with_a_cache(folder):
    """A step compiled by Inductor, with its caches on disk; how often they had the graph."""
    group = mkernel.init()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{group.rank}"
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = True
    _check_step(group, torch.compile(_step, fullgraph=True))
    counted = torch._dynamo.utils.counters
    return counted["aot_autograd"]["autograd_cache_hit"], counted["inductor"]["fxgraph_cache_hit"]


def compiled_step_follows_its_group():
    """A compiled step after the group of its name has become a smaller one; and what operators say that were made for another size."""
    rank = mkernel.init().rank
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for how in (dict(backend="aot_eager"), dict(backend=backend, dynamic=True)):
        run = torch.compile(_step, fullgraph=True, **how)
        _check_step(mkernel.get_group(), run)
        mkernel.shutdown()
        _check_step(mkernel.init([0, 1] if rank < 2 else [2, 3]), run)
        mkernel.shutdown()
        mkernel.init()
    a, b = random_tensor(1, 8, 16), random_tensor(2, 16, 24)
    ids, weights, experts = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1), random_tensor(3, 1, 16, 24)
    said = []
    for name, arguments in (
        ("ag_gemm", (a, b, "", 8, True)), ("gemm_rs", (a, b, "", 8)), ("all_gather", (a, "", 8)), ("reduce_scatter", (a, "", 8)),
        ("moe_dispatch_gemm", (a, ids, weights, experts, 4, "", 8)),
    ):
        try:
            getattr(torch.ops.mkernel, name)(*arguments)
            said.append(None)
        except mkernel.Error as error:
            said.append(error.sentence)
    return len(graphs), said


def groups_of_torch_distributed_compile(folder):
    """A compiled step on a group by the name that torch.distributed gave it, beside another group."""
    from torch_ranks import join_torch_distributed

    mesh = join_torch_distributed(folder, (2, 2), mesh_dim_names=("dp", "tp"))
    mkernel.init(mesh["dp"], name="dp")
    group = mkernel.init(mesh["tp"], name="tp")
    name = mesh["tp"].get_group().group_name
    for given in ("tp", group, name):
        def step(a, parts, b):
            return mt.ag_gemm(a, b, group=given), mt.gemm_rs(parts, b, group=given), mt.all_gather(a, group=given), mt.reduce_scatter(parts, group=given)

        _check_step(group, torch.compile(step, fullgraph=True, backend="aot_eager"))
    return True


def cuda_graphs_hold_what_they_can():
    """Attention and experts, forward and backward, compiled with CUDA graphs: several steps as in eager mode."""
    group = init_on("cuda")
    q, k, v = (random_tensor(10 * group.rank + i, 1, 4, 64, 64).cuda().requires_grad_() for i in range(3))
    tokens, experts = random_tensor(5 + group.rank, 32, 64).cuda().requires_grad_(), random_tensor(7, 2, 64, 64).cuda().requires_grad_()
    ids, weights = torch.arange(32).cuda()[:, None] % (2 * group.world), torch.rand(32, 1).cuda().requires_grad_()

    def step(q, k, v, tokens, weights, experts):
        y = mt.attention(q * 2, k, v, is_causal=True)
        routed = mt.moe_dispatch_gemm(tokens * 2, ids, weights, experts, experts_total=2 * group.world)
        return y + 1, mt.gemm_combine(routed.y, routed, experts) + 1

    inputs = (q, k, v, tokens, weights, experts)
    run = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        answers = []
        for call in (step, run):
            for x in inputs:
                x.grad = None
            ys = call(*inputs)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
            answers.append([x.detach().double().cpu() for x in (*ys, *(x.grad for x in inputs))])
        for eager, compiled in zip(*answers):
            assert error_of(compiled, eager) < 0.01
        torch.cuda.synchronize()
    return True
