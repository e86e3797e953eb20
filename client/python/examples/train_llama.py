"""Trains a small Llama on the text of Python's manual, tensor-parallel over all ranks of a torchrun launch.

On each of two nodes, whose mkerneld listens at $MKERNEL_SOCKET:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 2 --master-addr HOST --master-port PORT train_llama.py --curve loss.svg

Weights are float32 and the products bf16 (torch.autocast). Every rank reads the same text.
"""
import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from llama import Config, Llama

import mkernel
from mkernel.torch import finish_gradients


def draw(losses, path):
    """The loss curve as an SVG picture."""
    width, height, top = 640, 360, max(losses)
    points = " ".join(f"{40 + i * (width - 60) / max(1, len(losses) - 1):.1f},{height - 30 - y / top * (height - 60):.1f}" for i, y in enumerate(losses))
    labels = "".join(
        f'<text x="{x}" y="{y}" font-size="12">{text}</text>'
        for x, y, text in [(4, 34, f"{top:.1f}"), (4, height - 26, "0"), (width / 2, height - 8, "step"), (44, 16, "loss")]
    )
    with open(path, "w") as out:
        out.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
            f'<rect width="100%" height="100%" fill="white"/>{labels}'
            f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/></svg>'
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--curve", help="where the picture of the loss goes")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group = mkernel.init(dist.group.WORLD)
    torch.manual_seed(1 + group.rank)  # each rank's share of the split weights
    model = Llama(Config(width=128, hidden=384, layers=2))
    for parameter in model.parameters():  # what is not split begins alike
        if getattr(parameter, "sequence_parallel", False):
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    random, losses = torch.Generator().manual_seed(0), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - options.sequence - 1, (options.batch,), generator=random)
        window = torch.stack([text[i : i + options.sequence + 1] for i in starts], 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(window[:-1], window[1:])
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        if group.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    if group.rank == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} steps on {group!r}", flush=True)
        if options.curve:
            draw(losses, options.curve)
    mkernel.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
