"""An analysis inside a training script, on the batches that the loop really has.

fusescout analyze --effort quick examples/training_loop.py --steps 3
python examples/training_loop.py --steps 3
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fusescout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(options.width, 4 * options.width),
        nn.GELU(approximate="tanh"),
        nn.Linear(4 * options.width, options.width),
        nn.LayerNorm(options.width),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with fusescout.profile(model, loss=lambda out: out.square().mean(), effort="quick", top=2, rounds=6) as scout:
        for _ in range(options.steps):
            optimizer.zero_grad()
            model(torch.randn(512, options.width)).square().mean().backward()
            optimizer.step()
            scout.step()
    print(scout.session.verdict)


if __name__ == "__main__":
    main()
