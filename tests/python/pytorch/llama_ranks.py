"""A rank of the Llama-shaped model in TP=4, against `transformers` in one process."""
import pathlib
import sys

import torch

import mkernel
from mkernel.torch import finish_gradients

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client/python/examples"))
import llama  # noqa: E402


def independent_model(config, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            rms_norm_eps=config.epsilon,
            rope_theta=config.theta,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).to(dtype)


def share(whole, model):
    """This rank's share, under our names, of tensors that are whole, under theirs."""
    mine = llama.from_hugging_face(whole, model.config)
    for name, module in model.named_modules():
        for parameter, dim in getattr(module, "shard_dims", {}).items():
            if (of := f"{name}.{parameter}") in mine:
                mine[of] = mine[of].chunk(model.group.world, dim)[model.group.rank]
    return mine


def loss_of(model, tokens, targets):
    logits = model(tokens.t()).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten())


def train(steps, spoil=None, layers=2):
    """[(loss, loss of float64, {parameter: (our error, the error of bf16 in one process)})] of each step."""
    torch.set_num_threads(1)
    group = mkernel.init()
    config = llama.Config(layers=layers)
    if spoil is not None:
        right = getattr(mkernel.gradients, spoil)

        def wrong(ops, *arguments, **more):
            da, db = right(ops, *arguments, **more)
            return da, None if db is None else db.roll(1, 0)

        setattr(mkernel.gradients, spoil, wrong)
    exact = independent_model(config, torch.bfloat16).to(torch.float64)
    rounded = independent_model(config, torch.bfloat16)
    ours = llama.Llama(config).bfloat16()
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(11)
    text = torch.randint(0, config.vocabulary, (65, 2), generator=random)
    seen = []
    for _ in range(steps):
        with torch.no_grad():  # the three begin each step with the same weights
            for parameter in exact.parameters():
                parameter.copy_(parameter.bfloat16())
        rounded.load_state_dict(exact.state_dict())
        ours.load_state_dict(share(exact.state_dict(), ours))
        losses = []
        for model, run in ((exact, loss_of), (rounded, loss_of), (ours, type(ours).__call__)):
            model.zero_grad()
            loss = run(model, text[:-1], text[1:])
            loss.backward()
            losses.append(float(loss.detach()))
        finish_gradients(ours)
        errors = {}
        right, near = (share({name: p.grad for name, p in model.named_parameters()}, ours) for model in (exact, rounded))
        for name, parameter in ours.named_parameters():
            squares = torch.stack(
                [(parameter.grad.double() - right[name]).square().sum(), (near[name].double() - right[name]).square().sum(), right[name].square().sum()]
            )
            if not getattr(parameter, "sequence_parallel", False):
                squares = torch.from_numpy(group.sum_f32(squares.float().numpy()))
            errors[name] = (float((squares[0] / squares[2]).sqrt()), float((squares[1] / squares[2]).sqrt()))
        seen.append((float(group.sum_f32([losses[2]])[0]), losses[0], errors))
        optimizer.step()
    return seen
