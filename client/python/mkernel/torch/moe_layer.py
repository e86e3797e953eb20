"""A layer of experts that are dealt out over a group, by MoE Dispatch+GEMM and GEMM+Combine."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import moe as base
from ..group import GroupLike, get_group
from .layers import autocast_dtype
from .moe import gemm_combine, moe_dispatch_gemm
from .sequence_parallel import mark_sequence_parallel
from .shards import local_of


class MoELayer(nn.Module):
    """A router, and experts of the form down(silu(gate(x)) up(x)), dealt out over the group: Mixtral's block.

    x is [tokens of this rank, hidden], as many on every rank. The router is the same on all ranks, and its gradient of this rank's tokens, until
    `finish_gradients`. Every rank initialises its own experts, so seed each rank differently.
    """

    #: By parameter, the dimension that is split over the group (shards.py).
    shard_dims = {"gate_up": 0, "down": 0}

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, *, group: GroupLike = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        chosen = get_group(group)
        self.group, self.experts_total, self.top_k = chosen.name, experts, top_k
        count = base.experts_of_rank(chosen, experts)[1]
        self.router = nn.Linear(hidden, experts, bias=False, device=device, dtype=dtype)
        self.gate_up = nn.Parameter(torch.empty(count, hidden, 2 * intermediate, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, intermediate, hidden, device=device, dtype=dtype))
        with torch.no_grad():
            self.gate_up.uniform_(-1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
            self.down.uniform_(-1 / math.sqrt(intermediate), 1 / math.sqrt(intermediate))
        mark_sequence_parallel(self.router, group=chosen)

    def extra_repr(self) -> str:
        return f"experts={self.experts_total}, top_k={self.top_k}, on this rank {self.gate_up.shape[0]}"

    def choose(self, probabilities: Tensor) -> Tensor:
        """The experts of each token, [count, top_k]; another choice may override it."""
        return probabilities.topk(self.top_k, -1)[1]

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tensor:
        probabilities = self.router(x).float().softmax(-1)
        ids = self.choose(probabilities)
        weights = probabilities.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        dtype = autocast_dtype(x)
        routed = moe_dispatch_gemm(x.to(dtype), ids, weights, local_of(self.gate_up).to(dtype), experts_total=self.experts_total, group=self.group)
        gate, up = routed.y.chunk(2, -1)
        residual = None if residual is None else residual.to(dtype)
        return gemm_combine(nn.functional.silu(gate) * up, routed, local_of(self.down).to(dtype), residual=residual, group=self.group)
