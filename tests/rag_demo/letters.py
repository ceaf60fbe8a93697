"""A stand-in for EmbeddingModel that compares letters: the commands run in the test's process."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from rag_demo.encoding.model_identity import ModelIdentity

__all__ = ["Letters", "letters"]


class Letters:
    """Stands in for EmbeddingModel: counts letters, and how many texts it was given."""

    embedded = 0
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self.name = name or "letters"
        self.dimension = 128
        self.identity = ModelIdentity(self.name, options.get("dtype"))
        Letters.options = options

    def __enter__(self) -> Letters:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    close = __exit__

    def embed_documents(self, texts: list[str]) -> Any:
        Letters.embedded += len(texts)
        counts = [np.bincount([min(ord(c), 127) for c in text], minlength=128) for text in texts]
        return np.asarray(counts, np.float32) + 1e-3

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    import rag_demo.embedding_model

    monkeypatch.setattr(rag_demo.embedding_model, "EmbeddingModel", Letters)
    monkeypatch.setattr(Letters, "embedded", 0)
