"""PyTorchGPURetriever: the vectors are one tensor on the device; it runs on a CPU too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.retriever import BasicEmbedder, Retriever
from rag_demo.searching.int8_product import int8_product
from rag_demo.searching.ranking import Pairs
from rag_demo.searching.scan import Scan, make_scan
from rag_demo.searching.streamed_scan import make_streamed_scan
from rag_demo.storage.mapped_file import MappedFile
from rag_demo.vectors import Rows, Vectors, rounding
from torch_utils import get_optimal_device, release

__all__ = ["PyTorchGPURetriever"]

_FEW_ROWS = 1 << 15
_ROWS_AT_ONCE = 64
DTYPES = ("float32", "float16", "bfloat16", "int8")


class PyTorchGPURetriever(Retriever):
    """Exact cosine top-k with PyTorch. See `Retriever` for what it does.

    A search scans rounded vectors, knows by how much they can mislead it, and scores all that
    may be among the best from the float32 vectors: see `rag_demo.searching.scan`. On a CPU that
    multiplies int8 fast it scans an int8 copy whatever the dtype, made by the first search.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
        device: torch's name of the device; by default the best there is.
        dtype: Of the tensor on the device: "float32", "float16", "bfloat16" or "int8".
        exact: Whether the float32 vectors are kept, in host memory or in the index's file, and
            answers are theirs whatever the dtype. If not, answers are those of the rounded
            vectors, and only these are kept.
        memory_budget: Bytes that vectors may take, on the device and in host memory. A loaded
            index of more than that is streamed from its file by each search, in float32,
            through two buffers that take a quarter of it. None for no limit.

    Attributes:
        embeddings_tensor: Shape (n, d), on the device; None while empty, while streamed, and
            once closed.
    """

    embeddings_tensor: Any = None
    _originals: Vectors | None = None
    _scan: Scan | None = None

    def __init__(
        self,
        embedding_model: BasicEmbedder,
        *,
        device: str | None = None,
        dtype: str = "float32",
        exact: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(embedding_model)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        self.device = device or get_optimal_device()
        self.dtype = dtype
        self.exact = exact
        if memory_budget is not None and memory_budget < 1:
            raise ValueError(f"memory_budget must be positive, not {memory_budget}")
        self.memory_budget = memory_budget

    def _append(self, vectors: Vectors) -> None:
        old = self._vectors()
        # Alone they are taken as they are: mapped, if they come from a file.
        everything = np.concatenate([old, vectors]) if len(old) else vectors
        self._hold(everything)

    def _keep(self, rows: Rows) -> None:
        if len(rows):
            self._hold(self._vectors(rows))
        else:
            self._clear()

    def _hold(self, vectors: Vectors) -> None:
        """Take vectors in place of those that are there."""
        import torch

        self._clear()
        if self._file is not None and self._is_over_budget(vectors):
            self._stream(vectors, self._file)
            return
        if self.dtype == "float32":
            self.embeddings_tensor = torch.from_numpy(vectors).to(self.device)
            return
        self._scan = make_scan(vectors, self.dtype, self.device)
        self.embeddings_tensor = self._scan.vectors
        if self.exact:
            self._originals = vectors

    def _is_over_budget(self, vectors: Vectors) -> bool:
        sizes = {"float32": 5, "int8": 1}  # The float32 tensor has an int8 copy beside it.
        per_value = sizes.get(self.dtype, 2) + (4 if self.exact and self.dtype != "float32" else 0)
        return self.memory_budget is not None and vectors.size * per_value > self.memory_budget

    def _stream(self, vectors: Vectors, file: MappedFile) -> None:
        """Leave vectors in their file, of which no page stays longer than it is needed."""
        assert self.memory_budget is not None
        file.resident = False
        row_bytes = 4 * vectors.shape[1]
        header = len(file) - vectors.nbytes

        def passed(start: int, count: int) -> None:
            file.drop(header + start * row_bytes, count * row_bytes)

        self._scan = make_streamed_scan(vectors, self.device, self.memory_budget, passed)
        self._originals = vectors

    def _clear(self) -> None:
        self.embeddings_tensor = self._originals = self._scan = None

    def _vectors(self, rows: Rows | None = None) -> Vectors:
        if self._originals is not None:
            if rows is None or self.embeddings_tensor is not None or self._file is None:
                return self._originals if rows is None else self._originals[rows]
            return self._read_rows(rows, self._originals, self._file)
        if self.embeddings_tensor is None:
            return np.empty((0, 0), np.float32)
        vectors: Vectors = self._fetch(rows).numpy()
        return vectors

    def _read_rows(self, rows: Rows, vectors: Vectors, file: MappedFile) -> Vectors:
        """Copy single rows of a streamed index; the system maps 64 kB around each of them."""
        result = np.empty((len(rows), vectors.shape[1]), np.float32)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            result[some] = vectors[rows[some]]
            file.drop()
        return result

    def _fetch(self, rows: Rows | None) -> Any:
        """Return vectors as a float32 tensor in host memory."""
        import torch

        if self._originals is not None:
            return torch.from_numpy(self._vectors(rows))
        tensor = self.embeddings_tensor
        chosen = None if rows is None else torch.from_numpy(rows).to(tensor.device)
        if chosen is not None:
            tensor = tensor.index_select(0, chosen)
        tensor = tensor.float()
        if self.dtype == "int8" and self._scan is not None:
            tensor = self._scan.unscaled(tensor, chosen)
        return tensor.cpu()

    def _storage(self) -> tuple[str, str, int]:
        tensor = self.embeddings_tensor
        if tensor is None:
            return self.device, self.dtype, 0 if self._originals is None else self._originals.nbytes
        nbytes = tensor.numel() * tensor.element_size()
        if self._originals is not None:
            nbytes += self._originals.nbytes
        if self._scan is not None and self._scan.vectors is not tensor:
            nbytes += self._scan.nbytes
        return self.device, self.dtype, nbytes

    def _candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        if len(queries) == 1 and len(self._rows) <= _FEW_ROWS and self._scans_floats_in_host():
            return self._scan_directly(queries[0], top_k, allowed)
        if self._scan is None:
            self._scan = self._make_scan()
        exact = self._originals is not None or self.dtype == "float32"
        return self._scan.candidates(queries, top_k, self._fetch, allowed, exact=exact)

    def _scans_floats_in_host(self) -> bool:
        tensor = self.embeddings_tensor
        return self.dtype == "float32" and tensor is not None and tensor.device.type == "cpu"

    def _scan_directly(
        self, query: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """Multiply all of it, with numpy, which does that three times faster for one query."""
        scores = self.embeddings_tensor.numpy() @ query
        if allowed is not None:
            scores[~allowed] = -np.inf
        bar = np.partition(scores, -top_k)[-top_k] - rounding(len(query))
        rows = np.flatnonzero(scores >= bar)
        return np.zeros(len(rows), np.int64), rows

    def _make_scan(self) -> Scan:
        import torch

        tensor = self.embeddings_tensor
        if tensor.device.type == "cpu" and int8_product(torch, tensor.shape[1]) is not None:
            return make_scan(tensor.numpy(), "int8", "cpu")
        return Scan.of_floats(tensor)

    def _release(self) -> None:
        # Runs once, while torch is intact: at close, when this is garbage, at exit at the latest.
        with self._lock:
            tensor, scan = self.embeddings_tensor, self._scan
            super()._release()
            # Whoever still names the tensor has an empty one: it is given back in place.
            release(tensor, [] if scan is None else [scan.vectors, scan.scales, scan.errors])
