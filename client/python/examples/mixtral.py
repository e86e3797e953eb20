"""A Mixtral-shaped transformer with context and expert parallelism over the same ranks.

Each rank has its rows of the sequence in all layers. Ring Attention brings it the keys and values of the others; the experts are dealt out, and
tokens go to the ranks that have theirs. All other weights are the same on all ranks, so `finish_gradients` sums their gradients.
"""
from dataclasses import dataclass

import torch
from llama import Norm, rotate
from torch import nn
from torch.nn import functional as F

import mkernel
from mkernel.torch import MoELayer, attention, mark_sequence_parallel


@dataclass
class Config:
    vocabulary: int = 256
    width: int = 128
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    key_heads: int = 1
    head: int = 64
    experts: int = 8
    top_k: int = 2
    theta: float = 10000.0
    epsilon: float = 1e-5


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.norm1, self.norm2 = Norm(config), Norm(config)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.key_heads) * config.head, bias=False)
        self.out = nn.Linear(config.heads * config.head, config.width, bias=False)
        self.experts = MoELayer(config.width, config.hidden, config.experts, config.top_k)
        mark_sequence_parallel(self.norm1, self.norm2, self.qkv, self.out)

    def forward(self, x, angles):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.config.head))
        q, k, v = qkv.split((self.config.heads, self.config.key_heads, self.config.key_heads), 2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, angles), rotate(k, angles), v))
        attended = attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        return self.experts(self.norm2(x).flatten(0, 1), residual=x.flatten(0, 1)).view_as(x)


class Mixtral(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        mark_sequence_parallel(self.embedding, self.norm, self.head)

    def forward(self, tokens, targets):
        """The sum of this rank's losses, over the count of all; both arguments are [sequence, batch], whole."""
        rows = torch.from_numpy(mkernel.sequence_rows(tokens.shape[0], causal=True))
        x = self.embedding(tokens[rows])
        exponents = torch.arange(0, self.config.head, 2, dtype=torch.float32) / self.config.head
        angles = rows[:, None] * self.config.theta**-exponents
        angles = torch.cat((angles, angles), -1)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), reduction="sum") / targets.numel()
