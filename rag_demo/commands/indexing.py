"""``rag-demo index`` and ``add``: a source into an index."""

from __future__ import annotations

import io
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    batch_size_option,
    cache_option,
    cache_path,
    device_option,
    dtype_option,
    folder_argument,
    manifest_of,
    model_option,
    progress_option,
    say,
    warn,
    workers_option,
)
from rag_demo.corpus import STDIN, Document, Reading, Skipped, bytes_of, is_json_lines, read_source
from rag_demo.documents.passages import PASSAGE_CHARS
from rag_demo.errors import IndexFileError, OtherIndexError, SourceError
from rag_demo.printable import on_one_line

__all__ = ["add", "index"]

_AND = " + "  # between the sources of an index


def _reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--text-field", default="text", show_default=True, help="Of JSON lines."),
        click.option(
            "--chunk-size",
            type=click.IntRange(min=100),
            default=PASSAGE_CHARS,
            show_default=True,
            help="Characters of the passages that texts are cut into.",
        ),
        click.option(
            "--exclude", multiple=True, metavar="GLOB", help="Leave out such files and folders."
        ),
        click.option(
            "--include",
            multiple=True,
            metavar="GLOB",
            help="Of a folder, read such files only, as plain text if of no known kind.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@_reading_options
@model_option
@device_option
@dtype_option
@workers_option
@batch_size_option
@cache_option
@click.option("--yes", is_flag=True, help="Replace an index of another source or model.")
@progress_option
def index(
    source: str,
    out: Path,
    model: str | None,
    device: str | None,
    dtype: str,
    workers: int,
    batch_size: int | None,
    cache: bool,
    yes: bool,
    show: str,
    **reading: Any,
) -> None:
    """Index SOURCE: a folder, a file, an installed package's docstrings, or - for standard input.

    A folder's text, Markdown, reStructuredText, HTML, Python, notebooks, PDF and JSON lines are
    read; hidden files are not.
    """
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.index import refuse_foreign_folder

    _refuse_dangling(out)
    refuse_foreign_folder(out)  # Before minutes of work, not after them.
    run = _Run(source, show, reading)
    documents = run.documents()
    embedder = EmbeddingModel(
        model,
        device=device,
        dtype=dtype,
        cache=cache_path(cache),
        workers=workers,
        batch_size=batch_size,
    )
    with embedder:
        reused = run.ingest(documents, embedder, out, replace=yes)
    known = f", {reused} of them unchanged" if reused else ""
    count = _count(out)
    say(f"indexed {count} text{'s' * (count != 1)} of {run.name} in {out}{known}")
    run.tell_skipped()


@click.command()
@folder_argument
@click.argument("source")
@_reading_options
@device_option
@workers_option
@batch_size_option
@cache_option
@progress_option
def add(
    folder: Path,
    source: str,
    device: str | None,
    workers: int,
    batch_size: int | None,
    cache: bool,
    show: str,
    **reading: Any,
) -> None:
    """Add SOURCE to the index in DIR; a text whose id is there already replaces that one."""
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.index import read_index, refuse_other_index

    manifest = manifest_of(folder)
    before = _count(folder)
    run = _Run(source, show, {**reading, "lines_are_named": True})
    new = run.documents()

    def everything() -> Iterator[Document]:
        earlier = read_index(folder).documents
        path_of = {each.id: each.metadata.get("path") for each in earlier.stream()}
        names, paths = set(), set()
        for document in new:
            # Two files of one name are two files; one that is added again replaces itself.
            name, path = document.id, document.metadata.get("path")
            while path_of.get(name, path) != path:
                name += "~"
            names.add(name)
            paths.add(path)
            yield document._replace(id=name)
        paths.discard(None)
        for document in earlier.stream():
            if document.id not in names and document.metadata.get("path") not in paths:
                yield document

    embedder = EmbeddingModel(
        manifest["model"],
        dtype=manifest.get("dtype"),
        device=device,
        cache=cache_path(cache),
        workers=workers,
        batch_size=batch_size,
    )
    with embedder:
        earlier = manifest.get("source")
        refuse_other_index(folder, model=embedder.identity, source=earlier)
        # The index is not of one source any more: indexing that again would drop the other.
        sources = dict.fromkeys([*(earlier or "").split(_AND), run.source])
        source = _AND.join(filter(None, sources))
        run.ingest(everything(), embedder, folder, source=source, replace=True)
    say(f"added {run.name} to {folder}: {_count(folder)} texts, {before} before")
    run.tell_skipped()


class _Run:
    """What one source is read and embedded with: the progress, and what was passed over."""

    def __init__(self, source: str, show: str, reading: dict[str, Any]) -> None:
        self._source, self._show = source, show
        self._skipped = Skipped()
        self._reading = Reading(**reading, on_file=self._file_was_read)
        self._read = self._embedded = 0
        self._counts_bytes = True
        # How many texts were read when a file was at its end, and its bytes; not embedded yet.
        self._ends: deque[tuple[int, int]] = deque()
        self._total: int | None = None
        self.name = "standard input" if source == STDIN else source

    def documents(self) -> Iterator[Document]:
        """Begin to read, so far that it is known that there is something.

        JSON lines are read to their end, and again: a bad line is found before hours of work.
        """
        from rag_demo.console import counting

        with counting(f"looking at {self.name}", self._show) as count:
            if self._source != STDIN:
                self._total = bytes_of(self._source, self._reading, count)
            if is_json_lines(self._source):
                self._total, self._counts_bytes = 0, False
                for _ in read_source(self._source, Skipped(), self._reading):
                    self._total += 1
                    count(1)
        stdin: Any = sys.stdin.buffer if self._source == STDIN else None
        if stdin is not None and not isinstance(stdin, io.BufferedReader):
            stdin = io.BufferedReader(stdin)
        found = read_source(self._source, self._skipped, self._reading, stdin=stdin)
        first = next(found, None)
        if first is None:
            passed_over = f" ({self._skipped})" if len(self._skipped) else ""
            raise SourceError(
                f"{self.name} holds no text to index{passed_over}; name another folder or package"
            )
        return self._counted(itertools.chain([first], found))

    @property
    def source(self) -> str:
        """What an index remembers that it was made of: the same from every folder."""
        path = Path(self._source)
        return str(path.resolve()) if path.exists() and self._source != STDIN else self.name

    def ingest(
        self,
        documents: Iterator[Document],
        embedder: Any,
        folder: Path,
        *,
        source: str | None = None,
        replace: bool = False,
    ) -> int:
        """Embed documents into an index; returns how many of them were there unchanged.

        Asks before it replaces another index, where somebody can answer.
        """
        of = source or self.source
        try:
            return self._ingest(documents, embedder, folder, of, replace=replace)
        except OtherIndexError as error:  # Nothing has been read or embedded yet.
            if not sys.stdin.isatty():
                raise
            click.confirm(f"{on_one_line(error)}. Replace it?", abort=True, err=True)
        return self._ingest(documents, embedder, folder, of, replace=True)

    def _ingest(
        self,
        documents: Iterator[Document],
        embedder: Any,
        folder: Path,
        source: str,
        *,
        replace: bool,
    ) -> int:
        from rag_demo.console import progress
        from rag_demo.ingest import ingest

        with progress("embedding", self._total, self._show) as advance:
            done = ingest(
                documents,
                embedder,
                folder,
                source=source,
                replace=replace,
                on_progress=lambda count: advance(count, self._bytes_done(count)),
            )
        if not done.finished:
            warn(
                f"interrupted; {done.embedded + done.reused} texts are in {folder}, "
                "and the same command goes on from there"
            )
            raise click.Abort
        return done.reused

    def tell_skipped(self) -> None:
        """Say what was passed over."""
        if len(self._skipped):
            warn(self._skipped)

    def _file_was_read(self, nbytes: int) -> None:
        self._ends.append((self._read, nbytes))

    def _counted(self, documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            self._read += 1
            yield document

    def _bytes_done(self, count: int) -> int | None:
        """Return the bytes of the files that are embedded now; None where texts are counted."""
        if not self._counts_bytes:
            return None
        self._embedded += count
        done = 0
        while self._ends and self._ends[0][0] <= self._embedded:
            done += self._ends.popleft()[1]
        return done


def _count(folder: Path) -> int:
    from rag_demo.index import read_index

    return len(read_index(folder).documents)


def _refuse_dangling(out: Path) -> None:
    if out.is_symlink() and not out.exists():
        raise IndexFileError(
            f"{out} is a link to {out.readlink()}, which is not there; name another folder"
        )
