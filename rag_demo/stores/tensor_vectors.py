"""Vectors as a tensor on a device, with float32 vectors in host memory or in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rag_demo.exact_search.candidates import find_candidates, suits_int8
from rag_demo.exact_search.exact_scores import (
    FEW_ROWS,
    Pairs,
    candidates_of_batch,
    candidates_of_one_query,
)
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.exact_search.scan import Scan, StreamedScan, make_scan
from rag_demo.stores.saved_index import SavedIndex
from rag_demo.vectors import GrowableRows, Mask, Rows, Vectors

_FEW_ALLOWED = 1 << 12
_ROUNDED_AT_ONCE = 1 << 11  # new rows before their int8 copies are made
_ROUNDED_BY_SEARCH = 1 << 13  # rows whose copies one query makes, in 50 ms
_MOST_FACTOR = 32


@dataclass(frozen=True)
class TensorVectors:
    """Vectors on a device, and in float32 where they are needed; see `VectorRows`.

    ======================  ========================  =================  ================
    case                    ``saved`` (its file)      ``host``           ``copy``
    ======================  ========================  =================  ================
    float32 on a CPU        the first rows, mapped    the other rows     int8, by searches
    rounded                 the first rows, mapped    the other rows     all rows
    float32 on a GPU        none                      none               all rows
    above the budget        the first rows, streamed  the other rows     none
    ======================  ========================  =================  ================

    Attributes:
        device, dtype, memory_budget: See `PyTorchGPURetriever`.
        saved: The saved index that holds the first rows.
        host: Float32 vectors in host memory.
        copy: Copies of the first rows on the device.
        streamed: The vectors in the file, if they exceed the memory budget.
        tensor: The tensor that `PyTorchGPURetriever.embeddings_tensor` returned.
    """

    device: str
    dtype: str
    memory_budget: int | None
    saved: SavedIndex | None = None
    host: GrowableRows | None = None
    copy: GrowingScan | None = None
    streamed: Scan | None = None
    tensor: Any = None

    @property
    def dimension(self) -> int:
        """See `VectorRows`."""
        if self.saved is not None:
            return self.saved.manifest.dimension
        return 0 if self.host is None else int(self.host.rows.shape[1])

    def __len__(self) -> int:
        return self._host_start + (0 if self.host is None else len(self.host))

    @property
    def _in_host(self) -> bool:
        """Whether the float32 vectors in host memory are searched."""
        return self.device == "cpu" and self.dtype == "float32"

    @property
    def _keeps_floats(self) -> bool:
        return self._in_host or self.dtype != "float32"

    @property
    def _host_start(self) -> int:
        """The number of the first row in ``host``."""
        if self._keeps_floats or self.copy is None:
            return 0 if self.saved is None else self.saved.manifest.rows
        return len(self.copy)

    @property
    def stays_in_file(self) -> bool:
        """See `VectorRows`."""
        return self.streamed is not None

    @property
    def tensors(self) -> list[Any]:
        """All tensors, to release them."""
        copies = [] if self.copy is None else [*self.copy.scan.tensors]
        return copies if self.tensor is None else [*copies, self.tensor]

    def empty_copy(self) -> TensorVectors:
        """See `VectorRows`."""
        return TensorVectors(self.device, self.dtype, self.memory_budget)

    def extended(self, vectors: Vectors) -> TensorVectors:
        """See `VectorRows`."""
        host = self.host or GrowableRows(np.empty((0, vectors.shape[1]), np.float32))
        if self._in_host or self.streamed is not None:
            return replace(self, host=host.append(vectors))
        copy = self.copy or GrowingScan.of(vectors[:0], self.dtype, self.device)
        new = vectors
        if len(copy) < len(self):
            new = np.concatenate([self.take(np.arange(len(copy), len(self))), vectors])
        # An int8 block is copied when it is complete. Until then its rows are searched in float32.
        whole = len(new) // BLOCK * BLOCK if self.dtype == "int8" else len(new)
        copy = copy.extended(new[:whole], self.dtype)
        host = host.append(vectors) if self._keeps_floats else GrowableRows(new[whole:])
        return replace(self, host=host, copy=copy)

    def with_saved_rows(self, saved: SavedIndex) -> TensorVectors:
        """See `VectorRows`."""
        empty, rows, budget = self.empty_copy(), saved.manifest.rows, self.memory_budget
        if not rows:
            return empty
        if budget is not None and self._bytes_of(rows * saved.manifest.dimension) > budget:
            shape = (rows, saved.manifest.dimension)
            scan = StreamedScan(shape, self.device, budget - budget // 4, saved.read_into)
            return replace(empty, saved=saved, streamed=scan)
        if self._in_host:
            return replace(empty, saved=saved)
        saved.check_vectors()
        on_device = empty.extended(saved.vectors)
        return replace(on_device, saved=saved, host=None) if self._keeps_floats else on_device

    def _bytes_of(self, numbers: int) -> int:
        per_number = {"float32": 5 if self._in_host else 4, "int8": 1}.get(self.dtype, 2)
        return numbers * (per_number + (0 if self.dtype == "float32" else 4))

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        start = self._host_start
        if not len(rows) or rows.max() < start:
            return self._take_first(rows)
        assert self.host is not None
        if rows.min() >= start:
            taken: Vectors = self.host.rows.take(rows - start, axis=0)
            return taken
        is_last = rows >= start
        result = np.empty((len(rows), self.dimension), np.float32)
        result[is_last] = self.host.rows[rows[is_last] - start]
        result[~is_last] = self._take_first(rows[~is_last])
        return result

    def _take_first(self, rows: Rows) -> Vectors:
        """Return vectors that are not in ``host``, from the file or the device."""
        saved = self.saved
        if self.streamed is not None:
            assert saved is not None
            return saved.take_unmapped(rows)
        if saved is not None:
            return saved.take(rows)
        import torch

        if self.copy is None:
            return np.empty((0, self.dimension), np.float32)
        scan = self.copy.scan
        vectors: Vectors = scan.unscaled(torch.from_numpy(rows).to(self.device)).cpu().numpy()
        return vectors

    def in_one_tensor(self) -> TensorVectors:
        """Return the same vectors with ``tensor`` set to all rows, on the device."""
        import torch

        if self._in_host:
            if self.tensor is not None and len(self.tensor) == len(self):
                return self
            host = self.host
            if self.saved is not None or host is None:
                host = GrowableRows(self.take(np.arange(len(self))))
            return replace(self, saved=None, host=host, tensor=torch.from_numpy(host.rows))
        assert self.copy is not None
        tensor = self.copy.scan.vectors
        if len(tensor) < len(self):
            rest = self.take(np.arange(len(tensor), len(self)))
            tensor = torch.cat([tensor, make_scan(rest, self.dtype, self.device).vectors])
        return replace(self, tensor=tensor)

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        nbytes = sum(each.numel() * each.element_size()
                     for each in ([] if self.copy is None else self.copy.scan.tensors))  # fmt: skip
        nbytes += 0 if self.host is None else self.host.rows.nbytes
        nbytes += 0 if self.saved is None else self.saved.vectors.nbytes
        return self.device, self.dtype, nbytes

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None) -> Pairs:
        """See `VectorRows`."""
        if self.saved is not None:
            self.saved.check_length()
        if allowed is not None and self._keeps_floats and self.streamed is None:
            rows = np.flatnonzero(allowed)
            if len(rows) <= _FEW_ALLOWED:
                return candidates_of_batch(rows, queries, top_k, self.take)
        is_direct = self._in_host and self.streamed is None and len(queries) == 1
        if is_direct and (len(self) <= FEW_ROWS or not suits_int8(1)):
            parts = [part for _, part in self._floats()]
            return candidates_of_one_query(parts, queries[0], top_k, allowed)
        budget = self.memory_budget
        return find_candidates(
            self._scans(len(queries)), queries, top_k, self.take, allowed,
            scratch_bytes=None if budget is None else budget // 4,
        )  # fmt: skip

    def _floats(self, first: int = 0) -> list[tuple[int, Vectors]]:
        """Return the float32 vectors in host memory from a row on: each part with its row."""
        parts, start = [], self._host_start
        if self.saved is not None and first < start and self.streamed is None:
            self.saved.check_vectors()
            parts.append((first, self.saved.vectors[first:]))
        if self.host is not None and first < len(self):
            parts.append((max(first, start), self.host.rows[max(0, first - start) :]))
        return parts

    def _scans(self, queries: int) -> list[Scan]:
        """Return the scans for so many queries: all rows, in order."""
        import torch

        scans: list[Scan] = []
        if self.streamed is not None:
            scans.append(self.streamed)
        elif not self._in_host or suits_int8(queries):
            copy = self._int8_copy(queries) if self._in_host else self.copy
            assert copy is not None
            scans += [copy.scan] if len(copy) else []
        for start, part in self._floats(sum(map(len, scans))):
            scans.append(Scan.of_floats(torch.from_numpy(part).to(self.device), start))
        return scans

    def _int8_copy(self, queries: int) -> GrowingScan:
        """Return the int8 copies of the first rows, and make those of some more."""
        copy = self.copy or GrowingScan.of(np.empty((0, self.dimension), np.float32), "int8", "cpu")
        by_search = _ROUNDED_BY_SEARCH * min(queries, _MOST_FACTOR)
        stop = min(len(self) // BLOCK * BLOCK, len(copy) + by_search)
        if stop - len(copy) >= _ROUNDED_AT_ONCE:
            for start in range(len(copy), stop, _ROUNDED_AT_ONCE):
                rows = np.arange(start, min(start + _ROUNDED_AT_ONCE, stop))
                copy = copy.extended(self.take(rows), "int8")
            # These rows never change, so any search may store their copies.
            object.__setattr__(self, "copy", copy)
        return copy


class GrowingScan:
    """A snapshot of a `Scan` that can be extended; see `GrowableRows`."""

    def __init__(self, scan: Scan, parts: tuple[GrowableRows, ...] | None = None) -> None:
        self.scan = scan
        self._parts = parts or tuple(map(GrowableRows, scan.tensors))

    def __len__(self) -> int:
        return len(self.scan)

    @classmethod
    def of(cls, vectors: Vectors, dtype: str, device: str) -> GrowingScan:
        """Copy vectors to a device; for int8 pass complete blocks."""
        return cls(make_scan(vectors, dtype, device))

    def extended(self, vectors: Vectors, dtype: str) -> GrowingScan:
        """Return a scan with more vectors at the end; for int8 pass complete blocks."""
        if not len(vectors):
            return self
        device = str(self.scan.vectors.device)
        new = make_scan(vectors, dtype, device)
        if dtype == "int8":
            parts = tuple(part.append(rows) for part, rows in zip(
                self._parts, new.tensors, strict=True))  # fmt: skip
            return GrowingScan(Scan(*(part.rows for part in parts)), parts)
        grown = self._parts[0].append(new.vectors)
        return GrowingScan(Scan.of_floats(grown.rows), (grown,))
