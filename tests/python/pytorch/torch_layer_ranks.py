"""What single ranks do in the tests of attention and of experts with PyTorch."""
import torch
from torch import nn
from torch_ranks import DTYPES, error_of, init_on, random_tensor

import mkernel
import mkernel.torch as mt


def attention_and_gradients_are_right(causal, device="cpu"):
    """Attention over all ranks and its composed gradient, beside PyTorch's in one process, against float64."""
    import warnings

    init_on(device)
    q, k, v, dout = (random_tensor(i, 2, h, 64, 64) * 4 for i, h in ((1, 4), (2, 2), (3, 2), (4, 4)))
    answers = {}
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        y = nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        y.backward(dout.to(dtype))
        answers[dtype] = [mt.sequence_shard(x, 2, is_causal=causal) for x in (y.detach(), *(x.grad for x in leaves))]
    mine = [mt.sequence_shard(x, 2, is_causal=causal).to(device).requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = mt.attention(*mine, is_causal=causal, enable_gqa=True)
        y.backward(mt.sequence_shard(dout, 2, is_causal=causal).to(device))
    assert sum("composed" in str(one.message) for one in caught) == 1
    for name, got, exact, near in zip(("out", "dq", "dk", "dv"), (y, *(x.grad for x in mine)), answers[torch.float64], answers[torch.bfloat16]):
        ours, theirs = error_of(got.cpu(), exact), error_of(near, exact)
        assert ours <= 1.5 * theirs + 1e-4, f"{name}: error {ours:.2e}, and {theirs:.2e} in one process"
    for by_rows in (False, True):  # heads by heads, and as a transposed view of rows
        args = [(x.detach().transpose(1, 2).contiguous().transpose(1, 2) if by_rows else x.detach()).requires_grad_() for x in mine]
        outcomes = torch.library.opcheck(torch.ops.mkernel.ring_attention, (*args, causal, 0.125, ""))
        assert set(outcomes.values()) == {"SUCCESS"}
    # One key head for all queries, repeated without a copy: a stride of 0.
    one = [x.detach()[:, :1] for x in mine[1:]]
    repeated = mt.attention(mine[0].detach(), *(x.expand(-1, 2, -1, -1) for x in one), is_causal=causal, enable_gqa=True)
    assert torch.equal(repeated, mt.attention(mine[0].detach(), *one, is_causal=causal, enable_gqa=True))
    compiled = torch.compile(lambda q, k, v: mt.attention(q, k, v, is_causal=causal, enable_gqa=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*mine), y)
    try:
        mt.attention(*mine, attn_mask=torch.ones(1), enable_gqa=True)
    except mkernel.Error as error:
        return error.sentence


def packed_attention_is_right(device="cpu"):
    """Sequences of different lengths and their gradients: as PyTorch's of each by itself, in float64; then without a row on some rank."""
    group = init_on(device)
    for causal, lengths in ((True, [50, 0, 1, 13]), (False, [7, 64]), (True, [1, 0])):
        rows = torch.from_numpy(mkernel.packed_rows(lengths, causal=causal))
        whole = [(random_tensor(i, sum(lengths), h, 64) * 4).bfloat16().double().requires_grad_() for i, h in ((1, 4), (2, 2), (3, 2))]
        exact = torch.cat([
            nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=causal, enable_gqa=True).transpose(0, 1)
            for part in zip(*(x.split(lengths) for x in whole))
        ])
        dy = random_tensor(4, sum(lengths), 4, 64).bfloat16()
        exact.backward(dy.double())
        mine = [x.detach()[rows].bfloat16().to(device).requires_grad_() for x in whole]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        y = mt.attention_varlen(*mine, starts, causal, rows_max=sum(lengths))
        assert y.shape == mine[0].shape
        if len(rows):
            assert error_of(y.detach().cpu(), exact.detach()[rows]) < 0.004, f"{lengths} on rank {group.rank}"
        if device == "cpu":
            assert torch.equal(y, mt.attention_varlen(*mine, starts, causal))
        # Every rank takes part, also one without a row.
        y.backward(dy[rows].to(device))
        for name, x, of_whole in zip("qkv", mine, whole):
            assert x.grad.shape == x.shape
            if len(rows):
                theirs = of_whole.grad[rows]  # of a query that sees one key 0
                wrong = (x.grad.cpu().double() - theirs).norm()
                assert wrong < 0.01 * theirs.norm() + 1e-4, f"d{name} of {lengths} on rank {group.rank}"
    mine = [x.detach() for x in mine]
    outcomes = torch.library.opcheck(torch.ops.mkernel.ring_attention_packed, (*mine, starts, 1, True, 0.125, ""))
    assert set(outcomes.values()) == {"SUCCESS"}
    try:
        mt.attention_varlen(*mine, starts.long(), rows_max=1)
    except mkernel.Error as error:
        return error.sentence


