"""What single ranks do in the tests: functions that a new process can import. They check, and raise where it is wrong."""
import ctypes
import functools
import io
import os
import signal
import sys
import time

import numpy
from reference import assert_close, behind_the_sum, elements, product, random_matrix, sum_of_products, values_of

import mkernel
from mkernel import _c, _progress, gradients, kept, products

#: m, n, k of this rank: even and odd, fewer rows than ranks, larger than a tile.
SHAPES = [(64, 48, 32), (37, 24, 40), (3, 16, 8), (300, 272, 64)]


def operators_are_right(dtype, shapes=SHAPES):
    """Forward and gradients of the three operators on this rank, against float64."""
    group = mkernel.init()
    rank, world, local = group.rank, group.world, group.place.local_size
    for m, n, k in shapes:
        first, count = group.rows(m)
        mine = slice(first, first + count)
        a, exact_a = random_matrix([1, m], m, k, dtype)  # A of ag_gemm, by rows
        b, exact_b = random_matrix([2, m, rank], k, n, dtype)
        dy, exact_dy = random_matrix([3, m, rank], m, n, dtype)
        at = f"{dtype} {m} x {n} x {k} on rank {rank} of {world}"

        # AllGather+GEMM, with B by rows and by columns.
        y, gathered = mkernel.ag_gemm(a[mine], b, m=m, return_gathered=True)
        assert_close(y, product(exact_a, exact_b, dtype), f"ag_gemm {at}")
        assert (gathered == a).all()
        by_columns = numpy.ascontiguousarray(b.T).T
        assert_close(mkernel.ag_gemm(a[mine], by_columns, m=m), product(exact_a, exact_b, dtype), f"ag_gemm, B by columns, {at}")
        everyones = [(random_matrix([3, m, r], m, n, dtype)[1], random_matrix([2, m, r], k, n, dtype)[1].T) for r in range(world)]
        exact, allowed = sum_of_products(everyones, local, dtype)
        for kept in (gathered, None):
            da, db = mkernel.ag_gemm_backward(dy, a[mine], b, gathered=kept)
            assert_close(da, (exact[mine], allowed[mine]), f"dA of ag_gemm {at}")
            assert_close(db, product(exact_a.T, exact_dy, dtype), f"dB of ag_gemm {at}")

        # GEMM+ReduceScatter and GEMM+AllReduce: each rank has a share of the inner dimension.
        pairs = [(random_matrix([4, m, r], m, k, dtype)[1], random_matrix([2, m, r], k, n, dtype)[1]) for r in range(world)]
        a, exact_a = random_matrix([4, m, rank], m, k, dtype)
        exact, allowed = sum_of_products(pairs, local, dtype)
        assert_close(mkernel.gemm_rs(a, b), (exact[mine], allowed[mine]), f"gemm_rs {at}")
        assert_close(mkernel.gemm_ar(a, b), (exact, allowed), f"gemm_ar {at}")
        dy, exact_dy = random_matrix([5, m], m, n, dtype)  # by rows for gemm_rs, whole for gemm_ar
        for name, (da, db) in {
            "gemm_rs": mkernel.gemm_rs_backward(dy[mine], a, b),
            "gemm_ar": mkernel.gemm_ar_backward(dy, a, b),
        }.items():
            assert_close(da, product(exact_dy, exact_b.T, dtype), f"dA of {name} {at}")
            assert_close(db, product(exact_a.T, exact_dy, dtype), f"dB of {name} {at}")

        # A column-parallel product of an A that all ranks have.
        a, exact_a = random_matrix([1, m], m, k, dtype)
        dy, exact_dy = random_matrix([3, m, rank], m, n, dtype)
        da, db = mkernel.copy_gemm_backward(dy, a, b)
        assert_close(da, sum_of_products(everyones, local, dtype), f"dA of copy_gemm {at}")
        assert_close(db, product(exact_a.T, exact_dy, dtype), f"dB of copy_gemm {at}")
    mkernel.shutdown()
    return len(shapes)


def _with_gaps(matrix, gap):
    """The same numbers in rows that lie `gap` elements apart, and what lies between them is poisoned."""
    wide = numpy.full((matrix.shape[0], matrix.shape[1] + gap), 0x7FFF, numpy.uint16).view(matrix.dtype)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]]


