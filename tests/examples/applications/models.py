"""Two models on one table of embeddings, for programs of this folder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Ranker(nn.Module):
    """A model of 63 MB of its own; its `close()` calls a function."""

    def __init__(self, embeddings: nn.Embedding, on_close: Callable[[], None]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(15)))
        self._on_close = on_close

    @torch.inference_mode()
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embeddings(words).mean(0))

    def close(self) -> None:
        self._on_close()


class Tagger(nn.Module):
    """A small model that stays."""

    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.head = nn.Linear(1024, 8)

    @torch.inference_mode()
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embeddings(words))
