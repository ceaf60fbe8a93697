"""Encoder: what turns texts into vectors, and the choice of the one for a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rag_demo.errors import ModelError
from rag_demo.vectors import Vectors

__all__ = ["Encoder", "Kind", "load_encoder"]

Kind = Literal["query", "document"]
Prepared = TypeVar("Prepared")

log = logging.getLogger("rag_demo")


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

    def encode(self, prepared: Prepared, batch_size: int, /, *, many: bool = False) -> Vectors:
        """Embed what `prepare` made: shape (n, d), float32, each row of length 1.

        Args:
            prepared: Of n texts.
            batch_size: Texts that are computed at once, about.
            many: Whether to compute in the way that is fastest for many texts, or for few.
        """


def load_encoder(
    path: str, *, name: str, device: str, dtype: str, trust_remote_code: bool = False
) -> Encoder[Any]:
    """Load the encoder that needs no padding where it can be, else the model's own way.

    Args:
        path: A folder, or a name on the hub.
        name: What errors call it.
        device: torch's name of the device.
        dtype: Of the weights: torch's name of the type.
        trust_remote_code: Run code that comes with the model.

    Raises:
        ModelError: It cannot be loaded.
    """
    import torch

    try:
        if Path(path).is_dir() and not trust_remote_code:
            from rag_demo.encoding.bert_encoder import BertEncoder
            from rag_demo.encoding.bert_settings import UnsupportedModelError, read_settings

            try:
                return BertEncoder(read_settings(Path(path)), device, getattr(torch, dtype))
            except UnsupportedModelError as why:
                log.debug("%s is run by sentence-transformers: %s", name, why)
        from rag_demo.encoding.sentence_transformers_encoder import SentenceTransformersEncoder

        return SentenceTransformersEncoder(path, device, getattr(torch, dtype), trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        # The libraries that read a model's files raise what they like at a damaged one.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(f"the model {name!r} cannot be loaded: {reason}") from error