def epilogues_are_right(dtype):
    """Bias, activation, partial sums in float32, and matrices whose rows have gaps: each operator, every element."""
    group = mkernel.init()
    rank, world, local = group.rank, group.world, group.place.local_size
    m, n, k = 37, 24, 40
    first, count = group.rows(m)
    mine = slice(first, first + count)
    whole, exact_whole = random_matrix([1, m], m, k, dtype)
    pairs = [(random_matrix([4, r], m, k, dtype), random_matrix([2, r], k, n, dtype)) for r in range(world)]
    (part, _), (b, exact_b) = pairs[rank]
    exact, allowed = sum_of_products([(a[1], b_[1]) for a, b_ in pairs], local, dtype)
    sums = {"ag_gemm": product(exact_whole, exact_b, dtype), "gemm_rs": (exact[mine], allowed[mine]), "gemm_ar": (exact, allowed)}
    bias, exact_bias = (x[0] for x in random_matrix([7], 1, n, dtype))
    checked = 0
    for activation in (None, "relu", "gelu", "silu", "gated_silu"):
        for with_bias, partials, gap in ((True, None, 0), (False, "f32", 8), (True, "f32", 3)):
            for name, sum_ in sums.items():
                left = whole[mine] if name == "ag_gemm" else part
                left, right = _with_gaps(left, gap), _with_gaps(numpy.ascontiguousarray(b.T), gap).T if gap == 3 else _with_gaps(b, gap)
                want = behind_the_sum(*sum_, exact_bias if with_bias else 0 * exact_bias, activation, dtype)
                out = _with_gaps(numpy.full(want[0].shape, 0x7FFF, numpy.uint16).view(left.dtype), gap)
                between = out.base[:, want[0].shape[1] :].copy() if gap else None
                more = {"m": m} if name == "ag_gemm" else {"partials": partials}
                y = getattr(mkernel, name)(left, right, bias=bias if with_bias else None, activation=activation, out=out, **more)
                assert y is out
                assert_close(y, want, f"{name} {dtype} {activation} bias={with_bias} {partials} gap {gap} on rank {rank}")
                assert gap == 0 or (out.base[:, want[0].shape[1] :].view(numpy.uint16) == between.view(numpy.uint16)).all()
                checked += 1
    mkernel.shutdown()
    return checked


def collectives_are_right(dtype):
    """all_gather gives every row, reduce_scatter sums within the roundings of fp32, a node and the whole, of shapes that ranks do not divide, too."""
    group = mkernel.init()
    digits = {"bf16": 8, "f16": 11, "f32": 24}[dtype]
    checked = 0
    for seed, (m, n) in enumerate([(8, 16), (37, 5), (3, 130), (1, 8), (200, 64)]):
        values = [numpy.random.default_rng(100 * seed + rank).uniform(-1, 1, (m, n)).astype(numpy.float32) for rank in range(group.world)]
        parts = [v if dtype == "f32" else elements(v, dtype)[0] for v in values]
        exact = [p.astype(numpy.float64) if dtype == "f32" else values_of(p) for p in parts]
        first, count = group.rows(m)
        gathered = mkernel.all_gather(parts[0][first : first + count], m=m)
        assert gathered.dtype == parts[0].dtype and numpy.array_equal(gathered, parts[0])
        for partials in [None, "f32"]:
            got = mkernel.reduce_scatter(parts[group.rank], partials=partials)
            got = got.astype(numpy.float64) if dtype == "f32" else values_of(got)
            expected, magnitude = sum(exact)[first : first + count], sum(abs(e) for e in exact)[first : first + count]
            bound = 2.0**-digits * (abs(expected) + (magnitude if partials is None else 0)) * 1.02 + 8 * 2.0**-24 * magnitude + 2.0**-24
            assert got.shape == (count, n) and (abs(got - expected) <= bound).all()
            checked += 1
    mkernel.shutdown()
    return checked


def wrong_epilogue_is_seen():
    """The same with one activation taken for another."""
    products.ACTIVATIONS["gelu"] = products.ACTIVATIONS["silu"]
    try:
        epilogues_are_right("f16")
    except AssertionError as error:
        return str(error)
    return "nothing"


