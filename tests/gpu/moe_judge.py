"""How moe_bench.py judges a MoE layer: every row and element against float64 on the GPUs, within the bounds of grouped products
(tests/gpu/grouped_reference.h) and of kernels/ops/combine/README.md."""
import torch

from grouped_judge import product_bound

UNIT = 2.0 ** -8  # of bf16
TINY = 2.0 ** -134


def judge_first(layer):
    """The worst |error| of y over its bound; or raises what is wrong with its rows."""
    case, here, worst = layer.case, layer.here, 0.0
    for r in range(layer.world.size):
        offsets, rows, weights = layer.left(r)
        if int(offsets[-1]) != layer.rows[r]:
            raise RuntimeError(f"rank {r} has {int(offsets[-1])} rows instead of {layer.rows[r]}")
        keys = (rows[:, 0] * case.tokens + rows[:, 1]) * case.top_k + rows[:, 2]
        if keys.unique().numel() != layer.rows[r]:
            raise RuntimeError(f"rank {r} has a slot twice")
        all_ids = torch.cat([t.ids_host for t in layer.tensors]).flatten().to(rows.device).long()
        all_weights = torch.cat([t.weights.cpu() for t in layer.tensors]).flatten().to(rows.device)
        expert = torch.repeat_interleave(torch.arange(here, device=rows.device), offsets.diff(), output_size=layer.rows[r])
        if not torch.equal(all_ids[keys], expert + r * here) or not torch.equal(all_weights[keys], weights):
            raise RuntimeError(f"rank {r} has a row of another expert, or with another weight")
        its = layer.tensors[r]
        tokens = [t.tokens.to(rows.device) for t in layer.tensors]
        for e in range(here):
            begin, end = int(offsets[e]), int(offsets[e + 1])
            for first in range(begin, end, 4096):
                last = min(first + 4096, end)
                a = torch.empty(last - first, case.hidden, device=rows.device, dtype=torch.bfloat16)
                for source, whole in enumerate(tokens):
                    of_source = rows[first:last, 0] == source
                    a[of_source] = whole[rows[first:last, 1][of_source]]
                exact, bound = product_bound(a, its.first[e].T, "halves" if case.gated else "none", UNIT)
                worst = max(worst, share_of(its.y[first:last], exact, bound))
    return worst


def judge_second(layer):
    """The worst |error| of the layer's output over its bound, given the y that there is."""
    case, here, size = layer.case, layer.here, layer.world.size
    exact, size_of = ([torch.zeros(case.tokens, case.hidden, device=t.out.device, dtype=torch.float64) for t in layer.tensors]
                      for _ in range(2))
    for r in range(size):
        offsets, rows, weights = layer.left(r)
        its = layer.tensors[r]
        for e in range(here):
            begin, end = int(offsets[e]), int(offsets[e + 1])
            for first in range(begin, end, 4096):
                last = min(first + 4096, end)
                y, b = its.y[first:last].double(), its.second[e].T.double()
                weight = weights[first:last, None].double()
                product, magnitude = weight * (y @ b), weight.abs() * (y.abs() @ b.abs())
                for target in range(size):
                    of_target = rows[first:last, 0] == target
                    at = rows[first:last, 1][of_target].to(exact[target].device)
                    exact[target].index_add_(0, at, product[of_target].to(exact[target].device))
                    size_of[target].index_add_(0, at, magnitude[of_target].to(exact[target].device))
    n = case.features + case.top_k + layer.world.nodes + 1
    gamma = n * 2.0 ** -24 / (1 - n * 2.0 ** -24)
    worst = 0.0
    for r, its in enumerate(layer.tensors):
        before = ((1 + gamma) * (1 + UNIT) ** 2 - 1) * size_of[r] + (case.top_k + layer.world.nodes) * TINY
        bound = before + UNIT * (exact[r].abs() + before) + TINY
        worst = max(worst, share_of(its.out, exact[r], bound))
    return worst


def share_of(found, exact, bound):
    share = (found.double() - exact).abs() / bound
    return share.nan_to_num(nan=1e300, posinf=1e300).max().item() if share.numel() else 0.0
