"""Vectors as tensors of torch: those that were there first, and a tail of what was added since."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.growing import Growing
from rag_demo.searching.candidates import find_candidates
from rag_demo.searching.direct import FEW_ROWS, best_among, best_of_all
from rag_demo.searching.int8_product import int8_product
from rag_demo.searching.scan import BLOCK, Scan, ScannedCopy, make_scan
from rag_demo.searching.streamed_scan import make_streamed_scan
from rag_demo.searching.vector_store import Pairs, SavedVectors, VectorStore
from rag_demo.vectors import Rows, Vectors

__all__ = ["DTYPES", "TensorOptions", "TensorVectors"]

DTYPES = ("float32", "float16", "bfloat16", "int8")
_FEW_ALLOWED = 1 << 12
_MOST_TAIL = 1 << 10  # at least so many rows, and a quarter of the others, before all are merged
_ROUNDED_AT_ONCE = 1 << 11
_ROWS_AT_ONCE = 64
_COPY = ("scan.vectors", "scan.scales", "scan.errors")


@dataclass(frozen=True)
class TensorOptions:
    """How vectors are kept; see `rag_demo.PyTorchGPURetriever`."""

    device: str = "cpu"
    dtype: str = "float32"
    exact: bool = True
    memory_budget: int | None = None


@dataclass
class _Base:
    """Vectors that never change.

    Attributes:
        scan: Of all of them, as they are on the device or in the file.
        originals: In float32, in host memory or mapped; None if only the device has them.
        saved: Where they come from, if from an index.
    """

    scan: Scan
    originals: Vectors | None
    saved: SavedVectors | None = None
    is_streamed: bool = False


@dataclass
class _Caches:
    """What was computed of rows that never change; snapshots of one store share it.

    Attributes:
        copy: An int8 copy of the first rows, where the processor multiplies those fast.
        tail: The first rows of the tail, on the device.
    """

    copy: ScannedCopy | None = None
    tail: Growing | None = None


@dataclass(frozen=True)
class TensorVectors(VectorStore):
    """A tensor on a device, and a tail of later rows, in float32 in host memory.

    The tail is merged into the tensor when it is a quarter of it. See `VectorStore`.
    """

    options: TensorOptions = TensorOptions()
    _base: _Base | None = None
    _tail: Growing | None = None
    _caches: _Caches = field(default_factory=_Caches)

    def __len__(self) -> int:
        return self._base_rows + (0 if self._tail is None else len(self._tail))

    @property
    def _base_rows(self) -> int:
        return 0 if self._base is None else len(self._base.scan)

    @property
    def dimension(self) -> int:
        """See `VectorStore`."""
        return 0 if self._base is None else int(self._base.scan.vectors.shape[1])

    @property
    def tensor(self) -> Any:
        """The tensor on the device, if it is all there is; else None."""
        if self._base is None or self._base.is_streamed or self._tail is not None:
            return None
        return self._base.scan.vectors

    @property
    def tensors(self) -> list[Any]:
        """All tensors, to be given back."""
        scans = [] if self._base is None else [self._base.scan]
        if self._caches.copy is not None:
            scans.append(self._caches.copy.scan)
        return [tensor for scan in scans for tensor in scan.tensors]

    def appended(self, vectors: Vectors) -> TensorVectors:
        """See `VectorStore`."""
        if self._base is None:
            return self._with(self._make_base(vectors))
        tail = self._tail or Growing(np.empty((0, self.dimension), np.float32))
        many = len(tail) + len(vectors) > max(_MOST_TAIL, self._base_rows // 4)
        if many and not self.stays_in_file:
            return self._with(self._make_base(np.concatenate([self.vectors(), vectors])))
        return replace(self, _tail=tail.append(self._rounded(vectors)))

    def kept(self, rows: Rows) -> TensorVectors:
        """See `VectorStore`."""
        return self._with(self._make_base(self.vectors(rows))) if len(rows) else self.emptied()

    def opened(self, saved: SavedVectors) -> TensorVectors:
        """See `VectorStore`."""
        vectors, budget = saved.vectors, self.options.memory_budget
        if not len(vectors):
            return self.emptied()
        if budget is not None and saved.file is not None and self._bytes_of(vectors) > budget:
            return self._with(self._stream(saved, budget))
        if self.options.dtype != "float32":
            saved.check_all()
        store = self._with(self._make_base(vectors))
        assert store._base is not None
        store._base.saved = saved
        return store

    def emptied(self) -> TensorVectors:
        """See `VectorStore`."""
        return TensorVectors(self.options)

    @property
    def stays_in_file(self) -> bool:
        """See `VectorStore`."""
        return self._base is not None and self._base.is_streamed

    def check(self) -> None:
        """See `VectorStore`."""
        if self._base is not None and self._base.saved is not None:
            self._base.saved.check_lengths()

    def merged(self) -> TensorVectors:
        """See `VectorStore`."""
        return self if self._tail is None else self._with(self._make_base(self.vectors()))

    def _with(self, base: _Base) -> TensorVectors:
        return TensorVectors(self.options, base)

    def _make_base(self, vectors: Vectors) -> _Base:
        """Take vectors; on a CPU and in float32 as they are, mapped if they come from a file."""
        options = self.options
        is_float32 = options.dtype == "float32"
        scan = make_scan(vectors, options.dtype, options.device)
        in_host = options.device == "cpu" if is_float32 else options.exact
        return _Base(scan, vectors if in_host else None)

    def _stream(self, saved: SavedVectors, budget: int) -> _Base:
        """Leave vectors in their file, of which no page stays longer than it is needed."""
        vectors, file = saved.vectors, saved.file
        assert file is not None
        file.resident = False
        row_bytes = 4 * vectors.shape[1]
        header = len(file) - vectors.nbytes

        def passed(start: int, count: int) -> None:
            file.drop(header + start * row_bytes, count * row_bytes)

        scan = make_streamed_scan(vectors, self.options.device, budget, passed)
        return _Base(scan, vectors, saved, is_streamed=True)

    def _bytes_of(self, vectors: Vectors) -> int:
        sizes = {"float32": 5, "int8": 1}  # The float32 tensor has an int8 copy beside it.
        keeps = self.options.exact and self.options.dtype != "float32"
        return vectors.size * (sizes.get(self.options.dtype, 2) + 4 * keeps)

    def _rounded(self, vectors: Vectors) -> Vectors:
        """Round vectors for good, if answers are those of the rounded ones."""
        if self.options.exact or self.options.dtype == "float32":
            return vectors
        scan = make_scan(vectors, self.options.dtype, "cpu")
        rounded: Vectors = scan.unscaled(scan.vectors.float(), None).numpy()
        return rounded

    def vectors(self, rows: Rows | None = None) -> Vectors:
        """See `VectorStore`."""
        base, tail = self._base, self._tail
        if base is None:
            return np.empty((0, 0), np.float32)
        if rows is None:
            if base.saved is not None:
                self.check()
                base.saved.check_all()
            everything = base.originals if base.originals is not None else self._from_device(None)
            return everything if tail is None else np.concatenate([everything, tail.rows])
        if tail is None or not len(rows) or rows.max() < self._base_rows:
            return self._from_base(rows)
        is_recent = rows >= self._base_rows
        result = np.empty((len(rows), self.dimension), np.float32)
        result[is_recent] = tail.rows[rows[is_recent] - self._base_rows]
        result[~is_recent] = self._from_base(rows[~is_recent])
        return result

    def _from_base(self, rows: Rows) -> Vectors:
        base = self._base
        assert base is not None
        if base.originals is None:
            return self._from_device(rows)
        if not base.is_streamed:
            if base.saved is not None:
                return base.saved.checked(rows)
            return base.originals.take(rows, axis=0)  # in half of the time of ``[rows]``
        # Single rows of a file, of which the system maps 64 kB around each.
        assert base.saved is not None and base.saved.file is not None
        result = np.empty((len(rows), self.dimension), np.float32)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            result[some] = base.saved.checked(rows[some])
            base.saved.file.drop()
        return result

    def _from_device(self, rows: Rows | None) -> Vectors:
        import torch

        assert self._base is not None
        scan = self._base.scan
        chosen = None if rows is None else torch.from_numpy(rows).to(scan.vectors.device)
        tensor = scan.vectors if chosen is None else scan.vectors.index_select(0, chosen)
        tensor = tensor.float()
        if self.options.dtype == "int8":
            tensor = scan.unscaled(tensor, chosen)
        vectors: Vectors = tensor.cpu().numpy()
        return vectors

    def storage(self) -> tuple[str, str, int]:
        """See `VectorStore`."""
        options, base = self.options, self._base
        nbytes = 0
        if base is not None:
            tensor = base.scan.vectors
            nbytes += tensor.numel() * tensor.element_size()
            if base.originals is not None and (base.is_streamed or options.dtype != "float32"):
                nbytes += base.originals.nbytes
        if self._tail is not None:
            nbytes += self._tail.rows.nbytes
        if self._caches.copy is not None:
            nbytes += self._caches.copy.scan.nbytes
        return options.device, options.dtype, nbytes

    def derived(self) -> dict[str, npt.NDArray[Any]]:
        """See `VectorStore`."""
        copy = ScannedCopy.of(self.vectors())
        tensors = zip(_COPY, copy.scan.tensors, strict=True)
        return {name: tensor.numpy() for name, tensor in tensors}

    def candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """See `VectorStore`."""
        base, options = self._base, self.options
        assert base is not None
        in_host = base.originals is not None and not base.is_streamed
        if allowed is not None and in_host and options.exact:
            rows = np.flatnonzero(allowed)
            if len(rows) <= _FEW_ALLOWED:
                return best_among(rows, queries, top_k, self.vectors)
        has_unchecked = self._has_unchecked()
        copies = has_unchecked or self._scans_copy(len(queries))
        is_direct = not has_unchecked and (len(self) <= FEW_ROWS or not copies)
        if len(queries) == 1 and in_host and options.dtype == "float32" and is_direct:
            return best_of_all(self._in_host(), queries[0], top_k, allowed)
        budget = options.memory_budget
        return find_candidates(
            self._scans(copies),
            queries,
            top_k,
            self.vectors,
            allowed,
            exact=options.exact or options.dtype == "float32",
            scratch_bytes=None if budget is None else budget // 4,
        )

    def _in_host(self) -> list[Vectors]:
        assert self._base is not None and self._base.originals is not None
        if self._base.saved is not None:
            self._base.saved.check_all()
        parts = [self._base.originals]
        return parts if self._tail is None else [*parts, self._tail.rows]

    def _has_unchecked(self) -> bool:
        """Whether a kept copy is scanned because checking it is less work than all vectors."""
        base, options = self._base, self.options
        if base is None or base.saved is None or base.is_streamed or not base.saved.has(_COPY):
            return False
        on_cpu = options.dtype == "float32" and options.device == "cpu"
        return on_cpu and not base.saved.is_checked_soon()

    def _scans_copy(self, queries: int) -> bool:
        """Whether an int8 copy is scanned for so many queries in place of a float32 tensor."""
        import torch

        options = self.options
        if options.dtype != "float32" or options.device != "cpu":
            return False
        return int8_product(torch, self.dimension, queries) is not None

    def _scans(self, copies: bool) -> list[Scan]:
        """Return what is scanned: all rows, in their order."""
        import torch

        base, tail = self._base, self._tail
        assert base is not None
        if copies and not base.is_streamed:
            copy = self._copy()
            scans = [copy.scan] if len(copy) else []
            if len(copy) < self._base_rows:
                assert base.originals is not None
                rest = torch.from_numpy(base.originals[len(copy) :])
                scans.append(Scan.of_floats(rest, len(copy)))
        else:
            if base.saved is not None:
                base.saved.check_all()
            copy, scans = None, [base.scan]
        start = max(self._base_rows, 0 if copy is None else len(copy))
        if tail is not None and start < len(self):
            scans.append(Scan.of_floats(self._tail_on_device()[start - self._base_rows :], start))
        return scans

    def _tail_on_device(self) -> Any:
        import torch

        assert self._tail is not None
        tail = torch.from_numpy(self._tail.rows)
        if self.options.device == "cpu":
            return tail
        known = self._caches.tail or Growing(tail[:0].to(self.options.device))
        if len(known) < len(tail):
            known = known.append(tail[len(known) :].to(self.options.device))
            self._caches.tail = known
        return known.rows[: len(tail)]

    def _copy(self) -> ScannedCopy:
        """Return the int8 copy; what was added since is rounded as soon as it is many rows."""
        caches, whole = self._caches, len(self) // BLOCK * BLOCK
        saved = None if self._base is None else self._base.saved
        copy = caches.copy
        if copy is None and saved is not None and saved.has(_COPY):
            copy = _copy_of(saved)
        if copy is None:
            copy = ScannedCopy.of(self._in_host()[0])
        if whole - len(copy) >= _ROUNDED_AT_ONCE:
            copy = copy.extended(self.vectors(np.arange(len(copy), whole)))
        caches.copy = copy
        return copy


def _copy_of(saved: SavedVectors) -> ScannedCopy | None:
    """Take the int8 copy out of an index, if it is what it should be."""
    import torch

    arrays = [saved.derived[name] for name in _COPY]
    rows, dimension = len(saved.vectors) // BLOCK * BLOCK, saved.vectors.shape[1]
    blocks = (rows // BLOCK,)
    shapes = [("int8", (rows, dimension)), ("float32", blocks), ("float32", blocks)]
    if [(array.dtype.name, array.shape) for array in arrays] != shapes:
        return None
    return ScannedCopy(*(torch.from_numpy(array) for array in arrays))