def epilogue_errors():
    """What wrong epilogues are told; the group stays usable."""
    group = mkernel.init()
    a, b = numpy.ones((4, 8), numpy.float16), numpy.ones((8, 9), numpy.float16)
    errors = []
    for more in (dict(bias=a), dict(activation="tanh"), dict(activation="gated_silu"), dict(partials="f64")):
        try:
            mkernel.gemm_ar(a, b, **more)
            errors.append(None)
        except mkernel.Error as error:
            errors.append(error.sentence)
    group.mode = "quick"
    try:
        mkernel.gemm_ar(a, b)
    except mkernel.Error as error:
        errors.append(error.sentence)
    return errors


def tuning_and_mode_are_followed():
    """Tiles that the tuning chooses; how the launch ran; partial sums beyond f16 that were counted."""
    group = mkernel.init(tuning=mkernel.Tuning(tile_m=32, tile_n=32, count_nonfinite=True))
    a, b = numpy.full((64, 8), 300, numpy.float16), numpy.full((8, 32), 300, numpy.float16)
    ran = []
    for mode in ("fused", "unfused"):
        group.mode = mode
        infinite = mkernel.gemm_ar(a, b)
        ran.append((group.last_launch.fused, group.last_launch.nonfinite_partials > 0, bool(numpy.isinf(infinite).all())))
    return ran, repr(group.tuning)


def exchange_form_is_right(form, dtype):
    """GEMM+AllReduce in one form, against float64; answers the bits, and how many bytes this rank sent."""
    group = mkernel.init(tuning=mkernel.Tuning(exchange=form, tile_m=16, tile_n=16))
    bits, sent = [], 0
    for m, n, k in SHAPES:
        pairs = [(random_matrix([4, m, r], m, k, dtype)[1], random_matrix([2, m, r], k, n, dtype)[1]) for r in range(group.world)]
        a, b = random_matrix([4, m, group.rank], m, k, dtype)[0], random_matrix([2, m, group.rank], k, n, dtype)[0]
        c = mkernel.gemm_ar(a, b)
        assert_close(c, sum_of_products(pairs, group.place.local_size, dtype), f"form {form}, {m} x {n} x {k} on rank {group.rank}")
        bits.append(numpy.asarray(c).tobytes())
        sent += group.last_launch.network_bytes
    return bits, sent


def wrong_db_is_seen(which):
    """The same with one gradient of B made wrong; answers what the check says."""
    right = getattr(gradients, which)

    def wrong(ops, *arguments, **more):
        da, db = right(ops, *arguments, **more)
        return da, numpy.roll(db, 1, axis=0)

    setattr(gradients, which, wrong)
    try:
        operators_are_right("f16", SHAPES[:1])
    except AssertionError as error:
        return str(error)
    return "nothing"


def rank_and_place():
    group = mkernel.init()
    return group.rank, group.place, repr(group), mkernel.explain()


def second_init():
    mkernel.init()
    try:
        mkernel.init()
    except mkernel.Error as error:
        return error


def errors_of(socket):
    """The errors of wrong arguments; the group stays usable."""
    caught = {}

    def expect(name, call):
        try:
            call()
            caught[name] = None
        except mkernel.Error as error:
            caught[name] = error

    f16, f32 = numpy.ones((4, 8), numpy.float16), numpy.ones((4, 8), numpy.float32)
    expect("no group", lambda: mkernel.gemm_ar(f16, f16.T))
    expect("no daemon", lambda: mkernel.init(socket=socket))
    group = mkernel.init()
    expect("type", lambda: mkernel.gemm_ar(f32, f32.T))
    expect("inner", lambda: mkernel.gemm_ar(f16, f16))
    expect("dimensions", lambda: mkernel.gemm_ar(f16[0], f16.T))
    expect("rows", lambda: mkernel.ag_gemm(f16, f16.T, m=3))
    expect("out", lambda: mkernel.gemm_ar(f16, f16.T, out=numpy.empty((4, 5), numpy.float16)))
    expect("list", lambda: mkernel.gemm_ar([[1.0]], f16))
    expect("name", lambda: mkernel.gemm_ar(f16, f16.T, group="tp"))
    assert float(mkernel.gemm_ar(f16, f16.T)[0, 0]) == 8 * group.world
    mkernel.shutdown()
    expect("closed", group.barrier)
    return caught


def ranks_disagree():
    group = mkernel.init()
    n = 8 if group.rank == 1 else 16
    try:
        mkernel.gemm_ar(numpy.ones((4, 8), numpy.float16), numpy.ones((8, n), numpy.float16))
    except mkernel.Error as error:
        return error


