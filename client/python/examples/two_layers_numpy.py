"""Two tensor-parallel layers trained with NumPy alone, on two nodes of two ranks on this machine.

    python two_layers_numpy.py

Y = relu(X W1) W2, with W1 split by columns and W2 by rows: AllGather+GEMM forward, GEMM+ReduceScatter back.
"""
import numpy

import mkernel

TOKENS, WIDTH, HIDDEN, STEPS, RATE = 64, 32, 128, 60, 0.05


def train():
    group = mkernel.init()
    common, mine = numpy.random.default_rng(0), numpy.random.default_rng(1 + group.rank)
    x = common.standard_normal((TOKENS, WIDTH))
    target = numpy.tanh(x @ common.standard_normal((WIDTH, WIDTH)) / 6)
    first, count = group.rows(TOKENS)
    rows = slice(first, first + count)
    x, target = x[rows].astype(numpy.float16), target[rows]
    share = HIDDEN // group.world
    w1 = mine.standard_normal((WIDTH, share)) / WIDTH**0.5
    w2 = mine.standard_normal((share, WIDTH)) / HIDDEN**0.5
    losses = []
    for _ in range(STEPS):
        half1, half2 = w1.astype(numpy.float16), w2.astype(numpy.float16)
        hidden, gathered = mkernel.ag_gemm(x, half1, return_gathered=True)
        active = numpy.maximum(hidden, 0)
        difference = mkernel.gemm_rs(active, half2) - target
        losses.append(float(group.sum_f32((difference**2).sum())) / (TOKENS * WIDTH))

        dy = (2 * difference / TOKENS).astype(numpy.float16)
        dactive, dw2 = mkernel.gemm_rs_backward(dy, active, half2)
        _, dw1 = mkernel.ag_gemm_backward(dactive * (hidden > 0), x, half1, gathered=gathered)
        w1 -= RATE * dw1
        w2 -= RATE * dw2
    return losses


if __name__ == "__main__":
    with mkernel.local_cluster(nodes=2, local=2) as cluster:
        curves = cluster.run(train)
    assert all(curve == curves[0] for curve in curves) and curves[0][-1] < curves[0][0] / 4
    print("loss:", " ".join(f"{loss:.4f}" for loss in curves[0][::10]), f"{curves[0][-1]:.4f}")
