"""Ingestion: read, embed and write documents, and embed only new and changed ones.

So an interrupted run can continue, and a changed folder can be indexed again cheaply.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_demo import errors
from rag_demo.encoding import embedder
from rag_demo.encoding.embedder import BasicEmbedder
from rag_demo.errors import short_repr
from rag_demo.reading.document import Document
from rag_demo.reading.passages import passages_of, with_title
from rag_demo.search_request import check_chunks, check_documents
from rag_demo.stores.address import as_place
from rag_demo.stores.index_folder import open_writer, read_manifest
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.stores.words import check_language
from torch_utils import exit_on_signals

if TYPE_CHECKING:
    from rag_demo.stores.postgres import PostgresUrl

__all__ = ["Ingested", "embed", "exit_on_sigterm", "ingest"]

COMMIT_S = 2.0  # about the time between two commits
_FEWEST, _MOST = 32, 1024  # documents of a commit
_MOST_CHARS = 1 << 21  # of a commit; the last document may exceed it


def embed(
    documents: Sequence[Document],
    embedding_model: BasicEmbedder,
    *,
    passages: bool = True,
    chunk_size: int | None = None,
    chunk_overlap: int = 0,
    on_progress: Callable[[int], object] | None = None,
    on_bad: Callable[[int, str], object] | None = None,
) -> EmbeddedBatch:
    """Embed documents: the step between reading and writing, in any process.

    A passage without a usable vector is left out.

    Args:
        documents: Documents with different ids.
        embedding_model: The embedding model.
        passages, chunk_size, chunk_overlap, on_progress: See `Retriever.add`.
        on_bad: Called with the place of a document that has no usable vector, and the reason; it
            is left out. By default it is an error.

    Raises:
        ModelError: A document has no usable vector, also a ValueError, or none of them has.
    """
    check_chunks(chunk_size, chunk_overlap)
    texts = [each.text for each in documents]
    titles = [each.metadata.get("title") for each in documents]
    parts: list[list[tuple[int, int]]] = [[] for _ in documents]
    if passages:
        lengths = partial(embedder.lengths, embedding_model)
        parts = passages_of(texts, titles, lengths, chunk_size, chunk_overlap)
    places = [place for place, cuts in enumerate(parts) for _ in range(1 + len(cuts))]
    bounds = [span for cuts in parts for span in [(0, 0), *cuts]]
    texts = [
        with_title(texts[place][start : stop or None], titles[place])
        for place, (start, stop) in zip(places, bounds, strict=True)
    ]
    owners, spans = np.asarray(places, np.int64), np.asarray(bounds, np.int32).reshape(-1, 2)
    done = 0

    def progress(count: int) -> None:
        """Turn progress in embedded texts into progress in documents."""
        nonlocal done
        before, done = done * len(documents) // len(texts), done + count
        assert on_progress is not None
        on_progress(done * len(documents) // len(texts) - before)

    identity = embedder.known_identity(embedding_model)
    try:
        vectors = embedder.embed_documents(embedding_model, texts, on_progress and progress)
        return EmbeddedBatch(documents, owners, spans, vectors, identity)
    except errors.BadVectorsError as error:
        rows, vectors = error.rows, error.vectors
    good = np.setdiff1d(np.arange(len(owners)), list(rows))
    kept, owners = np.unique(owners[good], return_inverse=True)
    bad = {places[row]: what for row, what in rows.items() if places[row] not in set(kept.tolist())}
    if not len(kept):
        embedder.check_works(embedding_model)  # Else all texts would be skipped for its fault.
    for place, what in bad.items():
        name = short_repr(documents[place].id) if documents[place].id else str(place)
        if on_bad is None:
            raise errors.BadVectorsError({place: what}, vectors, f"the vector of text {name}")
        on_bad(place, f"with a vector that is {what}")
    some = [documents[place] for place in kept.tolist()]
    return EmbeddedBatch(some, owners, spans[good], vectors[good], identity)


@dataclass(frozen=True)
class Ingested:
    """The result of an ingestion.

    Attributes:
        embedded: How many documents were embedded.
        reused: How many documents the index already had.
        skipped: The ids of documents that the model has no vector for, with the reason. They are
            not in the index.
    """

    embedded: int
    reused: int
    skipped: Mapping[str, str] = field(default_factory=dict)


def ingest(
    documents: Iterable[Document],
    embedding_model: BasicEmbedder,
    folder: str | Path | PostgresUrl,
    *,
    source: str | None = None,
    source_after: str | None = None,
    replace: bool = False,
    files: Callable[[], Collection[str]] | None = None,
    based_on: str | None = None,
    language: str | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Ingested:
    """Index documents into a folder.

    About every two seconds, the embedded documents are committed and can be searched. So Ctrl-C,
    an error, SIGTERM or SIGKILL loses at most that much work. In the main thread, an unhandled
    SIGTERM becomes a SystemExit. Documents of an earlier index stay until a run has finished; those
    of a damaged index, or of another model with ``replace``, go with the first commit.

    Args:
        documents: The documents. Their ids must differ; each id takes about 100 bytes of memory.
        embedding_model: The embedding model. It embeds new and changed documents only.
        folder: The folder of the index, or its ``postgresql://`` URL in a database.
        source: A description of the source, which is stored in the index.
        source_after: The description that a complete run leaves; by default ``source``.
        replace: Whether to replace an index of another source or another model.
        files: Returns, at the end, the files whose other documents are removed; by default all
            other documents are, and a damaged index of the same source is made again.
        based_on: The ``commit`` of the manifest that the documents were chosen for; None for any.
        language: The language of stems in the full text, such as "german"; by default that of the
            index, or "english".
        on_progress: Called with the number of documents processed since the last call.

    Returns:
        How many documents were embedded and reused.

    Raises:
        ModelError: The model returned too few vectors, or it has no vector for any text.
        OtherIndexError: The folder holds an index of another source or another model. Nothing
            was embedded.
        IndexChangedError: The index is not the one of ``based_on``.
        DamagedIndexError: The index is damaged, and may hold other documents than these.
        IndexFileError: The folder holds something else, another process is writing into it, or
            it cannot be written; or a document is invalid or its id is repeated. The index stays
            as it was after the last commit.
    """
    check_language(language or "none")
    place = as_place(folder)
    opened: AbstractContextManager[Any]
    if isinstance(place, Path):
        may_start_over = replace
        with suppress(errors.IndexFileError):
            may_start_over = replace or read_manifest(place).source == source
        may_start_over = may_start_over and files is None  # Then these documents are all.
        opened = open_writer(place, start_over=may_start_over, check=True)
    else:
        from rag_demo.stores.postgres import PostgresStore

        opened = PostgresStore(place)
    with exit_on_sigterm(), opened as writer:
        known = writer.manifest
        if based_on is not None and known.commit != based_on:
            raise errors.IndexChangedError(f"another program has changed '{place}'; run again")
        if (known.count or known.source) and not replace and known.source != source:
            what = f"the index of {known.source}" if known.source else "an index made by a program"
            raise _other(place, f"{what}, not of {source or 'documents from a program'}")
        model = embedder.identity_of(embedding_model)
        if known.model is None or not known.model.is_same(model):
            if known.count and not replace:
                raise _other(place, f"vectors of the model {known.model}, not of {model}")
            writer.clear(model)
        elif known.model != model:
            writer.use_model(model)
        if language is not None:
            writer.use_language(language)
        ids: set[str] = set()
        skipped: dict[str, str] = {}
        embedded = reused = 0
        for batch in _batches(documents, ids):
            if new := _new_of(batch, writer):
                bad: dict[int, str] = {}
                try:
                    writer.upsert(embed(new, embedding_model, on_bad=bad.__setitem__))
                except ValueError as error:
                    raise errors.ModelError(f"the documents cannot be embedded: {error}") from error
                skipped |= {new[place].id: what for place, what in bad.items()}
                embedded += len(new) - len(bad)
            reused += len(batch) - len(new)
            writer.keep(source, finished=False)
            on_progress(len(batch))
        others = writer.matching(None) if files is None else writer.of_files(list(files()))
        writer.delete([name for name in others if name not in ids or name in skipped])
        writer.keep(source if source_after is None else source_after, finished=True)
        return Ingested(embedded, reused, skipped)


def exit_on_sigterm() -> AbstractContextManager[object]:
    """Make SIGTERM raise SystemExit, if the program does not handle it."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        return exit_on_signals(signal.SIGTERM)
    return nullcontext()


