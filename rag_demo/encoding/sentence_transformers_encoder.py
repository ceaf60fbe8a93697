"""An encoder for any model that sentence-transformers can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rag_demo.encoding.encoder import Kind
from rag_demo.errors import ModelError, required
from rag_demo.vectors import Vectors

_CHARS_PER_TOKEN = 512  # at most, in any ordinary text


class SentenceTransformersEncoder(nn.Module):
    """An `Encoder` that calls a sentence-transformers model.

    Args:
        path: A folder, or a name on the hub.
        device: torch's name of the device.
        dtype: torch's dtype of the weights.
        trust_remote_code: Whether to run code that comes with the model.
        prompts: Prompts by kind that replace the model's own.

    Raises:
        ModelError: sentence-transformers is missing, or cannot load the model.
    """

    def __init__(
        self,
        path: str,
        device: str,
        dtype: Any,
        trust_remote_code: bool,
        prompts: Mapping[str, str],
    ) -> None:
        super().__init__()
        with required("this model", ModelError, "rag"):
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging
        logging.disable_progress_bar()  # It would be drawn on stderr.
        self.model = SentenceTransformer(
            path,
            device=device,
            local_files_only=Path(path).exists(),
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": dtype},
        )
        self.model.prompts.update(prompts)
        self.eval()

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        return int(self.model.get_embedding_dimension())

    @property
    def max_tokens(self) -> int | None:
        """How many tokens of a text the model reads; None if that is unknown."""
        most: int | None = self.model.max_seq_length
        return most

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int] | None:
        """Count the tokens of texts before they are cut off. None if the tokenizer is unusual."""
        prompt = self.model.prompts.get(kind) or ""
        try:
            tokens = self.model.tokenizer([prompt + text for text in texts], verbose=False)
            return [len(ids) for ids in tokens["input_ids"]]
        except (AttributeError, KeyError, TypeError):
            return None

    def prepare(self, texts: Sequence[str], kind: Kind) -> tuple[Kind, list[str]]:
        """Return the texts for `encode`."""
        return kind, list(texts)

    def encode(self, prepared: tuple[Kind, list[str]], batch_size: int) -> Vectors:
        """Embed texts as "query" or "document": shape (n, d), float32, of length 1."""
        kind, texts = prepared
        encode: Any = getattr(self.model, f"encode_{kind}")
        # Do not tokenise characters that the model cannot read.
        limit = self.model.max_seq_length
        most = None if limit is None else _CHARS_PER_TOKEN * limit
        vectors: Vectors = encode(
            [text[:most] for text in texts],
            batch_size=batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        ).astype("float32", copy=False)
        return vectors