def moe_layer_and_gradients_are_right(device="cpu", hidden=32, intermediate=64, experts=6, top_k=2, count=24):
    """A layer of experts, beside one process that has all experts, against float64."""
    group = init_on(device)
    whole = {
        "router": random_tensor(1, experts, hidden) * 2,
        "gate_up": random_tensor(2, experts, hidden, 2 * intermediate),
        "down": random_tensor(3, experts, intermediate, hidden),
    }
    x, dy = random_tensor(4, count * group.world, hidden) * 4, random_tensor(5, count * group.world, hidden)
    layer = mt.MoELayer(hidden, intermediate, experts, top_k, dtype=torch.bfloat16, device=device)
    first = group.rank * experts // group.world
    own = slice(first, first + layer.gate_up.shape[0])
    rows = slice(group.rank * count, (group.rank + 1) * count)
    with torch.no_grad():
        layer.router.weight.copy_(whole["router"])
        layer.gate_up.copy_(whole["gate_up"][own])
        layer.down.copy_(whole["down"][own])
    mine = x[rows].to(device, copy=True).requires_grad_()
    y = layer(mine)
    y.backward(dy[rows].to(device))
    mt.finish_gradients(layer)
    # Rounding decides which experts a token at the edge goes to: the reference takes the choice of bf16.
    ids = (x @ whole["router"].t()).float().softmax(-1).topk(top_k, -1)[1]

    def one_process(dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, *whole.values())]
        x_, router, gate_up, down = leaves
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = (x_ @ router.t()).to(wide).softmax(-1).gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
        total = 0
        for e in range(experts):
            gate, up = (x_ @ gate_up[e]).chunk(2, -1)
            factor = (weights * (ids == e)).sum(1, keepdim=True)
            total = total + factor * ((nn.functional.silu(gate) * up) @ down[e])
        total.backward(dy.to(dtype))
        return [total[rows], leaves[0].grad[rows], leaves[1].grad, leaves[2].grad[own], leaves[3].grad[own]]

    results = (y, mine.grad, layer.router.weight.grad, layer.gate_up.grad, layer.down.grad)
    results = [result.cpu() for result in results]
    for name, got, exact, near in zip(("y", "dx", "router", "gate_up", "down"), results, one_process(torch.float64), one_process(torch.bfloat16)):
        ours, theirs = error_of(got, exact), error_of(near, exact)
        assert ours <= 2 * theirs, f"{name}: error {ours:.2e}, and {theirs:.2e} in one process"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = x[rows].to(device, copy=True).requires_grad_()
    layer.zero_grad()
    compiled(again).backward(dy[rows].to(device))
    # The compiled graph may round between operators where eager mode does not.
    assert error_of(again.grad, mine.grad.double()) < 0.01
    return repr(layer)


