"""What single ranks do in the tests of attention and of experts: functions that a new process can import."""
import numpy
from on_ranks import Foreign
from reference import ROUNDING, assert_close, combined, product, random_matrix, values_of

import mkernel
from mkernel import gradients


def exact_attention(q, k, v, q_positions, causal, scale):
    """float64: (output, log-sum-exp); keys are in the order of the sequence."""
    each = q.shape[1] // k.shape[1]
    scores = numpy.einsum("qhd,khd->hqk", q, k.repeat(each, 1)) * scale
    if causal:
        scores[:, q_positions[:, None] < numpy.arange(len(k))] = -numpy.inf
    most = scores.max(-1, keepdims=True)
    weights = numpy.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return numpy.einsum("hqk,khd->qhd", weights / total, v.repeat(each, 1)), (most + numpy.log(total))[..., 0].T


def attention_is_right(dtype):
    """Ring Attention on this rank's rows, against float64."""
    group = mkernel.init()
    for causal, seq, heads, key_heads, size in ((False, 64, 4, 2, 64), (True, 64, 4, 4, 64), (True, 75, 2, 1, 128), (False, 9, 2, 2, 64)):
        q, k, v = (random_matrix([i, seq], seq, h * size, dtype) for i, h in ((1, heads), (2, key_heads), (3, key_heads)))
        rows = mkernel.sequence_rows(seq, causal=causal)
        stored = [x[0][rows].reshape(len(rows), -1, size) for x in (q, k, v)]
        whole = [x[1].reshape(seq, -1, size) for x in (q, k, v)]
        out, lse = mkernel.ring_attention(*stored, causal=causal, seq=seq)
        expected, expected_lse = exact_attention(whole[0][rows], whole[1], whole[2], rows, causal, size**-0.5)
        half, tiny = ROUNDING[dtype]
        # The output is rounded once; what comes before is float32, and far below that.
        allowed = 1.1 * half * abs(expected) + 1e-5 + tiny
        assert (abs(values_of(out) - expected) <= allowed).all(), f"causal={causal} seq={seq} on rank {group.rank}"
        assert (abs(lse - expected_lse) <= 1e-4).all()
    return True


