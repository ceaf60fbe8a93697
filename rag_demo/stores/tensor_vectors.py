"""Vectors as a tensor on a device, with float32 vectors in host memory or in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rag_demo.exact_search.candidates import (
    FEW_ROWS,
    Pairs,
    direct_candidates,
    find_candidates,
    suits_int8,
)
from rag_demo.exact_search.scan import BLOCK, Scan, StreamedScan, make_scan
from rag_demo.stores.index_folder import SavedIndex
from rag_demo.vectors import GrowableRows, Mask, Rows, Vectors

_FEW_ALLOWED = 1 << 12
_ROUNDED_AT_ONCE = 1 << 11  # new rows before their int8 copies are made
_ROUNDED_BY_SEARCH = 1 << 12  # rows whose copies one query makes, in 25 ms
_MOST_FACTOR = 32


@dataclass(frozen=True)
class TensorVectors:
    """Float32 vectors in host memory, and copies on a device; see `VectorRows`.

    The first rows lie in the file of a saved index, mapped into memory; above the memory budget,
    each search streams them. Searches make the copies: with float32 on a CPU, int8 ones.

    Attributes:
        device, dtype, memory_budget: See `PyTorchGPURetriever`.
        saved: The saved index that holds the first rows.
        host: The other float32 vectors.
        copy: Copies of the first rows on the device.
        streamed: The vectors in the file, if they exceed the memory budget.
    """

    device: str
    dtype: str
    memory_budget: int | None
    saved: SavedIndex | None = None
    host: GrowableRows | None = None
    copy: tuple[GrowableRows, ...] = ()
    streamed: Scan | None = None

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
    def _host_start(self) -> int:
        """The number of the first row in ``host``."""
        return 0 if self.saved is None else self.saved.manifest.rows

    @property
    def stays_in_file(self) -> bool:
        """See `VectorRows`."""
        return self.streamed is not None

    @property
    def tensors(self) -> list[Any]:
        """All tensors, to release them."""
        return [part.rows for part in self.copy]

    def empty_copy(self) -> TensorVectors:
        """See `VectorRows`."""
        return TensorVectors(self.device, self.dtype, self.memory_budget)

    def extended(self, vectors: Vectors) -> TensorVectors:
        """See `VectorRows`."""
        host = self.host or GrowableRows(np.empty((0, vectors.shape[1]), np.float32))
        return replace(self, host=host.append(vectors))

    def with_saved_rows(self, saved: SavedIndex) -> TensorVectors:
        """See `VectorRows`."""
        empty, rows, budget = self.empty_copy(), saved.manifest.rows, self.memory_budget
        if not rows:
            return empty
        shape = (rows, saved.manifest.dimension)
        copied = {"int8": 1, "float32": 1 if self._in_host else 4}.get(self.dtype, 2)
        if budget is None or shape[0] * shape[1] * (4 + copied) <= budget:
            return replace(empty, saved=saved)
        scan = StreamedScan(shape, self.device, budget - budget // 4, saved.read_into)
        return replace(empty, saved=saved, streamed=scan)

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        is_first = rows < self._host_start
        result = np.empty((len(rows), self.dimension), np.float32)
        if self.saved is not None and is_first.any():
            take = self.saved.take if self.streamed is None else self.saved.take_unmapped
            if is_first.all():
                return take(rows)
            result[is_first] = take(rows[is_first])
        if self.host is not None:
            result[~is_first] = self.host.rows.take(rows[~is_first] - self._host_start, axis=0)
        return result

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        nbytes = sum(each.numel() * each.element_size() for each in self.tensors)
        return self.device, self.dtype, nbytes + 4 * len(self) * self.dimension

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None) -> Pairs:
        """See `VectorRows`."""
        if self.saved is not None:
            self.saved.check_length()
        if allowed is not None and self.streamed is None:
            rows = np.flatnonzero(allowed)
            if len(rows) <= _FEW_ALLOWED:
                pairs = direct_candidates([self.take(rows)], queries, top_k)
                return Pairs(pairs.query, rows[pairs.row])
        is_direct = self._in_host and self.streamed is None and len(queries) == 1
        if is_direct and (len(self) <= FEW_ROWS or not suits_int8(1)):
            return direct_candidates(self._floats(), queries, top_k, allowed)
        budget = self.memory_budget
        return find_candidates(
            self._scans(len(queries)), queries, top_k, self.take, allowed,
            scratch_bytes=None if budget is None else budget // 4,
        )  # fmt: skip

    def _floats(self, first: int = 0) -> list[Vectors]:
        """Return the float32 vectors in host memory from a row on."""
        parts, start = [], self._host_start
        if self.saved is not None and first < start and self.streamed is None:
            parts.append(self.saved.vectors[first:])
        if self.host is not None and first < len(self):
            parts.append(self.host.rows[max(0, first - start) :])
        return parts

    def _scans(self, queries: int) -> list[Scan]:
        """Return the scans for so many queries: all rows, in order."""
        import torch

        scans: list[Scan] = []
        if self.streamed is not None:
            scans.append(self.streamed)
        elif not self._in_host:
            scans.append(self._copied(self.dtype, len(self)))
        elif suits_int8(queries):
            more = _ROUNDED_BY_SEARCH * min(queries, _MOST_FACTOR)
            scans.append(self._copied("int8", more))
        row = sum(map(len, scans))
        for part in self._floats(row):
            scans.append(Scan.of_floats(torch.from_numpy(part).to(self.device), row))
            row += len(part)
        return [scan for scan in scans if len(scan)]

    def _copied(self, kind: str, more: int) -> Scan:
        """Return the copies of the first rows, and make those of some more."""
        copy = self.copy
        if not copy:
            empty = make_scan(np.empty((0, self.dimension), np.float32), kind, self.device)
            copy = tuple(map(GrowableRows, empty.tensors))
        count = len(copy[0])
        # An incomplete block would change.
        stop = min(len(self), count + more) // BLOCK * BLOCK
        if stop - count >= (_ROUNDED_AT_ONCE if self._in_host else 1):
            for start in range(count, stop, _ROUNDED_AT_ONCE):
                rows = np.arange(start, min(start + _ROUNDED_AT_ONCE, stop))
                new = make_scan(self.take(rows), kind, self.device).tensors
                copy = tuple(part.append(each) for part, each in zip(copy, new, strict=True))
            # These rows never change, so any search may store their copies.
            object.__setattr__(self, "copy", copy)
        return Scan(*(part.rows for part in copy))
