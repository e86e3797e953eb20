"""How attention is judged in float64 by PyTorch, for attention_bench.py and ring_bench.py."""
import math

import torch

ROWS_AT_ONCE = 1024


def worst_over_bound(q, k, v, o, lse, positions, causal, key_tiles, bf16):
    """The worst |error| over its bound (attention_reference.h, with sums instead of each weight's own error), of O and
    LSE of one head. q, o: [n, D]; lse: [n]; positions: of these queries among the keys; k, v: [keys, D].
    """
    s, d = k.shape
    k, v = k.double(), v.double()
    unit = 2.0**-8 if bf16 else 2.0**-11
    worst = 0.0
    for begin in range(0, q.shape[0], ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        queries = q[some].double()
        scores = queries @ k.T / math.sqrt(d)
        error = (queries.abs() @ k.abs().T).amax(1) / math.sqrt(d) * 1.01 * 2.0**-22 * (d / 16 + 2)
        if causal:
            scores.masked_fill_(torch.arange(s, device=q.device)[None] > positions[some][:, None], -math.inf)
        exact_lse = torch.logsumexp(scores, 1)
        weights = torch.exp(scores - exact_lse[:, None])
        top = scores.amax(1)
        spread = top - torch.where(weights > 0, scores, top[:, None]).amin(1)
        each = torch.expm1(2 * error + 2.0**-22 * spread + (key_tiles + 2) * 2.0**-20)[:, None]
        adds = (64 + key_tiles) * 2.0**-23 + 1.01 * 2.0**-22 * (s / 16 + 2 + key_tiles)
        expected, magnitudes = weights @ v, weights @ v.abs()
        bound = (each + unit + adds) * magnitudes + expected.abs() * (each + adds)
        if not bf16:
            bound += 2.0**-25 * v.abs().sum(0)[None] * torch.exp(top - exact_lse)[:, None]
        bound = 1.05 * bound
        bound += unit * (expected.abs() + bound) + 2.0**-24
        share = ((o[some].double() - expected).abs() / bound).nan_to_num(nan=1e300)
        lse_bound = 1.05 * (each[:, 0] + adds + error + 2.0**-22 * (top.abs() + exact_lse.abs() + 1))
        lse_share = ((lse[some].double() - exact_lse).abs() / lse_bound).nan_to_num(nan=1e300)
        worst = max(worst, share.max().item(), lse_share.max().item())
    return worst
