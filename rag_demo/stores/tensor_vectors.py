"""Vectors as tensors: float32 in host memory or in a file, and a copy on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from rag_demo.exact_search.equal_rows import (
    NO_GROUPS,
    EqualRows,
    find_equal_rows,
    with_equal_rows,
    without_equal_rows,
)
from rag_demo.exact_search.scores import Pairs
from rag_demo.exact_search.search import (
    FEW_QUERIES,
    Profile,
    Source,
    has_fast_bfloat16,
    profile_of,
    search,
)
from rag_demo.exact_search.streaming import StreamedVectors
from rag_demo.stores.index_folder import SavedIndex
from rag_demo.stores.ranking import Order
from rag_demo.vectors import GrowableRows, Mask, Rows, Vectors

_FEW_ALLOWED, _FEW_OF = 1 << 12, 16  # rows, or one row in 16: these are gathered
_COPIED_FROM = 1 << 11  # rows; fewer are searched in float32 as fast
_COPIED = 1 << 14  # rows at once
_COMPARED_AGAIN = 64  # Equal rows are found again when one row in 64 is new.
_BUFFERS = 8  # parts of a memory budget
_LEAST_ROWS = 32  # of a buffer


class Copy(NamedTuple):
    """A copy of the first rows on a device.

    Attributes:
        rows: The copy.
        error: The largest distance of a row from its vector.
    """

    rows: GrowableRows
    error: float


@dataclass(frozen=True)
class TensorVectors:
    """Float32 vectors in host memory or in a file, and a copy on a device; see `VectorRows`.

    The first rows lie in the file of a saved index, mapped into memory; above the memory budget,
    each search streams them. The copy grows with each change, and a load makes it whole. A CPU
    that multiplies bfloat16 fast has a copy beside float32 vectors, for batches of queries. After
    a load, the first batch makes that copy.

    Attributes:
        device, dtype, memory_budget: See `PyTorchGPURetriever`.
        profile: The profile of the device.
        saved: The saved index that holds the first rows.
        host: The other float32 vectors: a tensor in host memory.
        copy: The copy of the first rows on the device.
        streamed: The vectors in the file, if they exceed the memory budget.
        equal: The groups of equal rows that are known.
    """

    device: str
    dtype: str
    memory_budget: int | None
    saved: SavedIndex | None = None
    host: GrowableRows | None = None
    copy: Copy | None = None
    streamed: StreamedVectors | None = None
    equal: EqualRows = NO_GROUPS

    @cached_property
    def profile(self) -> Profile:
        """How the device searches."""
        budget = self.memory_budget
        return profile_of(self.device).within(None if budget is None else budget // 4)

    @property
    def dimension(self) -> int:
        """See `VectorRows`."""
        if self.saved is not None:
            return self.saved.manifest.dimension
        return 0 if self.host is None else int(self.host.rows.shape[1])

    def __len__(self) -> int:
        return self._host_start + (0 if self.host is None else len(self.host))

    @cached_property
    def _in_host(self) -> bool:
        """Whether the float32 vectors in host memory are searched."""
        return self.device == "cpu" and self.dtype == "float32"

    @cached_property
    def _host_start(self) -> int:
        """The number of the first row in ``host``."""
        return 0 if self.saved is None else self.saved.manifest.rows

    @property
    def stays_in_file(self) -> bool:
        """See `VectorRows`."""
        return self.streamed is not None

    @property
    def buffers(self) -> list[Any]:
        """The memory of all tensors, to release it."""
        parts = (self.host, self.copy and self.copy.rows)
        return [part.buffer for part in parts if part is not None]

    def empty_copy(self) -> TensorVectors:
        """See `VectorRows`."""
        return TensorVectors(self.device, self.dtype, self.memory_budget)

    def extended(self, vectors: Vectors) -> TensorVectors:
        """See `VectorRows`."""
        host = self.host or GrowableRows(torch.empty(0, vectors.shape[1]))
        longer = replace(self, host=host.append(torch.from_numpy(vectors)))
        is_whole = self.saved is None or (self.copy and len(self.copy.rows) == len(self))
        if self.streamed is None and is_whole and longer._uses_copy(FEW_QUERIES + 1):
            longer = replace(longer, copy=longer._whole_copy())
        return replace(longer, equal=longer._equal_rows()) if is_whole else longer

    def with_saved_rows(self, saved: SavedIndex) -> TensorVectors:
        """See `VectorRows`."""
        empty, rows, budget = self.empty_copy(), saved.manifest.rows, self.memory_budget
        if not rows:
            return empty
        shape = (rows, saved.manifest.dimension)
        copied = 4 if self.dtype == "float32" and not self._in_host else 2  # bytes of a number
        if budget is None or shape[0] * shape[1] * (4 + copied) <= budget:
            loaded = replace(empty, saved=saved)
            return loaded if self._in_host else replace(loaded, copy=loaded._whole_copy())
        least = 4 * _BUFFERS * shape[1] * _LEAST_ROWS
        if budget < least:
            raise ValueError(f"memory_budget must be at least {least} bytes for these vectors")
        size, pins = budget // _BUFFERS, self.profile.is_pinned
        streamed = StreamedVectors(shape, self.device, size, pins, saved.read_into)
        return replace(empty, saved=saved, streamed=streamed)

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        if self.saved is None and self.host is not None:
            host: Vectors = self.host.rows.numpy()
            return host.take(rows, axis=0)
        is_first = rows < self._host_start
        result = np.empty((len(rows), self.dimension), np.float32)
        if self.saved is not None and is_first.any():
            take = self.saved.take if self.streamed is None else self.saved.take_unmapped
            if is_first.all():
                return take(rows)
            result[is_first] = take(rows[is_first])
        if self.host is not None:
            host = self.host.rows.numpy()
            result[~is_first] = host.take(rows[~is_first] - self._host_start, axis=0)
        return result

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        copied = 0 if self.copy is None else self.copy.rows.rows.nbytes
        return self.device, self.dtype, copied + 4 * len(self) * self.dimension

    def candidates(
        self, queries: Vectors, top_k: int, allowed: Mask | None, order_of: Order
    ) -> Pairs:
        """See `VectorRows`."""
        if self.saved is not None:
            self.saved.check_length()
        object.__setattr__(self, "equal", self._equal_rows())  # Any search may store them.
        groups: list[Rows] = []
        if self.equal.groups:
            allowed, groups = without_equal_rows(self.equal, allowed, len(self))
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        few = max(_FEW_ALLOWED, len(self) // _FEW_OF)
        if allowed is not None and count <= few and self.streamed is None:
            rows = np.flatnonzero(allowed)
            pairs = search(
                self._source(len(queries), rows), queries, min(top_k, count), self.profile
            )
            pairs = pairs._replace(row=rows[pairs.row])
        else:
            source = self._source(len(queries))
            if allowed is not None:
                mask = torch.from_numpy(allowed).to(self.device)
                source = replace(source, available=count, allowed=mask)
            pairs = search(source, queries, min(top_k, count), self.profile)
        return with_equal_rows(pairs, groups, top_k, order_of) if groups else pairs

    def _source(self, queries: int, rows: Rows | None = None) -> Source:
        """Return all rows, or a few, as they are searched for so many queries."""
        device, error, parts = torch.device(self.device), 0.0, self._in_memory
        if self.streamed is None and self._uses_copy(queries):
            object.__setattr__(self, "copy", self._whole_copy())  # Any search may store it.
            assert self.copy is not None
            parts, error = [self.copy.rows.rows], self.copy.error
            if rows is not None:
                parts = [parts[0][torch.from_numpy(rows).to(device)]]
        elif rows is not None:
            parts = [torch.from_numpy(self.take(rows))]
        dtype = parts[0].dtype if parts else torch.float32
        is_true = self.profile.exact_on_device and dtype == torch.float32 and not self.streamed
        return Source(
            device,
            dtype,
            [*([self.streamed.chunks] if self.streamed else []),
             *(part.to(device).split for part in parts)],
            self.take if rows is None else lambda numbers: self.take(rows[numbers]),
            len(self) if rows is None else len(rows),
            error=error,
            resident=parts[0] if is_true else None,
        )  # fmt: skip

    def _uses_copy(self, queries: int) -> bool:
        """Whether so many queries are searched in a copy, and not in the float32 vectors."""
        if not self._in_host:
            return True
        return queries > FEW_QUERIES and len(self) >= _COPIED_FROM and has_fast_bfloat16()

    @property
    def _in_memory(self) -> list[Any]:
        """The float32 vectors in host memory, as tensors: all that are not streamed."""
        saved = self.saved is not None and self.streamed is None
        parts = [torch.from_numpy(self.saved.vectors)] if saved and self.saved is not None else []
        return parts if self.host is None else [*parts, self.host.rows]

    def _whole_copy(self) -> Copy:
        """Return a copy of all rows, and make what is missing."""
        dtype = torch.bfloat16 if self._in_host else getattr(torch, self.dtype)
        empty = torch.empty(0, self.dimension, dtype=dtype, device=self.device)
        rows, error = self.copy or Copy(GrowableRows(empty), 0.0)
        if len(rows) < len(self) // 2:
            rows.reserve(len(self))
        for start in range(len(rows), len(self), _COPIED):
            some = self.take(np.arange(start, min(start + _COPIED, len(self))))
            vectors = torch.from_numpy(some).to(self.device)
            rounded = vectors.to(dtype)
            if dtype != torch.float32:
                distance = float((vectors - rounded.float()).norm(dim=1).max())
                error = max(error, distance * (1 + 1e-4))  # more than float32 can err
            rows = rows.append(rounded)
        return Copy(rows, error)

    def _equal_rows(self) -> EqualRows:
        """Return the groups of equal rows, among nearly all rows."""
        new = len(self) - self.equal.compared
        if self.streamed is not None or new <= max(_FEW_ALLOWED, len(self) // _COMPARED_AGAIN):
            return self.equal
        return find_equal_rows([part.numpy() for part in self._in_memory], self.take)
