"""An ensemble of two classifiers on one shared backbone; one of them is retired."""

import sys

import torch
from torch import nn

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import SafePyTorchCleanup, release

closed: list[str] = []
dropped: list[int] = []


class Head(nn.Linear):
    def __del__(self) -> None:
        dropped.append(self.out_features)


class Classifier(nn.Module):
    def __init__(self, name: str, backbone: nn.Module, size: int) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self.head = Head(512, size)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(features))

    def close(self) -> None:
        closed.append(self.name)


def main() -> None:
    torch.manual_seed(0)
    settle()
    backbone = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    features = torch.rand(4, 512)
    before = anonymous_mb()
    large, small = Classifier("large", backbone, 40_000), Classifier("small", backbone, 10)
    expected = small(features).detach().clone()
    heads = Storages(large.head.parameters())

    if sys.argv[1] == "release":
        release(large)
    else:
        with SafePyTorchCleanup() as scope:
            scope.manage(large)

    answer = small(features)
    tell(
        head_alive_mb=heads.alive_mb(),
        grown_mb=anonymous_mb() - before,
        closed=closed,
        dropped=dropped,
        is_right=bool(torch.equal(answer, expected)),
        trains=bool(answer.sum().backward() or backbone[0].weight.grad is not None),
    )


if __name__ == "__main__":
    main()
