"""PyTorchGPURetriever: the vectors are one tensor on the device; it runs on a CPU too."""

from __future__ import annotations

from typing import Any

import numpy as np

from rag_demo.retriever import Embedder, Retriever, Rows, Vectors, rounding
from torch_utils import get_optimal_device, release

__all__ = ["PyTorchGPURetriever"]

_CHUNK_ROWS = 1 << 16  # scores at once: 128 MB for 512 questions


class PyTorchGPURetriever(Retriever):
    """Exact cosine top-k with PyTorch. See `Retriever` for what it does.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
        device: torch's name of the device; by default the best there is.
        dtype: Of the stored vectors: "float32", "float16" or "bfloat16". Products are taken
            in float32.

    Attributes:
        embeddings_tensor: Shape (n, d), on the device; None while empty and once closed.
    """

    def __init__(
        self, embedding_model: Embedder, *, device: str | None = None, dtype: str = "float32"
    ) -> None:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f'dtype must be "float32", "float16" or "bfloat16", not {dtype!r}')
        super().__init__(embedding_model)
        self.device = device or get_optimal_device()
        self.dtype = dtype
        self.embeddings_tensor: Any = None

    def _append(self, vectors: Vectors) -> None:
        import torch

        new = torch.tensor(vectors, dtype=getattr(torch, self.dtype), device=self.device)
        old = self.embeddings_tensor
        self.embeddings_tensor = new if old is None else torch.cat([old, new])

    def _keep(self, rows: Rows) -> None:
        import torch

        if not len(rows):
            self._clear()
            return
        self.embeddings_tensor = self.embeddings_tensor[torch.from_numpy(rows).to(self.device)]

    def _clear(self) -> None:
        self.embeddings_tensor = None

    def _vectors(self, rows: Rows | None = None) -> Vectors:
        import torch

        if self.embeddings_tensor is None:
            return np.empty((0, 0), np.float32)
        tensor = self.embeddings_tensor
        if rows is not None:
            tensor = tensor[torch.tensor(rows, device=self.device)]
        vectors: Vectors = tensor.float().cpu().numpy()
        return vectors

    def _candidates(self, queries: Vectors, top_k: int, rows: Rows | None) -> list[Rows]:
        import torch

        margin = rounding(queries.shape[1])
        best: Any = None  # shape (b, at most k): the best scores of the chunks so far
        found: list[tuple[Any, Any, Any]] = []
        with torch.inference_mode():
            questions = torch.tensor(queries, device=self.device)
            chosen = None if rows is None else torch.tensor(rows, device=self.device)
            count = len(self) if rows is None else len(rows)
            for start in range(0, count, _CHUNK_ROWS):
                stop = min(start + _CHUNK_ROWS, count)
                part = slice(start, stop) if chosen is None else chosen[start:stop]
                scores = questions @ self.embeddings_tensor[part].float().T
                top = scores.topk(min(top_k, stop - start), dim=1).values
                best = top if best is None else torch.cat([best, top], dim=1)
                best = best.topk(min(top_k, best.shape[1]), dim=1).values
                query, column = (scores >= best[:, -1:] - margin).nonzero(as_tuple=True)
                row = column + start if chosen is None else chosen[column + start]
                found.append((query, row, scores[query, column]))
            query, row, score = (torch.cat(parts) for parts in zip(*found, strict=True))
            good = score >= best[query, -1] - margin
            query, row = query[good].cpu().numpy(), row[good].cpu().numpy()
        return [row[query == which] for which in range(len(queries))]

    def _release(self) -> None:
        with self._lock:  # A search that is under way in another thread ends first.
            tensor, self.embeddings_tensor = self.embeddings_tensor, None
            release(tensor)
