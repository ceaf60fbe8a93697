"""``rag-demo index`` and ``add``: put a source into an index."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rag_demo.commands.options import (
    Embedding,
    as_place,
    dtype_option,
    embedding_options,
    folder_argument,
    load_manifest,
    made_by_option,
    model_option,
    open_database,
    open_saved,
    progress_option,
    ray_options,
    say,
    warn,
)
from rag_demo.documents.files import full_path
from rag_demo.documents.passages import PASSAGE_CHARS
from rag_demo.documents.sources import (
    STDIN,
    Document,
    Reading,
    Skipped,
    is_json_lines,
    read_source,
    size_of_source,
)
from rag_demo.errors import IndexFileError, OtherIndexError, SourceError
from rag_demo.printable import on_one_line

if TYPE_CHECKING:
    from rag_demo.encoding.model_identity import ModelIdentity
    from rag_demo.stores.index_format import Manifest

_AND = " + "  # between the sources of an index
_UNKNOWN = "a program's texts"  # the source of an index that no command made


def _reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--text-field",
            default="text",
            show_default=True,
            help="Field of JSON lines that has the text.",
        ),
        click.option(
            "--chunk-size",
            type=click.IntRange(min=100),
            default=PASSAGE_CHARS,
            show_default=True,
            help="Length of a passage, in characters.",
        ),
        click.option(
            "--chunk-overlap",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Characters that a passage shares with the one before.",
        ),
        click.option(
            "--exclude", multiple=True, metavar="GLOB", help="Skip matching files and folders."
        ),
        click.option(
            "--include",
            multiple=True,
            metavar="GLOB",
            help="Read only matching files of a folder; read unsupported types as plain text.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source")
@click.option(
    "--out", required=True, callback=as_place, help="Folder of the index, or postgresql://..."
)
@_reading_options
@model_option
@dtype_option
@embedding_options
@click.option(
    "--language",
    help="Language of stems, such as german; none keeps words. [default: english]",
)
@ray_options
@click.option("--yes", is_flag=True, help="Replace an index of another source or model.")
@progress_option
def index(
    source: str,
    out: Path,
    model: str | None,
    dtype: str,
    embedding: Embedding,
    language: str | None,
    on: str,
    address: str | None,
    actors: int | None,
    yes: bool,
    show: str,
    **reading: Any,
) -> None:
    """Create an index of SOURCE, or update it.

    SOURCE is a folder, a file, or - for standard input. It reads text, Markdown,
    reStructuredText, HTML, Python, notebooks, PDF and JSON lines, and skips hidden files.
    """
    from rag_demo.stores.index_format import refuse_foreign_folder
    from rag_demo.stores.words import check_language

    if not isinstance(out, Path):
        open_database(out, create=True).close()  # Before minutes of work.
    elif out.is_symlink() and not out.exists():
        raise IndexFileError(
            f"'{out}' is a link to '{out.readlink()}', which is not there; name another folder"
        )
    else:
        refuse_foreign_folder(out)
    try:
        check_language(language or "none")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    run = _Run(source, show, reading)
    documents = run.documents()
    embedder: Any = (
        embedding.open(model, dtype)
        if on == "local"
        else embedding.open_on_ray(model, dtype, address=address, actors=actors)
    )
    with embedder:
        reused = run.ingest(documents, embedder, out, replace=yes, language=language)
    known = f", {reused} of them unchanged" if reused else ""
    count = _count(out)
    say(f"indexed {count} text{'s' * (count != 1)} of {run.name} in {out}{known}")
    run.report_skipped()


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

    A file that was added before is replaced, and so is a text with the same id.
    """
    from rag_demo.encoding.model_identity import refuse_other_model

    earlier = open_saved(folder)
    manifest = earlier.manifest  # All is decided on this state.
    files: set[str] = set()  # read to their end
    run = _Run(source, show, {**reading, "lines_are_named": True, "on_read": files.add})
    new = run.documents()
    together = _AND.join(dict.fromkeys([*(manifest.source or _UNKNOWN).split(_AND), run.source]))
    _refuse_unfinished(folder, manifest, together)
    made_by: ModelIdentity | None = manifest.model

    def renamed() -> Iterator[Document]:
        for document in new:
            # Different files may have the same name; a file that is added again keeps its ids.
            name = document.id
            while any(each.file != document.file for each in earlier.known([name])[1].values()):
                name += "~"
            yield document._replace(id=name)

    name, kind = (made_by.name, made_by.dtype) if made_by is not None else (None, None)
    with contextlib.closing(earlier), embedding.open(model or name, kind) as embedder:
        if made_by is not None:
            refuse_other_model(folder, made_by, embedder.identity)
        run.ingest(
            renamed(),
            embedder,
            folder,
            source=together,
            replace=True,
            covers_all=False,
            based_on=manifest.commit,
            files=lambda: files | _missing_files(earlier, source),
        )
    say(f"added {run.name} to {folder}: {_count(folder)} texts, {manifest.count} before")
    run.report_skipped()


