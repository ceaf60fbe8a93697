"""A classifier that a service keeps open; the code under test."""

from pathlib import Path

import torch
from torch import nn

from torch_utils import Resource, release


class Classifier(Resource):
    """Label texts by shared embeddings and layers of its own.

    Args:
        journal: A file to which each release appends a line.
    """

    def __init__(self, embeddings: nn.Embedding, journal: Path) -> None:
        self.embeddings = embeddings
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
        self.journal = journal

    @torch.inference_mode()
    def label(self, words: list[int]) -> int:
        self.ensure_open()
        return int(self.layers(self.embeddings(torch.tensor(words)).mean(0)).argmax())

    def _release(self) -> None:
        release(self.layers)
        with self.journal.open("a") as file:
            file.write("released\n")
