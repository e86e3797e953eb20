"""A Llama-shaped transformer, tensor-parallel with sequence parallelism on the fused operators.

Between the blocks each rank has its part of the sequence. Queries, keys and values, and the two products before the
activation, are AllGather+GEMM; the products after attention and activation are GEMM+ReduceScatter. Norms, embedding and
the last layer are the same on all ranks and see a part of the sequence, so `finish_gradients` sums their gradients.

The rows of a fused weight lie so that any number of ranks may share them: the queries, the key and the value of a key head stand together, and
a row of the gate stands beside its row of the up projection. `from_hugging_face` makes them of a checkpoint's.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
        self.config = config
        if config.key_heads % ranks != 0:
            raise ValueError(f"{config.key_heads} key heads do not divide over {ranks} ranks")
        everything = (config.heads + 2 * config.key_heads) * config.head
        split = dict(bias=False, sequence_parallel=True)
        self.norm1, self.norm2 = Norm(config), Norm(config)
        self.qkv = ColumnParallelLinear(config.width, everything, **split)
        self.out = RowParallelLinear(config.heads * config.head, config.width, **split)
        self.gate_up = ColumnParallelLinear(config.width, 2 * config.hidden, **split)
        self.down = RowParallelLinear(config.hidden, config.width, **split)

    def forward(self, x, angles):
        shape = (-1, self.config.heads // self.config.key_heads + 2, self.config.head)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, shape)  # the whole sequence, this rank's key heads, each with its queries
        q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, angles), rotate(k, angles), v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.out(attended)
        gate, up = self.gate_up(self.norm2(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, config, recompute=False):
        """With `recompute`, a block keeps its input only, and the backward pass computes it again."""
        super().__init__()
        self.group, self.config, self.recompute = mkernel.get_group(), config, recompute
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
        exponents = torch.arange(0, self.config.head, 2, dtype=torch.float32, device=tokens.device) / self.config.head
        angles = torch.arange(tokens.shape[0], device=tokens.device)[:, None] * self.config.theta**-exponents
        angles = torch.cat((angles, angles), -1)
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=False) if self.recompute else block(x, angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten(), reduction="sum") / targets.numel()


def from_hugging_face(theirs, config):
    """The whole weights, under our names, of tensors under the names of `transformers`: a dictionary, or what reads one name at a time."""
    group = config.heads // config.key_heads
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"], "head.weight": theirs["lm_head.weight"]}
    for layer in range(config.layers):
        their, our = f"model.layers.{layer}.", f"blocks.{layer}."
        q, k, v = (theirs[f"{their}self_attn.{x}_proj.weight"].unflatten(0, (config.key_heads, -1, config.head)) for x in "qkv")
        assert (q.shape[1], k.shape[1]) == (group, 1)
        gate, up = (theirs[f"{their}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        ours[our + "norm1.weight"] = theirs[their + "input_layernorm.weight"]
        ours[our + "norm2.weight"] = theirs[their + "post_attention_layernorm.weight"]
        ours[our + "qkv.weight"] = torch.cat((q, k, v), 1).flatten(0, 2)
        ours[our + "out.weight"] = theirs[their + "self_attn.o_proj.weight"]
        ours[our + "gate_up.weight"] = torch.stack((gate, up), 1).flatten(0, 1)
        ours[our + "down.weight"] = theirs[their + "mlp.down_proj.weight"]
    return ours
