"""Encoder: what turns texts into vectors, whichever way that is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from rag_demo.vectors import Vectors

__all__ = ["Encoder", "Kind"]

Kind = Literal["query", "document"]
Prepared = TypeVar("Prepared")


class Encoder(Protocol[Prepared]):
    """A loaded model, in this process or in others. One thread encodes at a time."""

    @property
    def dimension(self) -> int:
        """Length of the vectors."""

    @property
    def truncated(self) -> int:
        """How many texts were cut off so far; 0 where the model does not tell."""

    def prepare(self, texts: Sequence[str], kind: Kind) -> Prepared:
        """Do what comes before the model: tokens, for most. Any thread may do so."""

    def encode(self, prepared: Prepared, batch_size: int, /) -> Vectors:
        """Embed what `prepare` made: shape (n, d), float32, each row of length 1.

        Args:
            prepared: Of n texts.
            batch_size: Texts that are computed at once, about.
        """
