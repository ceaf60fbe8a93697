"""``rag-demo index`` and ``add``: a source into an index."""

from __future__ import annotations

import hashlib
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rag_demo.commands.options import (
    Count,
    Embedding,
    dtype_option,
    embedding_options,
    folder_argument,
    load_manifest,
    made_by_option,
    model_option,
    progress_option,
    say,
    warn,
)
from rag_demo.corpus import STDIN, Document, Reading, Skipped, bytes_of, is_json_lines, read_source
from rag_demo.documents.passages import PASSAGE_CHARS
from rag_demo.errors import IndexFileError, OtherIndexError, SourceError
from rag_demo.printable import on_one_line

if TYPE_CHECKING:
    from rag_demo.store.document_table import DocumentTable
    from rag_demo.store.index_format import Manifest

__all__ = ["add", "index"]

_AND = " + "  # between the sources of an index
_UNKNOWN = "a program's texts"  # of an index that no command made
_OTHERS = "others"
_MOST_CHARS = 2000  # of the names of an index's sources; the manifest is small


def _reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--text-field",
            default="text",
            show_default=True,
            help="The field of JSON lines that holds the text.",
        ),
        click.option(
            "--chunk-size",
            type=Count(min=100),
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
@dtype_option
@embedding_options
@click.option("--yes", is_flag=True, help="Replace an index of another source or model.")
@progress_option
def index(
    source: str,
    out: Path,
    model: str | None,
    dtype: str,
    embedding: Embedding,
    yes: bool,
    show: str,
    **reading: Any,
) -> None:
    """Make an index of SOURCE, or bring it up to date.

    SOURCE is a folder, a file, an installed package's docstrings, or - for standard input. A
    folder's text, Markdown, reStructuredText, HTML, Python, notebooks, PDF and JSON lines are
    read; hidden files are not.
    """
    from rag_demo.store.index_format import refuse_foreign_folder

    _refuse_dangling(out)
    refuse_foreign_folder(out)  # Before minutes of work, not after them.
    run = _Run(source, show, reading)
    documents = run.documents()
    with embedding.open(model, dtype) as embedder:
        reused = run.ingest(documents, embedder, out, replace=yes)
    known = f", {reused} of them unchanged" if reused else ""
    count = _count(out)
    say(f"indexed {count} text{'s' * (count != 1)} of {run.name} in {out}{known}")
    run.tell_skipped()


@click.command()
@folder_argument
@click.argument("source")
@_reading_options
@made_by_option
@embedding_options
@progress_option
def add(
    folder: Path,
    source: str,
    model: str | None,
    embedding: Embedding,
    show: str,
    **reading: Any,
) -> None:
    """Add SOURCE to the index in DIR.

    A file that is in it already is replaced, and so is a text whose id is.
    """
    from rag_demo.encoding.model_identity import refuse_other_model
    from rag_demo.store.reader import SavedIndex

    manifest = load_manifest(folder)
    files: set[str | None] = set()  # that were read to their end
    run = _Run(source, show, {**reading, "lines_are_named": True, "on_read": files.add})
    new = run.documents()
    together = _together(manifest.source, run.source)
    _refuse_unfinished(folder, manifest, together)
    earlier = SavedIndex(folder).documents

    def renamed() -> Iterator[Document]:
        for document in new:
            # Two files of one name are two files; one that is added again replaces itself.
            name = document.id
            while _has_another(earlier, name, document.file):
                name += "~"
            yield document._replace(id=name)

    with embedding.open(model or manifest.model.name, manifest.model.dtype) as embedder:
        refuse_other_model(folder, manifest.model, embedder.identity)
        run.ingest(
            renamed(),
            embedder,
            folder,
            source=together,
            replace=True,
            keep=lambda document: document.file is None or document.file not in files,
        )
    say(f"added {run.name} to {folder}: {_count(folder)} texts, {manifest.count} before")
    run.tell_skipped()


def _has_another(documents: DocumentTable, name: str, file: str | None) -> bool:
    """Whether a document of a name was read from another file."""
    numbers = [number for _, number in documents.find([name])]
    return any(each.file != file for each in documents.get(numbers))


class _Run:
    """What one source is read and embedded with: the progress, and what was passed over."""

    def __init__(self, source: str, show: str, reading: dict[str, Any]) -> None:
        self._source, self._show = source, show
        self._skipped = Skipped()
        self._reading = Reading(**reading, on_file=self._file_was_read)
        self._counts_bytes = True
        self._bytes = 0  # of the files that were read since progress was told last
        self._total: int | None = None
        self.name = "standard input" if source == STDIN else source
        self._begins = ""

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
        begins = f"{first.id}\n{first.text}".encode("utf-8", "surrogatepass")
        self._begins = hashlib.sha256(begins).hexdigest()[:8]
        return itertools.chain([first], found)

    @property
    def source(self) -> str:
        """What an index remembers that it was made of: the same from every folder.

        What comes through a pipe has no name, and is known by how it begins.
        """
        if self._source == STDIN:
            return f"{self.name} ({self._begins})"
        path = Path(self._source)
        return str(path.resolve()) if path.exists() else self.name

    def ingest(
        self, documents: Iterator[Document], embedder: Any, folder: Path, **options: Any
    ) -> int:
        """Embed documents into an index; returns how many of them were there unchanged.

        Asks before it replaces another index, where somebody can answer.

        Args:
            documents: What `documents` returned.
            embedder: The model.
            folder: Of the index.
            **options: Of `rag_demo.ingest.ingest`.
        """
        options = {"source": self.source, **options}
        try:
            return self._ingest(documents, embedder, folder, options)
        except OtherIndexError as error:  # Nothing has been read or embedded yet.
            if not sys.stdin.isatty():
                raise
            click.confirm(f"{on_one_line(error)}. Replace it?", abort=True, err=True)
        return self._ingest(documents, embedder, folder, {**options, "replace": True})

    def _ingest(
        self, documents: Iterator[Document], embedder: Any, folder: Path, options: dict[str, Any]
    ) -> int:
        from rag_demo.console import progress
        from rag_demo.ingest import ingest

        with progress("embedding", self._total, self._show) as advance:

            def on_progress(count: int) -> None:
                part, self._bytes = self._bytes, 0
                advance(count, part if self._counts_bytes else None)

            done = ingest(documents, embedder, folder, on_progress=on_progress, **options)
        if not done.finished:
            self._tell_interrupted(folder)
            raise click.Abort
        return done.reused

    @staticmethod
    def _tell_interrupted(folder: Path) -> None:
        from rag_demo.store.index_format import DATABASE

        if (folder / DATABASE).exists():
            there = f"{_count(folder)} texts are in {folder}"
            warn(f"interrupted; {there}, and the same command goes on from there")
        else:  # Before the first commit.
            warn(f"interrupted before anything was saved; there is no index in {folder} yet")

    def tell_skipped(self) -> None:
        """Say what was passed over."""
        if len(self._skipped):
            warn(self._skipped)

    def _file_was_read(self, nbytes: int) -> None:
        self._bytes += nbytes


def _together(earlier: str | None, source: str) -> str:
    """Name the sources of an index to which one more is added.

    It is not of one source any more: indexing that one again would drop the others.
    """
    together = _AND.join(dict.fromkeys([*(earlier or _UNKNOWN).split(_AND), source]))
    if len(together) <= _MOST_CHARS:
        return together
    return _AND.join([together[:_MOST_CHARS].rpartition(_AND)[0] or _UNKNOWN, _OTHERS])


def _refuse_unfinished(folder: Path, manifest: Manifest, together: str) -> None:
    """Refuse to add to a part of something, which would pass for all of it then."""
    if manifest.finished or manifest.source == together:
        return
    interrupted = (manifest.source or _UNKNOWN).split(_AND)[-1]
    raise IndexFileError(
        f"'{folder}' holds only a part of {interrupted}, which was interrupted; "
        "repeat that command first, it goes on from there"
    )


def _count(folder: Path) -> int:
    return load_manifest(folder).count


def _refuse_dangling(out: Path) -> None:
    if out.is_symlink() and not out.exists():
        raise IndexFileError(
            f"'{out}' is a link to '{out.readlink()}', which is not there; name another folder"
        )