def _missing_files(earlier: Any, source: str) -> set[str]:
    """Return the files of a folder whose texts are in the index, and that are gone."""
    folder = f"{full_path(source)}{os.sep}"
    return {file for file in earlier.files_in(folder) if not Path(file).exists()}


class _Run:
    """One run: it reads and embeds a source, and shows progress."""

    def __init__(self, source: str, show: str, reading: dict[str, Any]) -> None:
        self._source, self._show = source, show
        self._skipped = Skipped()
        self._reading = Reading(**reading, on_file=self._file_was_read)
        self._counts_bytes = True
        self._bytes = 0  # read since the last report of progress
        self._total: int | None = None
        self.name = "standard input" if source == STDIN else source
        self._begins = ""

    def documents(self) -> Iterator[Document]:
        """Return the documents, after checking that there is one.

        JSON lines are read twice, so that a bad line is found before hours of work.

        Raises:
            SourceError: The source is missing, empty or invalid.
        """
        from rag_demo.console import progress

        with progress(f"reading {self.name}", None, self._show, transient=True) as count:
            if self._source != STDIN:
                self._total = size_of_source(self._source, self._reading, count)
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
            skipped = f" ({self._skipped})" if len(self._skipped) else ""
            raise SourceError(
                f"{self.name} holds no text to index{skipped}; name another folder or file"
            )
        begins = f"{first.id}\n{first.text}".encode("utf-8", "surrogatepass")
        self._begins = hashlib.sha256(begins).hexdigest()[:8]
        return itertools.chain([first], found)

    @property
    def source(self) -> str:
        """The name of the source in an index; a full path, if it is a file or folder.

        A pipe has no name, and is identified by its beginning.
        """
        if self._source == STDIN:
            return f"{self.name} ({self._begins})"
        path = Path(self._source)
        return str(path.resolve()) if path.exists() else self.name

    def ingest(
        self, documents: Iterator[Document], embedder: Any, folder: Path, **options: Any
    ) -> int:
        """Embed documents into an index, and ask at a terminal before replacing another index.

        Args:
            documents: The result of `documents`.
            embedder: The embedding model.
            folder: The folder of the index.
            **options: Options of `rag_demo.stores.ingest.ingest`.

        Returns:
            How many documents were unchanged.
        """
        options = {"source": self.source, **options}
        try:
            return self._ingest(documents, embedder, folder, options)
        except OtherIndexError as error:  # Nothing has been embedded yet.
            if not sys.stdin.isatty():
                raise OtherIndexError(f"{error} with --yes") from None
            click.confirm(f"{on_one_line(error)}. Replace it?", abort=True, err=True)
        return self._ingest(documents, embedder, folder, {**options, "replace": True})

    def _ingest(
        self, documents: Iterator[Document], embedder: Any, folder: Path, options: dict[str, Any]
    ) -> int:
        from rag_demo.console import progress
        from rag_demo.stores.ingest import ingest

        try:
            with progress("embedding", self._total, self._show) as advance:

                def on_progress(count: int) -> None:
                    part, self._bytes = self._bytes, 0
                    advance(part if self._counts_bytes else count)

                done = ingest(documents, embedder, folder, on_progress=on_progress, **options)
                return done.reused
        except KeyboardInterrupt:
            self._report_interrupt(folder)
            raise click.Abort from None

    @staticmethod
    def _report_interrupt(folder: Path) -> None:
        from rag_demo.stores.index_format import DATABASE

        if not isinstance(folder, Path) or (folder / DATABASE).exists():
            texts = f"{_count(folder)} texts are in {folder}"
            warn(f"interrupted; {texts}; run the same command again to continue")
        else:
            warn(f"interrupted before anything was saved; there is no index in {folder} yet")

    def report_skipped(self) -> None:
        """Print what was skipped."""
        if len(self._skipped):
            warn(self._skipped)

    def _file_was_read(self, nbytes: int) -> None:
        self._bytes += nbytes


def _refuse_unfinished(folder: Path, manifest: Manifest, together: str) -> None:
    """Refuse to add to an incomplete index, which would then look complete."""
    if manifest.finished or manifest.source == together:
        return
    interrupted = (manifest.source or _UNKNOWN).split(_AND)[-1]
    raise IndexFileError(
        f"'{folder}' contains only part of {interrupted}, because its command was interrupted; "
        "run that command again first"
    )


def _count(folder: Path) -> int:
    return load_manifest(folder).count
