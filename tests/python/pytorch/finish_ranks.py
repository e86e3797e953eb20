"""Single ranks in the tests of gradients that are summed over groups: when they are summed, over which ranks, and which are frozen."""
import copy
import os

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch_ranks import join_torch_distributed, random_tensor, within

import mkernel
import mkernel.torch as mt

#: Training loops: b is a backward pass, c one with create_graph, F is finish_gradients, z is zero_grad, s scales all gradients.
SCHEDULES = ["bF", "bbbF", "bFbF", "bFbFbF", "bFF", "bFbFF", "bbFbbF", "bFbbFbF", "bFzbF", "bFbzbF", "bFbzbbF", "bbzF", "bFsF", "bFcF", "cFcF"]


def sums_of_a_schedule(folder, kind, dtype=torch.float32):
    """After each schedule a gradient is the sum over ranks and backward passes, each counted once, of float64; answers how many were compared."""
    from torch.distributed.fsdp import fully_shard

    mesh = join_torch_distributed(folder, (2, 2), mesh_dim_names=("dp", "tp"))
    group = mkernel.init(mesh["tp"] if "daemons" not in kind else dist.get_process_group_ranks(mesh["tp"].get_group()))
    copies = 2 if kind == "fsdp" or "ddp" in kind else 1  # ranks of dp that see other data
    compared = 0
    for set_to_none in (True, False):
        for at, schedule in enumerate(SCHEDULES):
            if "c" in schedule and kind not in ("plain", "daemons"):
                continue
            torch.manual_seed(at)
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)
            mt.mark_sequence_parallel(model[1], group=None if at % 2 else group)
            if kind == "fsdp":
                fully_shard(model, mesh=mesh["dp"])
            whole = [p.detach().clone() for p in model.parameters()] if kind != "fsdp" else [p.full_tensor().detach() for p in model.parameters()]
            for step in range(2):  # the second begins with what zero_grad has left
                run = torch.compile(model, fullgraph=True, backend="aot_eager") if kind == "compiled" else model
                if "ddp" in kind and step == 0:
                    ddp = nn.parallel.DistributedDataParallel(
                        model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view="view" in kind, init_sync=False
                    )
                run = ddp if "ddp" in kind else run
                exact, size = ([torch.zeros(p.shape, dtype=torch.float64) for p in model[1].parameters()] for _ in range(2))
                passes = 0
                for event in schedule:
                    if event in "bc":
                        seeds = [[1000 * step + 100 * at + 10 * passes + 4 * dp + tp for tp in range(2)] for dp in range(copies)]
                        mine = seeds[mesh["dp"].get_local_rank() % copies][group.rank]
                        run(random_tensor(mine, 7, 6, dtype=dtype)).backward(random_tensor(mine + 5000, 7, 3, dtype=dtype), create_graph=event == "c")
                        for seed in (seed for row in seeds for seed in row):
                            hidden = random_tensor(seed, 7, 6, dtype=dtype).double() @ whole[0].double().t() + whole[1].double()
                            dy = random_tensor(seed + 5000, 7, 3, dtype=dtype).double()
                            for total, absolute, (one, other) in zip(exact, size, ((dy.t(), hidden), (dy.t(), torch.ones(7, dtype=torch.float64)))):
                                total += one @ other / copies
                                absolute += one.abs() @ other.abs() / copies
                        passes += 1
                    elif event == "F":
                        mt.finish_gradients(model if at % 3 else model.parameters() if kind != "fsdp" else model)
                    elif event == "s":
                        for p in model[1].parameters():
                            p.grad.mul_(0.5)
                        exact = [total / 2 for total in exact]
                    else:
                        model.zero_grad(set_to_none=set_to_none)
                        exact = [0 * total for total in exact]
                unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}[dtype]
                for p, total, absolute in zip(model[1].parameters(), exact, size):
                    if p.grad is None:
                        assert set_to_none and schedule.endswith("zF")
                        continue
                    got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                    # Each pass rounds the hidden layer and its product, and each addition and sum once more.
                    within(got, total, (2 + 2 * len(schedule)) * unit * absolute.numpy() + 1e-7, f"{kind} {schedule} {set_to_none} step {step}")
                    compared += got.numel()
                model.zero_grad(set_to_none=set_to_none)
    return compared


