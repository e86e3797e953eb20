"""Single ranks in the tests of gradients under circumstances: autocast, other default types, second derivatives, rows behind the sequences."""
import functools

import every_operator
import torch
from every_operator import alike, results
from torch_ranks import DTYPES, error_of, f64, init_on, random_tensor

import mkernel
import mkernel.torch as mt


def circumstances_change_nothing(kind, device="cpu"):
    """Autocast to either type, and a default type, change no bit of an operator's results and gradients."""
    init_on(device)
    every_operator.poison()
    once = functools.partial(results, DTYPES[kind], device=device)
    plain = once()
    for to in (torch.bfloat16, torch.float16):
        autocast = functools.partial(torch.autocast, device, dtype=to)
        alike(plain, once(backward=autocast), f"backward under autocast to {to}")
        alike(plain, once(forward=autocast, backward=autocast), f"under autocast to {to}")
    for default in (torch.float64, torch.float16):
        torch.set_default_dtype(default)
        alike(plain, once(), f"the default type {default}")
        torch.set_default_dtype(torch.float32)
    return len(plain)


def smallest_sizes_work():
    """One row, one token of each rank, and the fewest columns: no operator's result lies in an input's memory, which PyTorch refuses."""
    mkernel.init()
    every_operator.poison()
    for rows in (1, 2):
        found = results(torch.bfloat16, rows=rows, wide=8)
        alike(found, results(torch.bfloat16, rows=rows, wide=8), f"{rows} rows")
    return len(found)


def inputs_at_odd_offsets(device="cpu"):
    """Tensors without gaps that begin between two of the vectors that GPUs read are copied there, and change nothing. CPUs are told to do the same."""
    from mkernel.torch import attention, composed, operators

    init_on(device)
    plain = results(torch.bfloat16, device=device)
    if device == "cpu":
        for module in (attention, composed, operators):
            module.misaligned = lambda x: x.data_ptr() % 16 != 0
    seen = []
    every_operator.addresses_seen(seen)
    alike(plain, results(torch.bfloat16, place=every_operator.at_odd_offset, device=device), "at odd offsets")
    wrong = {f"{one.operator}: {one.argument}" for one in seen if one.address % 16 != 0}
    assert not wrong, f"read where no vector begins: {', '.join(sorted(wrong))}"
    return len({one.operator for one in seen})


def rows_behind_the_sequences(kind, device="cpu"):
    """Not-a-number behind the sequences reaches no result and no gradient, and the rest is as without those rows."""
    group = init_on(device)
    every_operator.poison()
    dtype = DTYPES[kind]
    for causal, lengths in ((True, [50, 0, 1, 13]), (False, [7, 64]), (True, [1, 0]), (False, [0, 0])):
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        mine = len(mkernel.packed_rows(lengths, causal=causal))
        inputs = [(random_tensor(10 * group.rank + i, mine, heads, 64, dtype=dtype) * 4).to(device) for i, heads in enumerate((4, 2, 2, 4))]
        answers = []
        for more in (0, 3, 40):  # 40 is more than any rank has
            *leaves, dy = (torch.cat([x, x.new_full((more, *x.shape[1:]), torch.nan)]).requires_grad_() for x in inputs)
            y, lse = torch.ops.mkernel.ring_attention_packed(*leaves, starts, max(1, sum(lengths)), causal, 0.125, "")
            torch.autograd.backward([y, lse], [dy.detach(), torch.cat([lse.new_ones(mine, 4), lse.new_full((more, 4), torch.nan)])])
            answers.append([y.detach(), lse.detach(), *(x.grad for x in leaves)])
        for more, found in zip((0, 3, 40), answers):
            for name, x, exact in zip(("out", "lse", "dq", "dk", "dv"), found, answers[0]):
                at = f"{name} of {lengths} with {more} rows more on rank {group.rank}"
                assert len(x) == mine + more and torch.equal(x[:mine], exact), at
                assert (x[mine:] == 0).all(), f"{at}: the rows behind are not 0"
    return True


