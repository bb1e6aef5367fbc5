"""Times PyTorch's DistributedDataParallel on the networks of `networks.py`, one core for each process over Gloo."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from hvdtrain.bench.measurement import report, take_core
from hvdtrain.bench.scaling import time_rounds


def time_torch(way: str, name: str, batch_size: int, rounds: int) -> dict[str, Any] | None:
    """Time one process of those that torchrun has started; see `scaling.time_training`.

    Args:
        way: Not used: there is one.
        name: Name of a network in `networks()`.
        batch_size: Number of examples per process.
        rounds: Number of timed rounds.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    take_core(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    build, shape = networks()[name]
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    torch.manual_seed(rank)
    x, y = torch.rand(batch_size, *shape), torch.randint(10, (batch_size,))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def same_everywhere(steps: int) -> int:
        least = torch.tensor(steps)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    times, loss = time_rounds(step, rounds, same_everywhere)
    torch.distributed.destroy_process_group()
    examples = batch_size * size
    return {"step_seconds": times, "examples": examples, "loss": loss} if rank == 0 else None


def networks() -> dict[str, tuple[Callable[[], Any], tuple[int, ...]]]:
    """Return the networks of `networks.py` in PyTorch: name -> function that builds it, and the shape of an example."""
    from torch import nn

    def mnist() -> nn.Module:
        convolution = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(
            *convolution, nn.Linear(32 * 13 * 13, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def mlp() -> nn.Module:
        widths = [784, *[2048] * 6]
        hidden = (
            layer
            for before, after in itertools.pairwise(widths)
            for layer in (nn.Linear(before, after), nn.ReLU())
        )
        return nn.Sequential(*hidden, nn.Linear(2048, 10))

    def convolve(before: int, after: int, size: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after))

    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            first = convolve(before, after, 3, stride)
            self.residual = nn.Sequential(first, nn.ReLU(), convolve(after, after, 3, 1))
            same = stride == 1
            self.shortcut = nn.Identity() if same else convolve(before, after, 1, stride)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.shortcut(x) + self.residual(x))

    def resnet20() -> nn.Module:
        blocks = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2
        blocks += [(32, 64, 2)] + [(64, 64, 1)] * 2
        body = (Block(*one) for one in blocks)
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        return nn.Sequential(convolve(3, 16, 3, 1), nn.ReLU(), *body, *head)

    return {
        "mnist": (mnist, (1, 28, 28)),
        "mlp": (mlp, (784,)),
        "resnet20": (resnet20, (3, 32, 32)),
    }


if __name__ == "__main__":
    report(time_torch)
