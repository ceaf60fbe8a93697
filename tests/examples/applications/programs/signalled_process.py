"""Embed a file with a model in a process of its own until a signal comes: ... FILE.

A reranker stays in this process. A worker thread makes the call while the main thread waits.
"""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import ModelHost, SafePyTorchCleanup, exit_on_signals


class Embedder:
    """Embeds the lines of a file by the number of their letters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.words = nn.Embedding(100, 64)

    @torch.inference_mode()
    def embed_file(self, path: str) -> list[float]:
        with Path(path).open(encoding="utf-8") as file:
            lengths = [len(line.strip()) for line in file]
        return self.words(torch.tensor(lengths)).sum(1).tolist()


class Reranker(nn.Module):
    def __init__(self, stem: nn.Module, layers: int) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))

    @torch.inference_mode()
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(self.stem(features))

    def close(self) -> None:
        tell(closed=len(self.layers))


def answer(host: "ModelHost[Embedder]", path: str) -> None:
    with host.lease() as embedder:
        tell(answer=embedder.embed_file(path))


def main() -> None:
    exit_on_signals(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    torch.manual_seed(0)
    settle()
    stem = nn.Linear(64, 1024)
    small = Reranker(stem, 1)
    features = torch.rand(4, 64)
    expected = small(features)
    before = anonymous_mb()
    try:
        with (
            SafePyTorchCleanup() as scope,
            ModelHost(Embedder, isolation="process") as host,
            ThreadPoolExecutor(1) as workers,
        ):
            large = scope.manage(Reranker(stem, 15))
            weights = Storages(large.layers.parameters())
            host.load()
            try:
                workers.submit(answer, host, sys.argv[1]).result()
            except SystemExit:
                tell(is_stopping=True)
                raise
    finally:
        tell(
            state=host.status().state,
            alive_mb=weights.alive_mb(),
            grown_mb=anonymous_mb() - before,
            is_right=torch.equal(small(features), expected),
        )


if __name__ == "__main__":
    main()
