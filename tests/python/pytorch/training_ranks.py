"""Single ranks in the tests of a training loop: recomputation, checkpoints, clipping, data parallelism."""
import functools
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_ranks import Mlp, error_of, join_torch_distributed, random_tensor, reference_mlp, reference_mlp_like

import mkernel
import mkernel.torch as mt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client/python/examples"))
import llama  # noqa: E402

CONFIG = llama.Config(width=64, hidden=96, layers=2, heads=8, key_heads=4)


def parallel_mlp(sequence_parallel=True, **options):
    reference = reference_mlp()
    split = dict(sequence_parallel=sequence_parallel, **options)
    model = Mlp(mt.ColumnParallelLinear.from_linear(reference.up, **split), mt.RowParallelLinear.from_linear(reference.down, **split), 32).bfloat16()
    if sequence_parallel:
        mt.mark_sequence_parallel(model.norm)
    return model


def _kept(_, operator, *arguments, **more):
    fused = (torch.ops.mkernel.ag_gemm.default, torch.ops.mkernel.gemm_rs.default, torch.ops.mkernel.gemm_ar.default)
    return CheckpointPolicy.MUST_SAVE if operator in fused else CheckpointPolicy.PREFER_RECOMPUTE


def recomputation_gives_the_same(how, sequence_parallel, compiled):
    """A block under torch.utils.checkpoint beside the same block: the same gradients, and the launches of the backward pass."""
    group = mkernel.init()
    launches, launch = [], mkernel.products.launch

    def seen(chosen, name, *arguments, **more):
        launches.append(name)
        return launch(chosen, name, *arguments, **more)

    mkernel.products.launch = seen
    more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _kept)} if how == "selective" else {}

    def run(recompute):
        model = parallel_mlp(sequence_parallel)
        call = (lambda x: checkpoint(model, x, use_reentrant=how == "reentrant", **more)) if recompute else model
        call = torch.compile(call, fullgraph=True, backend=compiled) if compiled else call
        x = random_tensor(1 + (group.rank if sequence_parallel else 0), 16, 2, 32).requires_grad_()
        y = call(x)
        launches.clear()
        y.backward(random_tensor(9, *y.shape))
        return [y, x.grad, *(p.grad for p in model.parameters())]

    kept = run(False)
    recomputed = run(True)
    for one, other in zip(recomputed, kept):
        # A compiled graph may round elsewhere.
        assert torch.equal(one, other) if not compiled else error_of(one, other.double()) < 0.01
    return launches


def lengths_vary_in_one_graph(backend):
    """torch.compile with dynamic shapes: one graph for all lengths, the results of eager mode, and the largest operators kept."""
    from torch._dynamo.testing import CompileCounterWithBackend

    group = mkernel.init(rows_max=160)
    model = parallel_mlp()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    rooms = set()
    for length in (8, 20, 12, 16):
        x = random_tensor(1 + group.rank, length, 2, 32).requires_grad_()
        y = compiled(x)
        y.sum().backward()
        assert error_of(y, model(x).double()) < 0.01
        rooms |= {(name, operator.room) for (name, *_), operator in group._operators.items()}
    return counter.frame_count, sorted(rooms)


def mesh_of(folder, name, shape):
    """A mesh of ("dp", "tp"), and the group of its second dimension, which is new."""
    if not dist.is_initialized():
        join_torch_distributed(folder)
    if mkernel.is_initialized():
        mkernel.shutdown()
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    mkernel.init(mesh["tp"])
    return mesh


