"""The models of a service: how they are loaded, and how they compute the inputs of jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rag_demo.encoding.embedder import embed_documents, embed_queries, identity_of
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelMismatchError
from rag_demo.reranker import Reranker

LoadModel = Callable[[], Any]
_BYTES_PER_TOKEN, _SPECIAL_TOKENS = 3, 2


def load_model(name: str | None, options: Mapping[str, Any]) -> Any:
    """Load the embedding model. The host calls this in the process of the model."""
    from rag_demo.embedding_model import EmbeddingModel

    model = EmbeddingModel(name, **options)
    return _used(model, lambda: model.embed_queries(["warm up"]))


def load_checked(load: LoadModel, made_by: ModelIdentity) -> Any:
    """Load an embedding model, and check that it made the index: its files may have changed."""
    model = load()
    identity = identity_of(model)
    if not made_by.is_same(identity):
        getattr(model, "close", bool)()
        raise ModelMismatchError(f"the index was made with {made_by}, not {identity}")
    return model


class LogitReranker(Reranker):
    """A `Reranker` that gives logits, whatever activation its model has, and counts tokens."""

    def score_and_count(self, query: str, texts: Sequence[str]) -> tuple[list[float], list[int]]:
        """Return the logit and the number of tokens of each pair, before it is cut off."""
        import torch

        with self._in_use:
            self.ensure_open()
            encoder = self._model()
            encoder.activation_fn = torch.nn.Identity()
            pairs = encoder.tokenizer([query] * len(texts), list(texts), truncation=False)
            self.max_tokens = int(encoder.max_seq_length or encoder.tokenizer.model_max_length)
            return self.score(query, texts).tolist(), list(map(len, pairs["input_ids"]))


def load_reranker(name: str, device: str | None, trust_remote_code: bool) -> Any:
    """Load the reranker. The host calls this in the process of the model."""
    reranker = LogitReranker(name, device=device, trust_remote_code=trust_remote_code)
    return _used(reranker, lambda: reranker.score_and_count("warm", ["up"]))


def _used(model: Any, use: Callable[[], object]) -> Any:
    """Use a model once, so that it is loaded; close it after an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(model)
        use()
        stack.pop_all()
    return model


def estimate(texts: Sequence[str], most: int | None = None) -> list[int]:
    """Return about how many tokens texts have: one for three bytes, and at most ``most``."""
    sizes = (len(text.encode("utf-8", "replace")) for text in texts)
    counts = (_SPECIAL_TOKENS + size // _BYTES_PER_TOKEN for size in sizes)
    return list(counts) if most is None else [min(count, most) for count in counts]


def embed(kind: str, model: Any, texts: Sequence[str]) -> list[tuple[Any, int]]:
    """Return the vector and the number of tokens of each text; 0 if the model cannot count."""
    vectors = (embed_queries if kind == "query" else embed_documents)(model, texts)
    count = getattr(model, "count_tokens", None)
    counts = (count and count(list(texts), kind)) or [0] * len(texts)
    return list(zip(vectors, counts, strict=True))


def rerank(query: str, reranker: Any, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return the logit and the number of tokens of each text with the query."""
    return list(zip(*reranker.score_and_count(query, texts), strict=True))