def experts_gradients_are_right(kind, device="cpu", hidden=32, features=24, experts=6, top_k=3, count=5):
    """Dispatch, and combine with a residual: results and gradients, element by element, against float64's by autograd."""
    group = init_on(device)
    dtype, rank, world = DTYPES[kind], group.rank, group.world
    first = rank * experts // world
    own = slice(first, (rank + 1) * experts // world)
    x, up = random_tensor(1, count * world, hidden, dtype=dtype), random_tensor(2, experts, hidden, features, dtype=dtype)
    down, residual = random_tensor(3, experts, features, hidden, dtype=dtype), random_tensor(4, count * world, hidden, dtype=dtype)
    weights = torch.rand(count * world, top_k, generator=torch.Generator().manual_seed(5))
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:top_k] for t in range(count * world)])
    ids[::4, 0] = -1
    dout = random_tensor(6, count * world, hidden, dtype=dtype)
    mine = slice(rank * count, (rank + 1) * count)
    half = {"bf16": 2.0**-8, "f16": 2.0**-11}[kind]

    def close(got, exact, size, what, roundings):
        """Each element rounded to the type so often, on its way through sums of that size."""
        off = (got.detach().cpu().double() - exact).abs() - roundings * half * (exact.abs() + size) - 1e-6
        assert (off <= 0).all(), f"{what} {kind} on rank {rank}: off by {float(off.max()):.2e} more than allowed"

    def leaf(x):
        return x.detach().to(device, copy=True).requires_grad_()

    # Combine alone: rows that are what dispatch has brought, so that only its own rounding counts.
    ids_ = ids[mine].to(device)
    routed = mt.moe_dispatch_gemm(x[mine].to(device), ids_, weights[mine].to(device), up[own].to(device), experts_total=experts)
    y = leaf(routed.y)
    used = int(routed.offsets[-1])
    assert (routed.y[used:] == 0).all() and (routed.rows[used:] == -1).all() and (routed.weight[used:] == 0).all()
    factor, w, beside = leaf(routed.weight), leaf(down[own]), leaf(residual[mine])
    out = mt.gemm_combine(y, routed._replace(weight=factor), w, residual=beside)
    out.backward(dout[mine].to(device))
    expert = torch.arange(own.start, own.stop).repeat_interleave(routed.offsets.cpu().long().diff())
    rows = routed.rows[:used].cpu().long()
    token, slot = rows[:, 0] * count + rows[:, 1], rows[:, 2]
    assert torch.equal(ids[token, slot], expert) and torch.equal(weights[token, slot], routed.weight[:used].cpu())
    given, matrix, row, scale = dout[token].double(), down[expert].double(), y.detach()[:used].cpu().double(), weights[token, slot, None].double()
    back = torch.einsum("jh,jih->ji", given, matrix)
    size = torch.einsum("jh,jih->ji", given.abs(), matrix.abs())
    close(y.grad[:used], scale * back, scale * size * 2.0**-14, "dY of gemm_combine", 1.1)
    assert (y.grad[used:] == 0).all() and (factor.grad[used:] == 0).all()
    close(factor.grad[:used], (back * row).sum(1), (size * row.abs()).sum(1) * 2.0**-10, "dweight of gemm_combine", 1.1)
    for e in range(own.stop - own.start):
        here = expert == own.start + e
        exact = (row[here] * scale[here]).t() @ given[here]
        close(w.grad[e], exact, (row[here] * scale[here]).abs().t() @ given[here].abs() * 2.0**-10, "dW of gemm_combine", 1.1)
    assert torch.equal(beside.grad.cpu(), dout[mine])

    # Dispatch: any gradient of its rows and weights.
    x_, w_, f_ = leaf(x[mine]), leaf(up[own]), leaf(weights[mine])
    routed = mt.moe_dispatch_gemm(x_, ids_, f_, w_, experts_total=experts)
    dys = random_tensor(7, count * world, top_k, features, dtype=dtype)
    dfactors = torch.randn(count * world, top_k, generator=torch.Generator().manual_seed(8))
    dy, dfactor = torch.zeros_like(routed.y), torch.zeros_like(routed.weight)
    dy[:used], dfactor[:used] = dys[token, slot].to(device), dfactors[token, slot].to(device)
    torch.autograd.backward([routed.y, routed.weight], [dy, dfactor])
    close(routed.y[:used], torch.einsum("jh,jhf->jf", x[token].double(), up[expert].double()), 2.0**-10, "Y of moe_dispatch_gemm", 1.1)
    there = (ids[mine] >= 0).double()
    products = torch.einsum("tsf,tshf->tsh", dys[mine].double(), up[ids[mine].clamp(min=0)].double()) * there[:, :, None]
    sizes = torch.einsum("tsf,tshf->tsh", dys[mine].double().abs(), up[ids[mine].clamp(min=0)].double().abs()) * there[:, :, None]
    # On a GPU each product is rounded before the sum.
    close(x_.grad, products.sum(1), products.abs().sum(1) if device == "cuda" else sizes.sum(1) * 2.0**-10, "dtokens of moe_dispatch_gemm", 1.1)
    close(f_.grad, dfactors[mine].double() * there, 0, "dweights of moe_dispatch_gemm", 2.0**-6)
    for e in range(own.stop - own.start):
        here = expert == own.start + e
        exact = x[token[here]].double().t() @ dys[token[here], slot[here]].double()
        close(w_.grad[e], exact, exact.abs() * 0 + 2.0**-8, "dW of moe_dispatch_gemm", 1.1)

    inputs = (leaf(x_), ids_, leaf(f_), leaf(w_), experts, "", world)
    outcomes = torch.library.opcheck(torch.ops.mkernel.moe_dispatch_gemm, inputs)
    for more in (None, leaf(beside)):
        leaves = (leaf(y), leaf(factor), routed.rows, routed.offsets, ids_, leaf(w))
        seen = torch.library.opcheck(torch.ops.mkernel.gemm_combine, (*leaves, more, experts, ""))
        outcomes.update({f"{key} {more is None}": value for key, value in seen.items()})
    return outcomes