def clipped_like_one_process(folder, kind):
    """clip_grad_norm_ of a model of plain shards, of DTensors, and with FSDP around them: the norm and the gradients of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = mesh_of(folder, kind, (2, 2) if "fsdp" in kind else (1, 4))
    if "daemons" in kind:  # a group that knows no ProcessGroup
        mkernel.shutdown()
        mkernel.init()
    reference = reference_mlp().float()
    sequence_parallel = "whole" not in kind
    model = reference_mlp_like(reference).float()
    if "styles" in kind:
        dim = 0 if sequence_parallel else None
        parallelize_module(model, mesh["tp"], {"up": mt.ColwiseParallel(sequence_dim=dim), "down": mt.RowwiseParallel(sequence_dim=dim)})
    else:
        split = dict(sequence_parallel=sequence_parallel)
        model.up, model.down = mt.ColumnParallelLinear.from_linear(model.up, **split), mt.RowParallelLinear.from_linear(model.down, **split)
    if sequence_parallel:
        mt.mark_sequence_parallel(model.norm)
    if "dtensors" in kind:
        mt.use_dtensors(model, mesh["tp"])
    if "fsdp" in kind:
        fully_shard(model, mesh=mesh["dp"])
    group = mkernel.get_group()
    x = random_tensor(3, 64, 2, 32)  # the same for both ranks of dp: their mean is one process's gradient
    dy = random_tensor(4, 64, 2, 32)
    first, count = group.rows(64) if sequence_parallel else (0, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x[first : first + count])
        near = reference(x)
    y.backward(dy[first : first + count].to(y.dtype))
    near.backward(dy.to(near.dtype))
    mt.finish_gradients(model)
    exact = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    norm = mt.clip_grad_norm_(model, 0.5)
    assert abs(float(norm) - float(exact)) < 0.01 * float(exact), f"{kind}: {float(norm)}, and {float(exact)} in one process"
    again = mt.clip_grad_norm_(model, 1e9)
    assert abs(float(again) - 0.5) < 1e-3, f"{kind}: {float(again)} after clipping"
    # Every gradient is scaled alike, and is one process's.
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        whole = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        want = want.grad * 0.5 / exact
        if whole.shape != want.shape:  # a plain shard
            dim = 1 if name == "down.weight" else 0
            want = want.chunk(group.world, dim)[group.rank]
        assert error_of(whole, want.double()) < 0.02, f"{kind}: {name}"
    return float(norm)


def text(mesh, step, length=32):
    """Tokens and targets, [sequence, batch], of this rank of the data-parallel dimension; the same for all ranks of a tensor-parallel group."""
    random = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
    tokens = torch.randint(0, CONFIG.vocabulary, (length + 1, 2), generator=random)
    return tokens[:-1], tokens[1:]


def build(mesh, seed):
    """(model, optimizer): the example's Llama, shards as DTensors, FSDP over the other dimension, recomputation."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = llama.Llama(CONFIG, recompute=True)
    mt.use_dtensors(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(mesh, model, optimizer, step):
    """The loss over all ranks, and the norm of the gradient."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*text(mesh, step))
    optimizer.zero_grad()
    loss.backward()
    mt.finish_gradients(model)
    norm = mt.clip_grad_norm_(model, 1.0)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / mesh["dp"].size(), float(norm)


def state_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def whole_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    moments = {f"{name} {key}": value for name, entries in state["state"].items() for key, value in entries.items()}
    return {**weights, **moments}


def saved_over_two_and_loaded_over(folder, shape):
    """Trains with tensor parallelism over two ranks, saves, loads over another mesh, and trains on: the weights whole, the next losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from_ = mesh_of(folder, "saved", (2, 2))
    model, optimizer = build(from_, seed=1)
    for step in range(2):
        train_step(from_, model, optimizer, step)
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/checkpoint")
    before = whole_state(model, optimizer)
    mesh = mesh_of(folder, "loaded", shape)
    model, optimizer = build(mesh, seed=2)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    after = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        assert before.keys() == after.keys() and len(before) > 40
        for name in before:
            assert torch.equal(before[name], after[name]), name
    return train_step(mesh, model, optimizer, 2)


def the_same_without_a_break(folder, shape):
    """The third step of a run that never stopped."""
    mesh = mesh_of(folder, "whole", shape)
    model, optimizer = build(mesh, seed=1)
    return [train_step(mesh, model, optimizer, step) for step in range(3)][2]


def hugging_face_weights_are_loaded(folder):
    """safetensors written by `transformers`, loaded into the sharded layers: the loss of `transformers`."""
    import llama_ranks
    from safetensors import safe_open
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    mesh = mesh_of(folder, "hf", (2, 2))
    theirs = llama_ranks.independent_model(CONFIG, torch.float32)
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{folder}/hf")
    dist.barrier()
    model, _ = build(mesh, seed=7)

    class Reader:
        """One tensor at a time."""

        def __init__(self, path):
            self.file = safe_open(path, framework="pt")

        def __getitem__(self, name):
            return self.file.get_tensor(name)

    whole = llama.from_hugging_face(Reader(f"{folder}/hf/model.safetensors"), CONFIG) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    tokens, targets = text(mesh, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens, targets).detach()
    dist.all_reduce(loss, group=mesh["tp"].get_group())
    return float(loss), float(llama_ranks.loss_of(theirs, tokens, targets).detach())


def pytorch_s_own_styles_compose(folder, sharded):
    """Embedding, last layer and loss split by vocabulary, by PyTorch's styles, beside ours in one plan: loss and gradients of one process."""
    import copy

    import llama_ranks
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as theirs

    mesh = mesh_of(folder, "styles", (2, 2))
    reference = llama_ranks.independent_model(CONFIG, torch.float32)
    model = copy.deepcopy(reference)
    split, join = mt.ColwiseParallel(sequence_dim=None), mt.RowwiseParallel(sequence_dim=None)
    theirs.parallelize_module(model, mesh["tp"], {
        "model.embed_tokens": theirs.RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": split, "model.layers.*.self_attn.k_proj": split, "model.layers.*.self_attn.v_proj": split,
        "model.layers.*.self_attn.o_proj": join, "model.layers.*.mlp.gate_proj": split, "model.layers.*.mlp.up_proj": split,
        "model.layers.*.mlp.down_proj": join, "lm_head": theirs.ColwiseParallel(use_local_output=False),
    })
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    tokens = torch.randint(0, CONFIG.vocabulary, (2, 33), generator=torch.Generator().manual_seed(1))  # the same on both of dp
    losses = []
    for one in (reference, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = one(tokens[:, :-1], use_cache=False).logits
        with theirs.loss_parallel():
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        losses.append(float(loss.detach()))
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        whole = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        # Both are sums of products in bf16.
        assert error_of(whole, want.grad.double()) < 0.03, f"{name}: {error_of(whole, want.grad.double())}"
    norm = mt.clip_grad_norm_(model, 1e9)
    exact = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    assert abs(float(norm) - float(exact)) < 0.01 * float(exact)
    return losses


def experts_as_dtensors(folder):
    """A layer of experts with plain shards and with DTensors: equal gradients, and the norm over all experts."""
    mesh = mesh_of(folder, "experts", (1, 4))
    group = mkernel.get_group()
    norms, gradients = [], []
    for as_dtensors in (False, True):
        torch.manual_seed(3)  # the router is the same on all ranks; so are the experts, here
        layer = mt.MoELayer(32, 48, 8, 2, dtype=torch.bfloat16)
        if as_dtensors:
            mt.use_dtensors(layer, mesh["tp"])
        layer(random_tensor(20 + group.rank, 24, 32) * 4).backward(random_tensor(40 + group.rank, 24, 32))
        mt.finish_gradients(layer)
        found = {name: p.grad.to_local() if as_dtensors and "router" not in name else p.grad for name, p in layer.named_parameters()}
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        squares = {name: float(gradient.double().square().sum()) for name, gradient in found.items()}
        router = squares.pop("router.weight")
        exact = (float(group.sum_f32(sum(squares.values()))) + router) ** 0.5
        norm = float(mt.clip_grad_norm_(layer, 1e9))
        assert abs(norm - exact) < 1e-4 * exact, f"{norm}, and {exact} by hand"
        norms.append(norm)
    assert norms[0] == norms[1] and all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    try:
        mt.use_dtensors(mt.MoELayer(32, 48, 6, 2), mesh["tp"])
    except mkernel.Error as error:
        return layer.state_dict()["gate_up"].shape[0], error.sentence
