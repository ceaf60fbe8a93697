"""PyTorchGPURetriever: the vectors are one tensor on the device; it runs on a CPU too."""

from __future__ import annotations

from typing import Any, cast

from rag_demo.retriever import BasicEmbedder, Retriever
from rag_demo.searching.tensor_vectors import DTYPES, TensorOptions, TensorVectors
from torch_utils import get_optimal_device, release
from torch_utils.resource import closes_on_error

__all__ = ["PyTorchGPURetriever"]


class PyTorchGPURetriever(Retriever):
    """Exact cosine top-k with PyTorch. See `Retriever` for what it does.

    A search scans rounded vectors, knows by how much they can mislead it, and scores all that
    may be among the best from the float32 vectors: see `rag_demo.searching.candidates`. On a CPU
    that multiplies int8 fast it scans an int8 copy whatever the dtype, made by the first search.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
        device: torch's name of the device; by default the best there is.
        dtype: Of the tensor on the device: "float32", "float16", "bfloat16" or "int8".
        exact: Whether the float32 vectors are kept, in host memory or in the index's file, and
            answers are theirs whatever the dtype. If not, answers are those of the rounded
            vectors, and only these are kept.
        memory_budget: Bytes that vectors and a search may take, on the device and in host memory.
            A loaded index of more than that is streamed from its file by each search, in
            float32, through two buffers that take a quarter of it; scores and candidates take
            another quarter. None for no limit. It does not cover what is no vector: documents
            that were added since (and their vectors), answers, 8 bytes a document for a search
            by words, 1 byte for a filter, and what has to be made anew because the index was
            saved without it.
    """

    @closes_on_error
    def __init__(
        self,
        embedding_model: BasicEmbedder,
        *,
        device: str | None = None,
        dtype: str = "float32",
        exact: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if type(memory_budget or 1) is not int:
            raise TypeError(f"memory_budget must be a whole number, not {memory_budget!r}")
        if memory_budget is not None and memory_budget < 1:
            raise ValueError(f"memory_budget must be positive, not {memory_budget}")
        self.device = device or get_optimal_device()
        self.dtype = dtype
        self.exact = exact
        self.memory_budget = memory_budget
        # Open: the tensor is in here, from the first `add` or `load` on.
        vectors = TensorVectors(TensorOptions(self.device, dtype, exact, memory_budget))
        super().__init__(embedding_model, vectors)

    @property
    def embeddings_tensor(self) -> Any:
        """Shape (n, d), on the device; None while empty, while streamed, and once closed.

        Asking puts together what was added and deleted since.
        """
        with self._lock:
            self._held = self._held.merged()
            return cast(TensorVectors, self._held.vectors).tensor

    def _release(self) -> None:
        # Runs once, while torch is intact: at close, when this is garbage, at exit at the latest.
        if not hasattr(self, "_held"):
            return  # `__init__` has refused its arguments.
        with self._lock:
            tensors = cast(TensorVectors, self._held.vectors).tensors
            super()._release()
            # Whoever still names the tensor has an empty one: it is given back in place. As one
            # list: what else refers to a tensor is taken for a thread that computes with it.
            release(tensors)