def one_operator_serves_all_counts_of_tokens(device="cpu", hidden=32, features=24, experts=6, top_k=2):
    """Dispatches of different counts, each with all tokens on the experts of one rank: right, by one operator, which is made for the most so far."""
    group = init_on(device)
    world, rank = group.world, group.rank
    first, last = rank * experts // world, (rank + 1) * experts // world
    up = random_tensor(1, experts, hidden, features)
    rooms, most = [], 0
    for count in (5, 9, 3, 17, 8):
        most = max(most, count)
        tokens = random_tensor(10 + count, world * count, hidden)
        ids = torch.tensor([1, 2] if world > 2 else [3, 4]).expand(count, top_k)
        weights = torch.rand(count, top_k, generator=torch.Generator().manual_seed(rank))
        mine = tokens[rank * count : (rank + 1) * count].to(device)
        routed = mt.moe_dispatch_gemm(mine, ids.to(device), weights.to(device), up[first:last].to(device), experts_total=experts)
        used = int(routed.offsets[-1])
        assert used == (world * count * top_k if first <= ids[0, 0] < last else 0)
        expert = torch.arange(first, last).repeat_interleave(routed.offsets.cpu().long().diff())
        rows = routed.rows[:used].cpu().long()
        x, w = tokens[rows[:, 0] * count + rows[:, 1]].double(), up[expert].double()
        exact = torch.einsum("jh,jhf->jf", x, w)
        off = (routed.y[:used].cpu().double() - exact).abs()
        assert (off <= 2.0**-8 * exact.abs() + 2.0**-16 * torch.einsum("jh,jhf->jf", x.abs(), w.abs())).all(), f"{count} tokens"
        rooms.append([(operator.room, most) for (name, *_), operator in group._operators.items() if name == "moe"])
    return rooms


def shapes_of_dispatches_on_a_gpu(counts):
    """The library's shape of a dispatch on a GPU, by its count of tokens; nothing is launched."""
    import contextlib
    from types import SimpleNamespace

    from mkernel import moe as base
    from mkernel.torch import moe

    asked = []

    class Group:
        world, rank = 4, 0

        def launch(self, name, shape, room, arguments, **more):
            asked.append((name, dict(shape)))
            raise InterruptedError

    torch.cuda.device, torch.cuda.current_stream = lambda _: contextlib.nullcontext(), lambda: SimpleNamespace(cuda_stream=0)
    group, experts = Group(), random_tensor(1, 2, 16, 24)
    for count in counts:
        shape = base.dispatch_shape(group, experts.shape, 6, 3, 1)
        inputs = (random_tensor(2, count, 16), torch.zeros(count, 3, dtype=torch.int32), torch.ones(count, 3), experts)
        with contextlib.suppress(InterruptedError):
            moe._dispatch_on_device(group, *inputs, shape, 24 * count)
    return asked


def wrong_gradient_of_experts_is_seen():
    """The same with the gradient of the experts' weights made wrong; answers what the check says."""
    from mkernel.torch import moe

    right = moe._slices
    moe._slices = lambda offsets: [slice(s.start, max(s.start, s.stop - 1)) for s in right(offsets)]
    try:
        experts_gradients_are_right("bf16")
    except AssertionError as error:
        return str(error)
    return "nothing"