def _other(folder: object, what: str) -> errors.OtherIndexError:
    return errors.OtherIndexError(
        f"'{folder}' holds {what}; name another folder, add to this one with rag-demo add, "
        "or replace all that it holds with --yes"
    )


def _new_of(batch: list[Document], writer: Any) -> list[Document]:
    """Return the documents to embed, after a change of others of which the text is known."""
    new, changed = [], []
    for document, before in zip(batch, writer.get([each.id for each in batch]), strict=True):
        titles = [each.metadata.get("title") for each in (before or document, document)]
        if before is None or before.text != document.text or titles[0] != titles[1]:
            new.append(document)  # The vectors depend on these.
        elif before.file != document.file or (
            json.dumps(before.metadata) != json.dumps(document.metadata)  # 1 and True differ.
        ):
            changed.append(document)
    if changed:
        writer.upsert(EmbeddedBatch.without_vectors(changed))
    return new


def _batches(documents: Iterable[Document], ids: set[str]) -> Iterator[list[Document]]:
    """Yield batches of documents that take about `COMMIT_S` each, and collect their ids."""
    size, chars = _FEWEST, 0
    batch: list[Document] = []
    for document in documents:
        try:
            (checked,) = check_documents([document.text], [document.metadata], [document.id])
            # A lone surrogate is an error.
            f"{document.id}{document.text}{document.file}".encode()
            batch.append(checked._replace(file=document.file))
        except (AttributeError, TypeError, ValueError) as error:
            raise errors.IndexFileError(f"a document cannot be indexed: {error}") from None
        if document.id in ids:
            raise errors.IndexFileError(f"the id {document.id!r} appears twice; ids must differ")
        ids.add(document.id)
        chars += len(document.text)
        if len(batch) < size and chars < _MOST_CHARS:
            continue
        started_s = time.monotonic()
        yield batch
        taken_s = time.monotonic() - started_s
        size = max(1, min(_MOST, 2 * size, int(size * COMMIT_S / taken_s)))
        batch, chars = [], 0
    if batch:
        yield batch
