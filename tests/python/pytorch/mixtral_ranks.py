"""A rank of the Mixtral-shaped model with context and expert parallelism, against `transformers` in one process."""
import pathlib
import sys

import torch
from llama_ranks import loss_of

import mkernel
from mkernel.torch import finish_gradients

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client/python/examples"))
import mixtral  # noqa: E402


def independent_model(config, dtype):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            head_dim=config.head,
            num_local_experts=config.experts,
            num_experts_per_tok=config.top_k,
            rms_norm_eps=config.epsilon,
            rope_theta=config.theta,
            sliding_window=None,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).to(dtype)


def share(whole, group, config):
    """This rank's share, under our names, of tensors that are whole, under theirs."""
    mine = {"embedding.weight": whole["model.embed_tokens.weight"], "norm.weight": whole["model.norm.weight"], "head.weight": whole["lm_head.weight"]}
    first = group.rank * config.experts // group.world
    own = range(first, (group.rank + 1) * config.experts // group.world)
    for layer in range(config.layers):
        their, our = f"model.layers.{layer}.", f"blocks.{layer}."
        moe = their + "block_sparse_moe."
        mine[our + "norm1.weight"] = whole[their + "input_layernorm.weight"]
        mine[our + "norm2.weight"] = whole[their + "post_attention_layernorm.weight"]
        mine[our + "qkv.weight"] = torch.cat([whole[f"{their}self_attn.{x}_proj.weight"] for x in "qkv"])
        mine[our + "out.weight"] = whole[their + "self_attn.o_proj.weight"]
        mine[our + "experts.router.weight"] = whole[moe + "gate.weight"]
        mine[our + "experts.gate_up"] = torch.stack(
            [torch.cat([whole[f"{moe}experts.{e}.w1.weight"], whole[f"{moe}experts.{e}.w3.weight"]]).t() for e in own]
        )
        mine[our + "experts.down"] = torch.stack([whole[f"{moe}experts.{e}.w2.weight"].t() for e in own])
    return mine


class Choice:
    """The experts that float64 chooses, for all models: a token at the edge between two would else decide the comparison."""

    def __init__(self):
        self.kept, self.turn, self.plain = [], None, torch.topk

    def __call__(self, probabilities, count, dim=-1, **more):
        if self.turn is None:
            found = self.plain(probabilities, count, dim=dim, **more)
            self.kept.append(found[1])
            return found
        ids = self.kept[self.turn]
        self.turn += 1
        return probabilities.gather(-1, ids), ids


def train(steps):
    """[(loss, loss of float64, {parameter: (our error, the error of bf16 in one process)})] of each step."""
    torch.set_num_threads(1)
    group = mkernel.init()
    config = mixtral.Config()
    exact = independent_model(config, torch.bfloat16).to(torch.float64)
    rounded = independent_model(config, torch.bfloat16)
    ours = mixtral.Mixtral(config).bfloat16()
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    text = torch.randint(0, config.vocabulary, (65, 2), generator=torch.Generator().manual_seed(11))
    rows = torch.from_numpy(mkernel.sequence_rows(64, causal=True))
    seen = []
    for _ in range(steps):
        with torch.no_grad():  # the three begin each step with the same weights
            for parameter in exact.parameters():
                parameter.copy_(parameter.bfloat16())
        rounded.load_state_dict(exact.state_dict())
        ours.load_state_dict(share(exact.state_dict(), group, config))
        choice = torch.topk = Choice()
        losses = []
        for model in (exact, rounded):
            model.zero_grad()
            loss = loss_of(model, text[:-1], text[1:])
            loss.backward()
            losses.append(float(loss.detach()))
            choice.turn = 0
        torch.topk = choice.plain
        for block, ids in zip(ours.blocks, choice.kept):  # theirs are [batch, sequence], ours [rows, batch]
            mine = ids.view(2, 64, -1)[:, rows].transpose(0, 1).flatten(0, 1)
            block.experts.choose = lambda _, mine=mine: mine
        ours.zero_grad()
        loss = ours(text[:-1], text[1:])
        loss.backward()
        finish_gradients(ours)
        errors = {}
        right, near = (share({name: p.grad for name, p in model.named_parameters()}, group, config) for model in (exact, rounded))
        for name, parameter in ours.named_parameters():
            squares = torch.stack(
                [(parameter.grad.double() - right[name]).square().sum(), (near[name].double() - right[name]).square().sum(), right[name].square().sum()]
            )
            if not getattr(parameter, "sequence_parallel", False):
                squares = torch.from_numpy(group.sum_f32(squares.float().numpy()))
            errors[name] = (float((squares[0] / squares[2]).sqrt()), float((squares[1] / squares[2]).sqrt()))
        seen.append((float(group.sum_f32([float(loss.detach())])[0]), losses[0], errors))
        optimizer.step()
    return seen