def rank_is_missing(missing):
    if int(os.environ["MKERNEL_RANK"]) == missing:
        return None
    try:
        mkernel.init(timeout=2)
    except mkernel.Error as error:
        return error


def rank_dies_in_a_step(victim, sockets):
    """The victim is killed; the others get an error, and those of the first node start over as a job of their own."""
    group = mkernel.init(wait_timeout=60)
    rank, place = group.rank, group.place
    a, b = numpy.ones((64, 8), numpy.float16), numpy.ones((8, 16), numpy.float16)
    mkernel.gemm_ar(a, b)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:  # the launch that needs the victim, sooner or later
            mkernel.gemm_ar(a, b)
    except mkernel.Error as error:
        caught = error
    mkernel.shutdown()
    if place.node_rank != 0:
        return caught, None
    again = mkernel.Place.of_rank(place.local_rank, 1, place.local_size)
    mkernel.init(job="again", place=again, socket=sockets[0])
    return caught, float(mkernel.gemm_ar(a, b)[0, 0])


def child_of_fork():
    group = mkernel.init()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"{mkernel.is_initialized()} "
            try:
                group.barrier()
            except mkernel.Error as error:
                said += error.sentence
            mkernel.shutdown()
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    group.barrier()  # the parent goes on
    a = numpy.ones((4, 8), numpy.float16)
    return said, float(mkernel.gemm_ar(a, a.T)[0, 0])


def operators_are_kept():
    """Operators by shape, one for all smaller m, and the oldest dropped: the answers stay right."""
    group = mkernel.init()
    counts = []
    for m in (4, 2, 9):
        a = numpy.ones((m, 8), numpy.float16)
        assert (mkernel.gemm_ar(a, numpy.ones((8, 8), numpy.float16)) == 8 * group.world).all()
        counts.append((len(group._operators), max(kept.room for kept in group._operators.values())))
    kept.OPERATORS_MAX = 3
    for turn in range(3):
        for n in range(8, 48, 8):
            a = numpy.full((4, 8), n, numpy.float16)
            assert (mkernel.gemm_ar(a, numpy.ones((8, n), numpy.float16)) == n * 8 * group.world).all()
    counts.append(len(group._operators))
    return counts


def captured_operators_stay(flags):
    """Operators of a CUDA graph outlive larger and newer ones: launched again, as a graph does, they compute. It answers the refusal that there was.

    With `flags`, memory for a few operators, all of them captured.
    """
    if flags:
        _c.AttachOptions = functools.partial(_c.AttachOptions, arrival_flags=flags)
    group = mkernel.init()
    random = numpy.random.default_rng(group.rank)
    kept.OPERATORS_MAX = 3
    kept.under_capture = lambda device: capturing
    graphs, refused = [], None

    def operator_of_a_launch(m, n):
        mkernel.gemm_ar(numpy.ones((m, 8), numpy.float16), numpy.ones((8, n), numpy.float16))
        return next(reversed(group._operators.values()))

    capturing = True
    try:
        for n in (8, 16, 24, 32, 40) if not flags else range(8, 8 * 64, 8):
            graphs.append((operator_of_a_launch(4, n), n))
    except mkernel.Error as error:
        refused = error
    capturing = False
    assert len({id(operator) for operator, _ in graphs}) == len(graphs)
    if not flags:
        for n in range(8, 8 * 12, 8):  # larger, and others
            operator_of_a_launch(9, n)
        assert len(group._operators.all()) == len(graphs) + kept.OPERATORS_MAX
        assert group.explain().count("kept for a captured graph") == len(graphs)
    for operator, n in graphs:
        a, b = random.standard_normal((4, 8)).astype(numpy.float16), random.standard_normal((8, n)).astype(numpy.float16)
        c = numpy.full((4, n), numpy.nan, numpy.float16)
        arguments = _c.GemmArguments(a=a.ctypes.data, b=b.ctypes.data, c=c.ctypes.data, m=4, lda=8, ldb=n, ldc=n)
        _c.call("mk_op_launch", operator.handle, ctypes.byref(arguments), _c.FUSED, None)
        whole = [numpy.frombuffer(blob, numpy.float64).reshape(4, n) for blob in group.exchange("exact", (a.astype(float) @ b.astype(float)).tobytes())]
        exact, magnitude = sum(whole), sum(map(abs, whole))
        assert (abs(c - exact) <= 2.0**-9 * magnitude + 2.0**-10 * abs(exact) + 1e-3).all(), n
    mkernel.shutdown()
    assert all(operator.handle is None for operator, _ in graphs)
    return refused