def rows_of_others():
    """Each rank's parts by their definition; what it answers of ranks that are not there, and of lengths that are none."""
    group = mkernel.init()
    for causal in (False, True):
        for seq in (0, 1, 10, 75):
            ends = [seq * part // group.world for part in range(group.world + 1)]
            if causal:
                ends = [seq * part // (2 * group.world) for part in range(2 * group.world + 1)]
            for rank in range(group.world):
                parts = (rank, 2 * group.world - 1 - rank) if causal else (rank,)
                expected = [position for part in parts for position in range(ends[part], ends[part + 1])]
                assert mkernel.sequence_rows(seq, causal=causal, rank=rank).tolist() == expected
    errors = []
    for seq, rank in ((10, group.world), (10, -1), (10, 2**32), (10, 2**70), (-1, 0), (2**31, 0)):
        for causal in (False, True):
            try:
                errors.append(mkernel.sequence_rows(seq, causal=causal, rank=rank))
            except mkernel.Error as error:
                errors.append((error.code.label, error.sentence))
    return errors


def exact_attention_gradients(q, k, v, dout, dlse, causal, scale):
    """float64, of the whole sequence: (dq, dk, dv), and for each the sizes by which rounding may move it: (in the sums, before them)."""
    each = q.shape[1] // k.shape[1]
    keys, values = k.repeat(each, 1), v.repeat(each, 1)
    scores = numpy.einsum("qhd,khd->hqk", q, keys) * scale
    if causal:
        scores[:, numpy.triu(numpy.ones((len(q), len(k)), bool), 1)] = -numpy.inf
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = numpy.einsum("qhd,khd->hqk", dout, values)
    out = numpy.einsum("hqk,khd->qhd", weights, values)
    dscores = scale * weights * (dweights - (weights * dweights).sum(-1, keepdims=True) + dlse.T[:, :, None])
    # The output that comes back is rounded: by so much may a score's gradient be off, times half a unit.
    off = scale * weights * (abs(dout) * abs(out)).sum(-1).T[:, :, None]

    def of_keys(x):
        return x.reshape(len(k), k.shape[1], each, -1).sum(2)

    results = []
    for which in (lambda x, a: numpy.einsum("hqk,khd->qhd", x, a(keys)), lambda x, a: of_keys(numpy.einsum("hqk,qhd->khd", x, a(q)))):
        results.append((which(dscores, lambda x: x), which(abs(dscores), abs), which(off, abs)))
    values_too = [of_keys(numpy.einsum("hqk,qhd->khd", weights, a)) for a in (dout, abs(dout))]
    return *results, (*values_too, 0)


def attention_gradients_are_right(dtype):
    """The composed gradient on this rank's rows, against float64."""
    group = mkernel.init()
    half, tiny = ROUNDING[dtype]
    for causal, seq, heads, key_heads, size in ((False, 9, 2, 2, 64), (True, 37, 4, 2, 64), (True, 40, 2, 1, 128)):
        drawn = [random_matrix([i, seq], seq, h * size, dtype) for i, h in ((1, heads), (2, key_heads), (3, key_heads), (4, heads))]
        rows = mkernel.sequence_rows(seq, causal=causal)
        q, k, v, dout = (x[0][rows].reshape(len(rows), -1, size) for x in drawn)
        dlse = numpy.random.default_rng([5, seq]).standard_normal((seq, heads)).astype(numpy.float32) / 4
        out, lse = mkernel.ring_attention(q, k, v, causal=causal, seq=seq)
        got = mkernel.ring_attention_backward(dout, q, k, v, out, lse, causal=causal, seq=seq, dlse=dlse[rows])
        expected = exact_attention_gradients(*(x[1].reshape(seq, -1, size) for x in drawn), dlse.astype(float), causal, size**-0.5)
        for name, one, (exact, sums, before) in zip(("dq", "dk", "dv"), got, expected):
            # Gradients of keys are rounded on each rank, on each node, and once more.
            allowed = 1.1 * half * ((abs(exact) if name == "dq" else 3 * sums) + before) + 1e-5 + tiny
            off = abs(values_of(one) - exact[rows]) - allowed[rows]
            assert (off <= 0).all(), f"{name} {dtype} causal={causal} seq={seq} on rank {group.rank}: off by {off.max():.2e} more than allowed"
    return True


def experts_gradients_are_right(dtype, hidden=40, features=24, experts=6, top_k=3):
    """The composed gradients of dispatch and combine, for ranks with different counts of tokens, one with none, against float64."""
    group = mkernel.init()
    half, tiny = ROUNDING[dtype]
    mine, counts = group.rank, [5 * r for r in range(group.world)]
    own = range(mine * experts // group.world, (mine + 1) * experts // group.world)

    def drawn(seed, rows, columns):
        return [random_matrix([seed, r], max(1, rows[r]), columns, dtype) for r in range(len(rows))]

    tokens, douts = drawn(7, counts, hidden), drawn(11, counts, hidden)
    up, down = drawn(9, [hidden] * experts, features), drawn(10, [features] * experts, hidden)
    ids = [numpy.array([numpy.random.default_rng([8, r, t]).permutation(experts)[:top_k] for t in range(counts[r])], int).reshape(-1, top_k) for r in range(group.world)]
    for one in ids:
        one[::4, 0] = -1
    factors = [numpy.random.default_rng([6, r]).random((counts[r], top_k)).astype(numpy.float32) for r in range(group.world)]
    # By token and slot, so that every rank can say what is right for its tokens: a gradient of each product row, and of each weight.
    dys = [random_matrix([12, r], max(1, counts[r] * top_k), features, dtype) for r in range(group.world)]
    dfactors = [numpy.random.default_rng([13, r]).standard_normal((counts[r], top_k)).astype(numpy.float32) for r in range(group.world)]
    x, up_, down_ = tokens[mine][0][: counts[mine]], numpy.stack([up[e][0] for e in own]), numpy.stack([down[e][0] for e in own])
    routed = mkernel.moe_dispatch_gemm(x, ids[mine], factors[mine], up_, experts_total=experts)
    at = list(zip(numpy.repeat(own, numpy.diff(routed.offsets)), routed.rank, routed.token, routed.slot))

    def of_rows(made, width):
        """(stored, float64) of the routed rows' numbers, which are known by token and slot."""
        rows = [(made[r][0][t * top_k + s], made[r][1][t * top_k + s]) for _, r, t, s in at]
        return [numpy.array([row[i] for row in rows]).reshape(-1, width) for i in (0, 1)]

    def close(got, exact, size, what, roundings=1.1):
        off = abs(values_of(got) - exact) - roundings * half * (abs(exact) + size) - 1e-5 - tiny
        assert (off <= 0).all(), f"{what} {dtype} on rank {mine}: off by {off.max():.2e} more than allowed"

    # Dispatch.
    dy, exact_dy = of_rows(dys, features)
    dweight = numpy.array([dfactors[r][t, s] for _, r, t, s in at], numpy.float32)
    dx, dfactor, dup = mkernel.moe_dispatch_gemm_backward(dy, routed, x, up_, dweight=dweight)
    there = ids[mine] >= 0
    products = numpy.zeros((counts[mine], top_k, hidden))
    for t, s in zip(*numpy.nonzero(there)):
        products[t, s] = up[ids[mine][t, s]][1] @ dys[mine][1][t * top_k + s]
    close(dx, products.sum(1), 0, "dtokens")
    assert numpy.array_equal(dfactor, dfactors[mine] * there)
    given = numpy.array([tokens[r][1][t] for _, r, t, _ in at]).reshape(-1, hidden)
    expert = numpy.array([e for e, *_ in at], int)
    for i, e in enumerate(own):
        close(dup[i], given[expert == e].T @ exact_dy[expert == e], 0, "dW of dispatch")

    # Combine, of any rows.
    y, exact_y = of_rows(dys, features)
    dy, dweight, ddown = mkernel.gemm_combine_backward(douts[mine][0][: counts[mine]], y, routed, down_)
    given = numpy.array([douts[r][1][t] for _, r, t, _ in at]).reshape(-1, hidden)
    scale = numpy.array([factors[r][t, s] for _, r, t, s in at], float)[:, None]
    back = numpy.array([down[e][1] @ one for e, one in zip(expert, given)]).reshape(-1, features)
    close(dy, scale * back, 0, "dY")
    assert (abs(dweight - (back * exact_y).sum(1)) <= 1e-5).all()
    for i, e in enumerate(own):
        here = expert == e
        close(ddown[i], (scale * exact_y)[here].T @ given[here], 0, "dW of combine")
    return len(at)


def wrong_formula_is_seen(which, function):
    """The same with a formula of gradients.py made wrong; answers what the check says."""
    right = getattr(gradients, which)

    def wrong(*arguments):
        first, second, third = right(*arguments)
        return first, second, numpy.roll(third, 1, axis=0)

    setattr(gradients, which, wrong)
    try:
        globals()[function]("f16")
    except AssertionError as error:
        return str(error)
    return "nothing"


def packed_attention_is_right(dtype):
    """Sequences of different lengths, an empty one and one of a single row among them, against float64."""
    group = mkernel.init()
    for causal, lengths, heads, key_heads in ((True, [31, 0, 1, 9], 4, 2), (False, [5, 40], 2, 2), (True, [0, 2, 0], 2, 1)):
        seq = sum(lengths)
        q, k, v = (random_matrix([i, seq], seq, h * 64, dtype) for i, h in ((1, heads), (2, key_heads), (3, key_heads)))
        rows = mkernel.packed_rows(lengths, causal=causal)
        stored = [x[0][rows].reshape(len(rows), x[0].shape[1] // 64, 64) for x in (q, k, v)]
        out, lse = mkernel.ring_attention_packed(*stored, lengths, causal=causal)
        whole = [x[1].reshape(seq, -1, 64) for x in (q, k, v)]
        half, tiny = ROUNDING[dtype]
        starts = numpy.cumsum([0, *lengths])
        for i, length in enumerate(lengths):
            own = (rows >= starts[i]) & (rows < starts[i] + length)
            if not own.any():
                continue
            keys, values = (x[starts[i] : starts[i] + length] for x in whole[1:])
            expected, expected_lse = exact_attention(whole[0][rows[own]], keys, values, rows[own] - starts[i], causal, 64**-0.5)
            allowed = 1.1 * half * abs(expected) + 1e-5 + tiny
            assert (abs(values_of(out[own]) - expected) <= allowed).all(), f"{lengths}, sequence {i}, on rank {group.rank}"
            assert (abs(lse[own] - expected_lse) <= 1e-4).all()
    errors = []
    one = numpy.zeros((1, 1, 64), numpy.float16)
    for lengths in ([], [-1, 2], [group.world * 2]):
        try:
            mkernel.ring_attention_packed(one, one, one, lengths)
        except mkernel.Error as error:
            errors.append(error.sentence)
    return errors


def moe_is_right(dtype, hidden=32, features=24, experts=6, top_k=2):
    """Every row of this rank's experts, for ranks with different counts of tokens, one with none."""
    group = mkernel.init()
    first, count = [(r * experts // group.world, (r + 1) * experts // group.world - r * experts // group.world) for r in range(group.world)][group.rank]
    counts = [5 * r for r in range(group.world)]
    weights, exact_weights = zip(*(random_matrix([9, e], hidden, features, dtype) for e in range(first, first + count)))
    tokens = [random_matrix([7, r], max(1, counts[r]), hidden, dtype) for r in range(group.world)]
    ids = [numpy.random.default_rng([8, r]).integers(-1, experts, (counts[r], top_k)) for r in range(group.world)]
    factors = [numpy.random.default_rng([6, r]).random((counts[r], top_k)) for r in range(group.world)]
    biases, exact_biases = random_matrix([14, group.rank], count, features, dtype)
    mine = group.rank
    for bias in (None, None, biases):
        routed = mkernel.moe_dispatch_gemm(
            tokens[mine][0][: counts[mine]], ids[mine], factors[mine], numpy.stack(weights), experts_total=experts, bias=bias
        )
        assert routed.first_expert == first and len(routed.offsets) == count + 1
        wanted = sorted(
            (e, r, t, s) for r in range(group.world) for t in range(counts[r]) for s in range(top_k) for e in [ids[r][t, s]] if first <= e < first + count
        )
        expert = numpy.repeat(numpy.arange(first, first + count), numpy.diff(routed.offsets))
        assert sorted(zip(expert, routed.rank, routed.token, routed.slot)) == wanted
        for j, (e, r, t, s) in enumerate(zip(expert, routed.rank, routed.token, routed.slot)):
            assert routed.weight[j] == numpy.float32(factors[r][t, s])
            added = None if bias is None else exact_biases[e - first]
            assert_close(routed.y[j : j + 1], product(tokens[r][1][t : t + 1], exact_weights[e - first], dtype, added), f"row {j} on rank {mine}")
    return len(wanted)


def combine_is_right(dtype, hidden=40, features=24, experts=6, top_k=3, other=16):
    """GEMM+Combine behind a dispatch, with a residual and without, for ranks with different counts of tokens, one with none."""
    group = mkernel.init()
    counts = [5 * r for r in range(group.world)]
    shares = [range(r * experts // group.world, (r + 1) * experts // group.world) for r in range(group.world)]
    up = [random_matrix([9, e], hidden, features, dtype)[0] for e in range(experts)]
    down, exact_down = zip(*(random_matrix([10, e], features, hidden, dtype) for e in range(experts)))
    ids = [numpy.random.default_rng([8, r]).integers(-1, experts, (counts[r], top_k)) for r in range(group.world)]
    factors = [numpy.random.default_rng([6, r]).random((counts[r], top_k)).astype(numpy.float32) for r in range(group.world)]
    mine = group.rank
    own = shares[mine]
    tokens = random_matrix([7, mine], max(1, counts[mine]), hidden, dtype)[0][: counts[mine]]
    residual, exact_residual = random_matrix([5, mine], max(1, counts[mine]), hidden, dtype)
    experts_up = numpy.stack([up[e] for e in own]) if own else numpy.empty((0, hidden, features), up[0].dtype)
    experts_down = numpy.stack([down[e] for e in own]) if own else numpy.empty((0, features, hidden), up[0].dtype)
    routed = mkernel.moe_dispatch_gemm(tokens, ids[mine], factors[mine], experts_up, experts_total=experts)
    # What became of the rows, told by their tokens: every rank can then say what the sum must be.
    made = [[random_matrix([4, r, t, s], 1, features, dtype) for t in range(counts[r]) for s in range(top_k)] for r in range(group.world)]
    y = numpy.empty_like(routed.y)
    for j, (r, t, s) in enumerate(zip(routed.rank, routed.token, routed.slot)):
        y[j] = made[r][t * top_k + s][0][0]
    for more in (None, residual[: counts[mine]]):
        out = mkernel.gemm_combine(y, routed, experts_down, residual=more)
        assert out.shape == (counts[mine], hidden)
        for t in range(counts[mine]):
            rows = [(factors[mine][t, s], made[mine][t * top_k + s][1], exact_down[e]) for s, e in enumerate(ids[mine][t]) if e >= 0]
            beside = numpy.zeros((1, hidden)) if more is None else exact_residual[t : t + 1]
            assert_close(out[t : t + 1], combined(rows, beside, features, top_k, group.place.nodes, dtype), f"token {t} of rank {mine}")
    return counts[mine]


def wrong_experts_are_refused():
    """The errors of wrong shapes, before anything is launched; the group stays usable."""
    group = mkernel.init()
    ids = numpy.full((2, 1), (group.rank + 1) % group.world)
    ones = numpy.ones((2, 8), numpy.float16)
    expert = numpy.ones((1, 8, 8), numpy.float16)
    routed = mkernel.moe_dispatch_gemm(ones, ids, numpy.ones((2, 1)), expert, experts_total=group.world)
    errors = []
    for call in (
        lambda: mkernel.gemm_combine(routed.y[:1], routed, expert),
        lambda: mkernel.gemm_combine(routed.y, routed, expert[:, :4]),
        lambda: mkernel.gemm_combine(routed.y, routed, mkernel.to_bf16(expert)),
        lambda: mkernel.gemm_combine(routed.y, routed, expert, residual=ones[:1]),
        lambda: mkernel.moe_dispatch_gemm(ones, ids, numpy.ones((2, 2)), expert, experts_total=group.world),
        lambda: mkernel.moe_dispatch_gemm(ones, ids, numpy.ones((2, 1)), expert[:, :4], experts_total=group.world),
        lambda: mkernel.moe_dispatch_gemm(ones, ids, numpy.ones((2, 1)), expert, experts_total=group.world, bias=ones),
    ):
        try:
            call()
            errors.append(None)
        except mkernel.Error as error:
            errors.append(error.sentence)
    assert (mkernel.gemm_combine(routed.y, routed, expert) == 64).all()
    return errors


def foreign_tensors_of_three_dimensions():
    """Attention and experts of a library that knows DLPack alone."""
    group = mkernel.init()
    q = numpy.random.default_rng(group.rank).standard_normal((4, 2, 64)).astype(numpy.float16)
    out, lse = mkernel.ring_attention(Foreign(q), Foreign(q), Foreign(q))
    expected, expected_lse = mkernel.ring_attention(q, q, q)
    assert (out == expected).all() and (lse == expected_lse).all()
    tokens, experts = numpy.ones((2, 8), numpy.float16), numpy.ones((1, 8, 16), numpy.float16)
    ids, weights = numpy.full((2, 1), group.rank), numpy.ones((2, 1))
    routed = mkernel.moe_dispatch_gemm(Foreign(tokens), ids, weights, Foreign(experts), experts_total=group.world)
    assert (routed.y == 8).all()
    assert (mkernel.gemm_combine(Foreign(routed.y), routed, Foreign(experts.transpose(0, 2, 1).copy()), residual=Foreign(tokens)) == 129).all()
    return True
