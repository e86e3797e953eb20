"""How grouped products are judged in float64 by PyTorch (bound: tests/gpu/grouped_reference.h), for grouped_gemm_bench.py and
moe_bench.py."""
import torch


def product_bound(a, b, activation, unit, bias=None, scale=None):
    """The exact a @ b of one expert's rows, b as [K, N], after bias, activation ("none", "halves", "pairs") and a scale of each row;
    and how far a result may be from it. `unit`: the unit roundoff of the result's type."""
    k, n = b.shape
    a, b = a.double(), b.double()
    dot_unit = 1.01 * 2.0**-22 * (k / 16 + 2)
    x, error = a @ b, dot_unit * (a.abs() @ b.abs())
    if bias is not None:
        x += bias.double()
        error += 2.0**-24 * (x.abs() + error)
    if activation != "none":
        g, up = (x[:, : n // 2], x[:, n // 2 :]) if activation == "halves" else (x[:, 0::2], x[:, 1::2])
        dg, du = (error[:, : n // 2], error[:, n // 2 :]) if activation == "halves" else (error[:, 0::2], error[:, 1::2])
        silu = g * torch.sigmoid(g)
        off = 1.1 * dg + 2.0**-23 * (8 + 1.2 * (g.abs() + dg)) * (silu.abs() + 1.1 * dg)
        x = silu * up
        error = off * up.abs() + (silu.abs() + off) * du
        error += 2.0**-24 * (x.abs() + error)
    if scale is not None:
        x, error = x * scale, error * scale
        error += 2.0**-24 * (x.abs() + error)
    return x, error + unit * (x.abs() + error) + 2.0**-110
