"""Reranker: a cross-encoder that reads a query together with each result.

A pattern for models of your own: ``__init__`` only stores the arguments, `_model` loads the model
on first use, `score` checks that the object is open, and `_release` releases the model.
`torch_utils.Resource` calls it exactly once: at ``close()``, at the end of ``with``, at garbage
collection, or at exit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo.encoding.encoder import loading, sentence_transformers
from rag_demo.encoding.model_identity import check_model_name
from rag_demo.errors import ModelError, check_positive, checked_texts
from rag_demo.search_request import SearchResult
from torch_utils import Resource, closes_on_error, find_batch_size, get_optimal_device, release

__all__ = ["Reranker"]


class Reranker(Resource):
    """A cross-encoder of sentence-transformers, loaded on first use.

    It is closed at exit at the latest. Threads take turns, and `close` waits for them.

    Args:
        model_name_or_path: A folder, or a name on the hub, such as
            "cross-encoder/ms-marco-MiniLM-L6-v2".
        device: torch's name of the device; by default the best one available.
        batch_size: Pairs of a query and a text per forward pass. It is halved when memory runs
            out.
        trust_remote_code: Whether to run code that comes with the model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``batch_size`` is not positive.
    """

    @closes_on_error
    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        device: str | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ) -> None:
        check_model_name(model_name_or_path)
        check_positive("batch_size", batch_size)
        self.name = str(model_name_or_path)
        self.device = device
        self.batch_size = batch_size
        self._trust_remote_code = trust_remote_code
        self._encoder: Any = None
        self._in_use = threading.RLock()

    def rerank(
        self, query: str, results: Sequence[SearchResult], top_k: int | None = None
    ) -> list[SearchResult]:
        """Order results by how well they answer a query.

        Args:
            query: The query.
            results: The results of a search. The model reads a result's passage, if it has one.
            top_k: How many of the best to return; None for all.

        Returns:
            The results with new ranks and the model's scores. Equal scores are ordered by id.

        Raises:
            ModelError: The model cannot be loaded, or gives scores that are not finite.
            ResourceClosedError: This object is closed.
        """
        texts = [result.passage_text for result in results]
        scores = self.score(query, texts)
        order = sorted(zip(-scores, results, strict=True), key=lambda pair: (pair[0], pair[1].id))
        return [
            result._replace(rank=rank, score=-float(negative))
            for rank, (negative, result) in enumerate(order[:top_k], start=1)
        ]

    def score(self, query: str, texts: Sequence[str]) -> Any:
        """Score texts as answers to a query: shape (n,), float32. Higher is better."""
        (query,), texts = checked_texts([query], "query"), checked_texts(texts, "texts")
        with self._in_use:
            self.ensure_open()
            if not texts:
                return np.empty(0, np.float32)
            encoder = self._model()

            @find_batch_size(starting_batch_size=self.batch_size)
            def predict(batch_size: int) -> Any:
                pairs = [(query, text) for text in texts]
                return encoder.predict(pairs, batch_size=batch_size, show_progress_bar=False)

            scores = np.asarray(predict(), np.float32).reshape(len(texts))
            if not np.isfinite(scores).all():
                raise ModelError(f"{self.name!r} gives scores that are not finite")
            return scores

    def _model(self) -> Any:
        if self._encoder is None:
            self.device = self.device or get_optimal_device()
            hint = "name a folder with a cross-encoder, or a model on the hub"
            with loading("the reranker", self.name, self.device, hint):
                self._encoder = sentence_transformers().CrossEncoder(
                    self.name, device=self.device, trust_remote_code=self._trust_remote_code
                )
            architectures = getattr(self._encoder.config, "architectures", None) or [""]
            if architectures[0].endswith("Model"):
                self._release()
                raise ModelError(
                    f"{self.name!r} is a {architectures[0]}, which has no layer for scores; name a "
                    "cross-encoder, such as cross-encoder/ms-marco-MiniLM-L6-v2"
                )
        return self._encoder

    def _release(self) -> None:
        # Runs once, while torch is intact. Waits for a thread that reranks.
        with self._in_use:
            encoder, self._encoder = self._encoder, None
            release(encoder)