def marks_know_their_groups(folder):
    """Two crossing groups, and one of all ranks: each parameter's gradient is summed over the groups of its marks alone; answers two refusals."""
    mesh = join_torch_distributed(folder, (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mkernel.init(mesh["cp"], name="cp"), mkernel.init(mesh["tp"], name="tp")
    rank = dist.get_rank()
    of = {"tp": [2 * (rank // 2), 2 * (rank // 2) + 1], "cp": [rank % 2, rank % 2 + 2], "all": [0, 1, 2, 3], "own": [rank]}

    def parts(name):
        """The gradient of a parameter on each rank."""
        return [random_tensor(hash_of(name) + r, 3, 5, dtype=torch.float32) for r in range(4)]

    def hash_of(name):
        return 10 * sum(map(ord, name))

    def check(model, expected, *arguments):
        for name, p in model.named_parameters():
            p.grad = parts(name)[rank].flatten()[: p.numel()].view(p.shape).clone() if p.numel() <= 15 else torch.ones_like(p)
        for _ in range(2):  # once more adds nothing
            mt.finish_gradients(model, *arguments)
            for name, where in expected.items():
                p = model.get_parameter(name)
                exact = sum(parts(name)[r].double() for r in of[where]).flatten()[: p.numel()].view(p.shape)
                within(p.grad, exact, 1e-5, f"{name} over {where} with {arguments}")

    def linear():
        return nn.Linear(5, 3, bias=False)

    model = nn.ModuleDict({name: linear() for name in ("for_tp", "for_cp", "for_both", "for_none", "of_parameter", "unmarked")})
    model["row"] = mt.RowParallelLinear(4, 3, group=tp, sequence_parallel=True)
    model["experts"] = mt.MoELayer(5, 2, 3, 1, group="cp")
    for name in ("for_tp", "for_both"):
        mt.mark_sequence_parallel(model[name], group="tp")
    mt.mark_sequence_parallel(model["for_cp"], model["for_both"], group=cp)
    mt.mark_sequence_parallel(model["for_none"])
    mt.mark_sequence_parallel(model["of_parameter"].weight, group="tp")
    named = {
        "for_tp.weight": "tp", "for_cp.weight": "cp", "for_both.weight": "all", "of_parameter.weight": "tp", "row.bias": "tp",
        "experts.router.weight": "cp", "unmarked.weight": "own",
    }
    for one in (model, copy.deepcopy(model)):
        if one is not model:
            named.pop("of_parameter.weight")  # the mark of a parameter goes with it, that of a module stays
        check(one, {**named, "for_none.weight": "cp"}, "cp")
        check(one, {**named, "for_none.weight": "tp"}, tp)
    refused = []
    try:
        mt.finish_gradients(model)
    except mkernel.Error as error:
        refused.append(error.sentence)
    # A group of all ranks has the sums over its parts, in whichever order they are asked for.
    mkernel.init(dist.group.WORLD)
    mt.mark_sequence_parallel(model["row"])
    check(model, {**named, "for_none.weight": "all", "row.bias": "all"})
    mt.finish_gradients(model, "tp")
    within(model["for_none"].weight.grad, sum(p.double() for p in parts("for_none.weight")), 1e-5, "for_none")
    mkernel.init([0, 1, 2, 3], name="same")
    mt.mark_sequence_parallel(model["for_none"], group="same")
    check(model, {**named, "for_none.weight": "all", "row.bias": "all"})
    # Tied: the second module's mark counts, too.
    tied = nn.ModuleList([linear(), linear()])
    tied[1].weight = tied[0].weight
    mt.mark_sequence_parallel(tied[1], group="tp")
    del tied[0].weight._mkernel_groups, tied[0].weight.sequence_parallel  # as where FSDP has replaced it
    check(tied, {"0.weight": "tp"})
    lonely = linear()
    mt.mark_sequence_parallel(lonely)
    lonely(torch.ones(2, 5)).sum().backward()
    mt.finish_gradients(lonely, "tp")
    lonely(torch.ones(2, 5)).sum().backward()
    try:
        mt.finish_gradients(lonely, "cp")
    except mkernel.Error as error:
        refused.append(error.sentence)
    return refused


def frozen_layers_stay_frozen(folder):
    """Layers and styles made of a layer that is frozen in part or whole: the same parameters are frozen, and the others' gradients are right."""
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = join_torch_distributed(folder, (4,))
    group = mkernel.init(mesh)
    for weight in (False, True):
        for bias in (False, True, None):
            whole = nn.Linear(8, 12, bias=bias is not None).bfloat16()
            with torch.no_grad():
                whole.weight.copy_(random_tensor(1, 12, 8))
            whole.weight.requires_grad_(weight)
            if bias is not None:
                whole.bias.requires_grad_(bias)
                with torch.no_grad():
                    whole.bias.copy_(random_tensor(2, 12))
            made = {
                "column": (mt.ColumnParallelLinear.from_linear(whole), 0),
                "row": (mt.RowParallelLinear.from_linear(whole), 1),
                "column's style": (parallelize_module(copy.deepcopy(whole), mesh, mt.ColwiseParallel(sequence_dim=None)), 0),
                "row's style": (parallelize_module(copy.deepcopy(whole), mesh, mt.RowwiseParallel(sequence_dim=None)), 1),
                "column's DTensors": (mt.ColumnParallelLinear.from_linear(whole), 0),
            }
            mt.use_dtensors(made["column's DTensors"][0], mesh)
            x, dy = random_tensor(3, 4, 8), random_tensor(4, 4, 12)
            exact = {"weight": dy.double().t() @ x.double(), "bias": dy.double().sum(0)}
            for what, (layer, dim) in made.items():
                parts = [x, dy]
                parts[1 - dim] = parts[1 - dim].chunk(4, 1)[group.rank]
                layer(parts[0].clone().requires_grad_()).backward(parts[1])
                for name, p in whole.named_parameters():
                    mine = layer.get_parameter(name)
                    at = f"{name} of {what} with {weight}, {bias}"
                    assert mine.requires_grad == p.requires_grad, at
                    assert (mine.grad is not None) == p.requires_grad, at
                    if p.requires_grad:
                        got = mine.grad.to_local() if hasattr(mine.grad, "to_local") else mine.grad
                        want = exact[name].chunk(4, dim)[group.rank] if name == "weight" or dim == 0 else exact[name]
                        within(got, want, 2.0**-7 * numpy.abs(want.numpy()) + 2.0**-7, at)
    return True


def shards_count_once(folder, kind):
    """The norm of a layer whose shards are DTensors, in a group that knows no ProcessGroup, is that of the whole layer."""
    mesh = join_torch_distributed(folder, (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = dist.get_process_group_ranks(mesh["tp"].get_group())
    if kind == "a place of its own":
        place = mkernel.Place.of_rank(mesh["tp"].get_local_rank(), 1, 2)  # numbered from 0 in each job
        group = mkernel.init(job=f"job{ranks[0]}", place=place, socket=os.environ["MKERNEL_SOCKET"])
    else:
        group = mkernel.init(ranks)
    layer = mt.ColumnParallelLinear(8, 12, bias=False, group=group, dtype=torch.float32)
    mt.use_dtensors(layer, mesh["tp"])
    if kind == "with fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(layer, mesh=mesh["dp"])
    whole = random_tensor(7, 12, 8, dtype=torch.float32)
    mine = whole.chunk(2)[group.rank]
    if kind == "with fsdp":
        mine = mine.chunk(2)[mesh["dp"].get_local_rank()]
    weight = layer.weight
    weight.grad = torch.zeros_like(weight)
    weight.grad.to_local().copy_(mine)
    exact = float(whole.double().norm())
    for _ in range(2):
        norm = float(mt.clip_grad_norm_(layer, 1e9))
        assert abs(norm - exact) < 1e-5 * exact, f"{norm}, and {exact} of the whole"
    try:
        mt.use_dtensors(mt.ColumnParallelLinear(8, 12, group=group), mesh["dp"])
    except mkernel.Error as error:
        return error.sentence
