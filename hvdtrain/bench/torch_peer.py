"""Times PyTorch's DistributedDataParallel on the networks of `networks.py`, one core for each process over Gloo."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from hvdtrain.bench.measurement import take_core
from hvdtrain.bench.turns import Training, serve

TOKENS, VOCABULARY = 64, 256
"""As in networks.py, which imports Keras."""


def build(way: str, name: str, batch_size: int) -> Training:
    """Build what one process of those that torchrun has started trains; see `scaling.build`. There is one way."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    take_core(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = DistributedDataParallel(networks()[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    torch.manual_seed(rank)
    x, y = examples(name, batch_size)

    def step() -> float:
        optimizer.zero_grad()
        outputs = model(x)
        loss = loss_of(outputs.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Training(step, rank, batch_size * size)


def examples(name: str, count: int) -> tuple[Any, Any]:
    """Return `count` random examples, of the shapes and kinds of `networks.examples`; images have channels first."""
    import torch

    if name == "transformer":
        x = torch.randint(VOCABULARY, (count, TOKENS))
        return x, x.roll(-1, dims=1)
    shapes = {"mnist": (1, 28, 28), "resnet20": (3, 32, 32), "resnet50": (3, 224, 224)}
    return torch.rand(count, *shapes.get(name, (784,))), torch.randint(10, (count,))


def networks() -> dict[str, Callable[[], Any]]:
    """Return functions that build the networks of `networks.py` in PyTorch, by name."""
    from torch import nn

    def mnist() -> nn.Module:
        convolution = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(
            *convolution, nn.Linear(32 * 13 * 13, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def mlp(depth: int = 6) -> nn.Module:
        widths = [784, *[2048] * depth]
        hidden = (
            layer
            for before, after in itertools.pairwise(widths)
            for layer in (nn.Linear(before, after), nn.ReLU())
        )
        return nn.Sequential(*hidden, nn.Linear(2048, 10))

    def convolve(before: int, after: int, size: int, stride: int, bias: bool) -> nn.Module:
        convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=bias)
        return nn.Sequential(convolution, nn.BatchNorm2d(after))

    class Block(nn.Module):
        def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
            super().__init__()
            self.residual, self.shortcut = residual, shortcut

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.shortcut(x) + self.residual(x))

    def basic(before: int, after: int, stride: int) -> nn.Module:
        first = convolve(before, after, 3, stride, False)
        same = stride == 1
        return Block(
            nn.Sequential(first, nn.ReLU(), convolve(after, after, 3, 1, False)),
            nn.Identity() if same else convolve(before, after, 1, stride, False),
        )

    def resnet20() -> nn.Module:
        blocks = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2
        blocks += [(32, 64, 2)] + [(64, 64, 1)] * 2
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        return nn.Sequential(
            convolve(3, 16, 3, 1, False), nn.ReLU(), *(basic(*one) for one in blocks), *head
        )

    def bottleneck(before: int, inner: int, stride: int, first: bool) -> nn.Module:
        # Keras's: the stride is that of the first convolution, and convolutions have biases.
        residual = nn.Sequential(
            convolve(before, inner, 1, stride, True),
            nn.ReLU(),
            convolve(inner, inner, 3, 1, True),
            nn.ReLU(),
            convolve(inner, 4 * inner, 1, 1, True),
        )
        shortcut = convolve(before, 4 * inner, 1, stride, True) if first else nn.Identity()
        return Block(residual, shortcut)

    def resnet50() -> nn.Module:
        body = [convolve(3, 64, 7, 2, True), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        before = 64
        for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                body.append(bottleneck(before, inner, 1 if number else stride, first=number == 0))
                before = 4 * inner
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 10))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 384)
            self.convolution = nn.Conv1d(384, 384, 3)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    384, 6, 4 * 384, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(6)
            )
            self.head = nn.Linear(384, VOCABULARY)
            mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens).transpose(1, 2)
            x = self.convolution(nn.functional.pad(x, (2, 0))).transpose(1, 2)
            for block in self.blocks:
                x = block(x, src_mask=self.mask, is_causal=True)
            return self.head(x)

    return {
        "mnist": mnist,
        "mlp": mlp,
        "mlp-100m": lambda: mlp(25),
        "resnet20": resnet20,
        "resnet50": resnet50,
        "transformer": Transformer,
    }


if __name__ == "__main__":
    serve(build)
