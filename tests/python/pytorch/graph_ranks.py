"""Single ranks in the tests of CUDA graphs."""
import torch
from torch_ranks import init_on, random_tensor, within

import mkernel
import mkernel.torch as mt
from mkernel import kept


def _captured(step):
    """(the graph of a step, what it computes): run twice before, as operators take their memory then."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def cuda_graphs_replay(name):
    """A step captured once, forward and backward, and replayed with other numbers in the same memory."""
    init_on("cuda")
    call = getattr(mt, name)
    inputs = [random_tensor(i, 64, 64).cuda().requires_grad_() for i in ((1,) if name in ("all_gather", "reduce_scatter") else (1, 2))]

    def step():
        for x in inputs:
            x.grad = None
        y = call(*inputs)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(x.grad for x in inputs)]

    graph, captured = _captured(step)
    for round_ in range(3):
        with torch.no_grad():
            inputs[0].copy_(random_tensor(10 + round_, 64, 64))
        graph.replay()
        torch.cuda.synchronize()
        got = [x.clone() for x in captured]
        for mine, again in zip(got, step()):
            assert torch.equal(mine, again), f"{name}, replay {round_}"
    mkernel.get_group().check()
    return True


def cuda_graphs_outlive_other_operators():
    """A graph replayed after larger operators have taken the place of its own, and after so many others that a group drops some."""
    group = init_on("cuda")
    kept.OPERATORS_MAX = 2
    a, b = random_tensor(1, 64, 64).cuda(), random_tensor(2, 64, 64).cuda()

    def products(x, y):
        return [mt.gemm_ar(x, y), mt.ag_gemm(x, y), mt.gemm_rs(x, y)]

    graph, captured = _captured(lambda: products(a, b))
    assert sum(operator.captured for _, operator in group._operators.all()) == 3
    for round_ in range(3):
        a.copy_(random_tensor(10 + round_, 64, 64))
        for x in captured:
            x.fill_(float("nan"))
        products(torch.cat([a] * (2 + round_)), b)
        products(a, torch.cat([b] * (2 + round_), 1))
        graph.replay()
        torch.cuda.synchronize()
        one, size = (x.cpu().double() @ y.cpu().double() for x, y in ((a, b), (a.abs(), b.abs())))
        mine = slice(64 // group.world * group.rank, 64 // group.world * (group.rank + 1))
        for got, exact, magnitude in zip(
            captured,
            (group.world * one, torch.cat([one] * group.world), group.world * one[mine]),
            (group.world * size, torch.cat([size] * group.world), group.world * size[mine]),
        ):
            within(got, exact, 2.0**-7 * magnitude.numpy(), f"replay {round_}")
    assert group.explain().count("kept for a captured graph") == 3
    group.check()
    return True
