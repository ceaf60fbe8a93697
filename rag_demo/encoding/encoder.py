"""The interface of loaded models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, TypeVar

from rag_demo.vectors import Vectors

Kind = Literal["query", "document"]
Prepared = TypeVar("Prepared")


class Encoder(Protocol[Prepared]):
    """A loaded model. One thread encodes at a time."""

    @property
    def dimension(self) -> int:
        """Length of the vectors."""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens of a text the model reads; None if that is unknown."""

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int] | None:
        """Count the tokens of texts before they are cut off; None if that is unknown."""

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


def packed(rows: Sequence[int], size: Callable[[int], int], budget: int) -> Iterator[list[int]]:
    """Yield batches of rows with sizes of at most ``budget`` together, but at least one row."""
    batch: list[int] = []
    total = 0
    for row in rows:
        if batch and total + size(row) > budget:
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += size(row)
    if batch:
        yield batch
