"""What loaded models have in common, and the one that sentence-transformers runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rag_demo.errors import ModelError, required
from rag_demo.vectors import Vectors

Kind = Literal["query", "document"]
CHARS_PER_TOKEN = 512  # at most, in any ordinary text


@contextlib.contextmanager
def loading(what: str, hint: str) -> Iterator[None]:
    """Turn any error of a block that loads a model into a `ModelError` of one line.

    Args:
        what: The model, for the message.
        hint: What to do.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # The libraries raise many types of errors for a damaged model.
        reason = str(error).strip().partition("\n")[0] or repr(error)
        raise ModelError(f"{what} cannot be loaded: {reason}; {hint}") from error


def sentence_transformers() -> Any:
    """Import sentence-transformers, without progress bars.

    Raises:
        ModelError: It is not installed.
    """
    with required("this model", ModelError, "rag"):
        import sentence_transformers
        from transformers.utils import logging
    logging.disable_progress_bar()  # It would be drawn on stderr.
    return sentence_transformers


class SentenceTransformersEncoder:
    """Any model that sentence-transformers can run. One thread encodes at a time.

    Args:
        path: A folder, or a name on the hub.
        device: torch's name of the device.
        dtype: torch's dtype of the weights.
        prompts: Prompts by kind that replace the model's own.
        options: Other options of sentence-transformers.

    Attributes:
        dimension: Length of the vectors.
        max_tokens: How many tokens of a text the model reads; None if that is unknown.
    """

    def __init__(
        self, path: str, device: str, dtype: Any, prompts: Mapping[str, str], **options: Any
    ) -> None:
        self.model = sentence_transformers().SentenceTransformer(
            path,
            device=device,
            local_files_only=Path(path).exists(),
            model_kwargs={"dtype": dtype},
            **options,
        )
        self.model.prompts.update(prompts)
        self.dimension = int(self.model.get_embedding_dimension())
        self.max_tokens: int | None = self.model.max_seq_length

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int] | None:
        """Count the tokens of texts before they are cut off. None if the tokenizer is unusual."""
        prompt = self.model.prompts.get(kind) or ""
        try:
            tokens = self.model.tokenizer([prompt + text for text in texts], verbose=False)
            return [len(ids) for ids in tokens["input_ids"]]
        except (AttributeError, KeyError, TypeError):
            return None

    def encode(self, texts: Sequence[str], kind: Kind, batch_size: int) -> Vectors:
        """Embed texts as "query" or "document": shape (n, d), float32, of length 1."""
        # Do not tokenise characters that the model cannot read.
        most = None if self.max_tokens is None else CHARS_PER_TOKEN * self.max_tokens
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        vectors: Vectors = encode(
            [text[:most] for text in texts],
            batch_size=batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        ).astype("float32", copy=False)
        return vectors


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
