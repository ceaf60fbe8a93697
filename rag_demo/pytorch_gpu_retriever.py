"""PyTorchGPURetriever: the vectors are a tensor on a GPU or a CPU.

`add` and `load` create the tensor, inside `rag_demo.stores.tensor_vectors`, and all searches
multiply with it. `PyTorchGPURetriever._release` releases its memory in place, even if other
variables refer to it.
"""

from __future__ import annotations

from typing import cast

from rag_demo.errors import check_device, check_positive
from rag_demo.retriever import BasicEmbedder, LocalRetriever
from rag_demo.stores.local import LocalStore
from rag_demo.stores.tensor_vectors import TensorVectors
from torch_utils import closes_on_error, get_optimal_device, release

__all__ = ["PyTorchGPURetriever"]

DTYPES = ("float32", "float16", "bfloat16")


class PyTorchGPURetriever(LocalRetriever):
    """Exact cosine search with PyTorch; see `Retriever` for the methods.

    A search multiplies all vectors with the queries, and scores every possible result again from
    the float32 vectors; see `rag_demo.exact_search`. A CPU with fast products of bfloat16 has a
    copy of 2,048 or more float32 vectors in bfloat16, for batches of more than four queries.

    Args:
        embedding_model: The embedding model. The retriever does not own it and does not close it.
        device: torch's name of the device; by default the best one available.
        dtype: The dtype of the copy on the device: "float32", "float16" or "bfloat16".
            Results are exact whatever it is, because the float32 vectors stay in host memory or
            in the index's file.
        memory_budget: Bytes for vectors and a search, on the device and in host memory; None for
            no limit. Each search streams a larger loaded index from its file, in float32. Its two
            buffers take a quarter of the budget, and scores and candidates another quarter.
            Documents, and vectors added after the load, are not counted.
        language: The language of stems in the full text, such as "german"; "none" for the words
            as they are. A loaded index has its own.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value.
    """

    @closes_on_error
    def __init__(
        self,
        embedding_model: BasicEmbedder,
        *,
        device: str | None = None,
        dtype: str = "float32",
        memory_budget: int | None = None,
        language: str = "english",
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        check_positive("memory_budget", memory_budget)
        check_device(device)
        self.device = device or get_optimal_device()
        self.dtype = dtype
        self.memory_budget = memory_budget
        # `add` and `load` create the tensor in here.
        vectors = TensorVectors(self.device, dtype, memory_budget)
        super().__init__(embedding_model, LocalStore(vectors, language))

    def _release(self) -> None:
        # Runs once, while torch is intact: at close, at garbage collection, or at exit.
        if hasattr(self, "store"):  # `__init__` may have raised.
            # The buffers, not views of their rows: a view would be emptied, and the buffer kept.
            release(cast(TensorVectors, self.store.close()).buffers)