class Foreign:
    """A tensor of a library that knows DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def dlpack_tensors():
    group = mkernel.init()
    a, b = numpy.full((4, 8), 2, numpy.float16), numpy.ones((16, 8), numpy.float16)
    out = numpy.zeros((4, 16), numpy.float16)
    foreign = Foreign(out)
    assert mkernel.gemm_ar(Foreign(a), Foreign(b.T), out=foreign) is foreign
    assert (out == 16 * group.world).all()
    return True


def sums_of_float32():
    group = mkernel.init()
    values = numpy.arange(40000, dtype=numpy.float32).reshape(2, 20000) * (group.rank + 1)
    total = group.sum_f32(values)
    expected = numpy.arange(40000, dtype=numpy.float32).reshape(2, 20000) * sum(range(1, group.world + 1))
    assert (total == expected).all()
    assert float(group.sum_f32(1.5)) == 1.5 * group.world
    return total.shape


def thousand_steps():
    """(pages of memory, descriptors) after 200 steps and after 1,000; a step is a forward and a backward pass."""
    group = mkernel.init()
    a, b = numpy.ones((8, 16), numpy.float16), numpy.ones((16, 8), numpy.float16)

    def use():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]), len(os.listdir("/proc/self/fd"))

    for step in range(1000):
        if step == 200:
            before = use()
        _, gathered = mkernel.ag_gemm(a, b, return_gathered=True)
        mkernel.ag_gemm_backward(numpy.ones((8 * group.world, 8), numpy.float16), a, b, gathered=gathered)
    return before, use()


def raises_on(rank):
    mkernel.init()
    if int(os.environ["MKERNEL_RANK"]) == rank:
        raise ValueError("as the test wants")
    mkernel.get_group().barrier()


def sleeps_on(rank):
    if int(os.environ["MKERNEL_RANK"]) == rank:
        time.sleep(600)


def product_of(dtype):
    group = mkernel.init()
    a = numpy.full((4, 8), 4 // group.world, dtype)
    return mkernel.gemm_ar(a, numpy.ones((8, 8), dtype))


def groups_side_by_side():
    """All ranks, and the ranks of the same rail: the sums of each group are its own."""
    everyone = mkernel.init()
    rail = [rank for rank in range(everyone.world) if rank % 2 == everyone.rank % 2]
    mine = mkernel.init(rail, name="rail")
    a = numpy.full((4, 8), everyone.rank + 1, numpy.float16)
    one = numpy.ones((8, 8), numpy.float16)
    answers = [float(mkernel.gemm_ar(a, one, group=group)[0, 0]) / 8 for group in (None, "rail", mine, everyone)]
    mkernel.shutdown("rail")
    return mine.rank, mine.world, answers, mkernel.is_initialized(), mkernel.is_initialized("rail")


def wrong_groups_of_the_second_node():
    if int(os.environ["MKERNEL_RANK"]) < 2:
        return None
    errors = []
    for group in ([0, 1], "tp", [1, 0, 2, 3]):
        try:
            mkernel.init(group)
        except mkernel.Error as error:
            errors.append(error.code)
    return errors


def operators_make_room_for_each_other():
    """With arrival flags for a few operators, those longest unused go, on all ranks alike."""
    _c.AttachOptions = functools.partial(_c.AttachOptions, arrival_flags=1024)
    group = mkernel.init()
    most = 0
    for n in [*range(8, 8 * 33, 8), 8]:
        assert (mkernel.gemm_ar(numpy.ones((4, 8), numpy.float16), numpy.ones((8, n), numpy.float16)) == 8 * group.world).all()
        most = max(most, len(group._operators))
    return most


class Terminal(io.StringIO):
    def isatty(self):
        return True


def what_takes_long_is_said():
    """With every step worth a line: what a terminal shows."""
    sys.stderr, _progress.DELAY_S = Terminal(), 0.0
    group = mkernel.init()
    for _ in range(2):
        mkernel.gemm_ar(numpy.ones((4, 8), numpy.float16), numpy.ones((8, 8), numpy.float16))
    group.barrier()
    return sys.stderr.getvalue()


def talks(lines):
    mkernel.init().barrier()
    for i in range(lines):
        print("line", i, "of rank", os.environ["MKERNEL_RANK"])
