"""A Llama-shaped transformer, tensor-parallel with sequence parallelism on the fused operators.

Between the blocks each rank has its part of the sequence. Queries, keys and values, and the two products before the
activation, are AllGather+GEMM; the products after attention and activation are GEMM+ReduceScatter. Norms, embedding and
the last layer are the same on all ranks and see a part of the sequence, so `finish_gradients` sums their gradients.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import mkernel
from mkernel.torch import ColumnParallelLinear, RowParallelLinear, mark_sequence_parallel


@dataclass
class Config:
    vocabulary: int = 256
    width: int = 128
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    key_heads: int = 4
    theta: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head(self):
        return self.width // self.heads


class Norm(nn.Module):
    """Its weight stays in float32, as do its sums: the ranks' parts of its gradient are then added unrounded."""

    def __init__(self, config):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(config.width)), config.epsilon

    def forward(self, x):
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)
        return (self.weight * normal.float()).to(x.dtype)

    def _apply(self, *arguments, **more):
        super()._apply(*arguments, **more)
        self.weight.data = self.weight.data.float()
        return self


def rotate(x, angles):
    """Rotary positions; x is [sequence, batch, heads, head]."""
    cos, sin = angles.cos().to(x.dtype)[:, None, None], angles.sin().to(x.dtype)[:, None, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    def __init__(self, config, ranks):
        super().__init__()
        self.config, self.queries, self.keys = config, config.heads // ranks, config.key_heads // ranks
        everything = (config.heads + 2 * config.key_heads) * config.head
        split = dict(bias=False, sequence_parallel=True)
        self.norm1, self.norm2 = Norm(config), Norm(config)
        self.qkv = ColumnParallelLinear(config.width, everything, **split)
        self.out = RowParallelLinear(config.heads * config.head, config.width, **split)
        self.gate_up = ColumnParallelLinear(config.width, 2 * config.hidden, **split)
        self.down = RowParallelLinear(config.hidden, config.width, **split)

    def forward(self, x, angles):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.config.head))  # the whole sequence, this rank's heads
        q, k, v = qkv.split((self.queries, self.keys, self.keys), 2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, angles), rotate(k, angles), v))
        k, v = (t.repeat_interleave(self.queries // self.keys, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.out(attended)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.group, self.config = mkernel.get_group(), config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, self.group.world) for _ in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        mark_sequence_parallel(self.embedding, self.norm, self.head)
        for block in self.blocks:
            mark_sequence_parallel(block.norm1, block.norm2)

    def forward(self, tokens, targets):
        """The sum of this rank's losses, over the count of all; both arguments are [sequence, batch], whole."""
        first, count = self.group.rows(tokens.shape[0])
        mine = slice(first, first + count)
        x = self.embedding(tokens[mine])
        exponents = torch.arange(0, self.config.head, 2, dtype=torch.float32) / self.config.head
        angles = torch.arange(tokens.shape[0])[:, None] * self.config.theta**-exponents
        angles = torch.cat((angles, angles), -1)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten(), reduction="sum") / targets.numel()