def gradients_of_weights_have_their_range(kind):
    """Gradients of routing weights are those of its rows, bit for bit, of numbers that no element type holds."""
    group = mkernel.init()
    every_operator.poison()
    dtype, rank, world = DTYPES[kind], group.rank, group.world
    count, experts, hidden = 5, 6, 16
    own = slice(rank * experts // world, (rank + 1) * experts // world)
    random = torch.Generator().manual_seed(1)
    for top_k in (1, 3, 4, 5):
        ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(count * world)])
        ids[::4, 0] = -1
        # By token and slot: up to nearly float32's largest.
        wanted = torch.randn(count * world, top_k, generator=random) * 10.0 ** torch.randint(-30, 38, (count * world, top_k), generator=random)
        mine = slice(rank * count, (rank + 1) * count)
        x, up = random_tensor(1 + rank, count, hidden, dtype=dtype), random_tensor(2, experts, hidden, 24, dtype=dtype)[own]
        weights = torch.rand(count, top_k, generator=random, dtype=torch.float32).requires_grad_()
        routed = mt.moe_dispatch_gemm(x, ids[mine], weights, up.requires_grad_(), experts_total=experts)
        used = int(routed.offsets[-1])
        rows = routed.rows[:used].long()
        given = torch.zeros_like(routed.weight)
        given[:used] = wanted[rows[:, 0] * count + rows[:, 1], rows[:, 2]]
        routed.weight.backward(given)
        assert torch.equal(weights.grad, wanted[mine].masked_fill(ids[mine] < 0, 0)), f"{kind}, {top_k} experts, on rank {rank}"
    return True


def types_of_routing_gradients(kind):
    """By default type, the types of dispatch's gradients where none of the weights came, and of the weights its tokens' gradient is summed with."""
    from mkernel.torch import moe

    group = mkernel.init()
    tokens, experts = random_tensor(1 + group.rank, 4, 16, dtype=DTYPES[kind]), random_tensor(2, 1, 16, 24, dtype=DTYPES[kind])
    ids, weights = torch.arange(4)[:, None] % group.world, torch.ones(4, 1)
    routed = mt.moe_dispatch_gemm(tokens, ids, weights, experts, experts_total=group.world)
    dy, combine, summed = torch.ones_like(routed.y), moe._combine, []

    def seen(group, y, weight, *more, **named):
        summed.append(weight.dtype)
        return combine(group, y, weight, *more, **named)

    moe._combine = seen
    found = []
    for default in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(default)
        answers = torch.ops.mkernel.moe_dispatch_gemm_backward(dy, None, tokens, ids, experts, routed.rows, routed.offsets, group.world, "")
        assert (answers[1] == 0).all()
        found.append([*(x.dtype for x in answers), summed.pop()])
    return found


# --- Second derivatives -----------------------------------------------------------------------------


