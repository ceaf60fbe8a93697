"""The interface of loaded models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from rag_demo.vectors import Vectors

Kind = Literal["query", "document"]
Prepared = TypeVar("Prepared")


class Encoder(Protocol[Prepared]):
    """A loaded model. One thread encodes at a time."""

    @property
    def dimension(self) -> int:
        """Length of the vectors."""

    def prepare(self, texts: Sequence[str], kind: Kind) -> Prepared:
        """Prepare texts for `encode`, for example make tokens."""

    def encode(self, prepared: Prepared, batch_size: int, /) -> Vectors:
        """Embed prepared texts.

        Args:
            prepared: What `prepare` returned for n texts.
            batch_size: About how many texts to compute at once.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
