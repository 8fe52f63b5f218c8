"""A small residual conv net: convolution, batch norm, activation, the chain that vision models are made of.

fusescout analyze examples/conv_net.py
"""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(y)) + x)


class ConvNet(nn.Module):
    """Images float[batch, 3, height, width] to logits float[batch, classes]."""

    def __init__(self, width: int = 64, blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def get_model() -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    for module in model.modules():  # running statistics of a trained net are not 0 and 1
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def get_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 3, 112, 112, generator=torch.Generator().manual_seed(0)),)


def main() -> None:
    with torch.no_grad():
        print(tuple(get_model().eval()(*get_inputs()).shape))


if __name__ == "__main__":
    main()