def second_derivatives_are_right(kind, m=16, n=24, k=8):
    """The derivatives of each product's and collective's gradients, against those of one process in float64."""
    group = mkernel.init()
    dtype, rank, world = DTYPES[kind], group.rank, group.world

    def tensors(seed, *shape, alike=False):
        """One for each rank."""
        return [random_tensor(seed + (0 if alike else r), *shape, dtype=dtype) for r in range(world)]

    def check(what, call, exact, inputs, dys, outers, alike):
        """`exact` is of all ranks' inputs: the result of each rank, or one result of all. `alike`: which of (dy, *inputs) all ranks have alike."""

        def once(of_ranks, same):
            return of_ranks[:1] if same else of_ranks

        given, *leaves = ([f64(x) for x in once(of_ranks, same)] for of_ranks, same in zip((dys, *inputs), alike))
        ys = exact(*(one * world if same else one for one, same in zip(leaves, alike[1:])))
        firsts = torch.autograd.grad(ys, sum(leaves, []), given, create_graph=True)
        of_firsts = [x.double() for outer, same in zip(outers, alike[1:]) for x in once(outer, same)]
        seconds = iter(torch.autograd.grad(firsts, sum(leaves, given), of_firsts, allow_unused=True))
        wanted = [[next(seconds) for _ in one][0 if same else rank] for one, same in zip((given, *leaves), alike)]

        ours = [x[rank].detach().clone().requires_grad_() for x in (dys, *inputs)]
        got = torch.autograd.grad(call(*ours[1:]), ours[1:], ours[0], create_graph=True)
        again = torch.autograd.grad(got, ours, [x[rank] for x in outers], allow_unused=True)
        for name, found, right in zip(("dY", "A", "B"), again, wanted):
            at = f"the second derivative by {name} of {what} {kind} on rank {rank}"
            assert (found is None) == (right is None), at
            if right is not None:
                assert error_of(found, right) < 0.01, f"{at}: {error_of(found, right)}"

    def of_sum(as_, bs):
        return sum(a @ b for a, b in zip(as_, bs))

    for by_columns in (False, True):
        bs = [x.t() for x in tensors(100, n, k)] if by_columns else tensors(100, k, n)
        of_b = tensors(300, k, n)
        for keep in (True, False):
            what = f"ag_gemm by_columns={by_columns} keep={keep}"
            check(what, lambda a, b: mt.ag_gemm(a, b, keep_gathered=keep), lambda as_, bs: [torch.cat(as_) @ b for b in bs],
                  (tensors(0, m // world, k), bs), tensors(200, m, n), (tensors(400, m // world, k), of_b), (False, False, False))
        check(f"gemm_rs by_columns={by_columns}", mt.gemm_rs, lambda as_, bs: list(of_sum(as_, bs).chunk(world)),
              (tensors(0, m, k), bs), tensors(200, m // world, n), (tensors(400, m, k), of_b), (False, False, False))
        check(f"gemm_ar by_columns={by_columns}", mt.gemm_ar, lambda as_, bs: [of_sum(as_, bs)],
              (tensors(0, m, k), bs), tensors(200, m, n, alike=True), (tensors(400, m, k), of_b), (True, False, False))
        check(f"copy_gemm by_columns={by_columns}", mt.copy_gemm, lambda as_, bs: [a @ b for a, b in zip(as_, bs)],
              (tensors(0, m, k, alike=True), bs), tensors(200, m, n), (tensors(400, m, k, alike=True), of_b), (False, True, False))
    # The collectives are linear: of a square, so that there is something to derive twice.
    check("all_gather", lambda a: mt.all_gather(a * a), lambda as_: [torch.cat([a * a for a in as_])] * world,
          (tensors(0, m // world, k),), tensors(200, m, k), (tensors(400, m // world, k),), (False, False))
    check("reduce_scatter", lambda a: mt.reduce_scatter(a * a), lambda as_: list(sum(a * a for a in as_).chunk(world)),
          (tensors(0, m, k),), tensors(200, m // world, k), (tensors(400, m, k),), (False, False))
    return True


def composed_gradients_refuse_a_second_derivative():
    """By operator, what attention and experts say of a second derivative, which they do not have."""
    group = mkernel.init()
    q, k, v = (random_tensor(i + 10 * group.rank, 1, 2, 4, 64).requires_grad_() for i in range(3))
    rows = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    starts = torch.tensor([0, 4 * group.world], dtype=torch.int32)
    tokens, experts = random_tensor(5 + group.rank, 4, 16).requires_grad_(), random_tensor(6, 1, 16, 16).requires_grad_()
    ids, weights = torch.arange(4)[:, None] % group.world, torch.ones(4, 1)

    def combined():
        routed = mt.moe_dispatch_gemm(tokens.detach(), ids, weights, experts.detach(), experts_total=group.world)
        return mt.gemm_combine(routed.y.requires_grad_(), routed, experts)

    calls = {
        "ring_attention": (lambda: mt.attention(q, k, v), (q, k, v)),
        "ring_attention_packed": (lambda: mt.attention_varlen(*rows, starts), rows),
        "moe_dispatch_gemm": (lambda: mt.moe_dispatch_gemm(tokens, ids, weights, experts, experts_total=group.world).y, (tokens, experts)),
        "gemm_combine": (combined, (experts,)),
    }
    said = {}
    for name, (call, leaves) in calls.items():
        y = call()
        firsts = torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph=True)
        try:
            sum(x.float().square().sum() for x in firsts).backward()
            said[name] = None
        except RuntimeError as error:
            said[name] = str(error)
    return said
