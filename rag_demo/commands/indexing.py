"""``rag-demo index`` and ``add``: put a source into an index."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from rag_demo.commands import options
from rag_demo.encoding.model_identity import DEFAULT_MODEL, full_name
from rag_demo.errors import IndexFileError, RagDemoError, SourceError
from rag_demo.open_index import load_manifest, open_store
from rag_demo.reading.document import Document
from rag_demo.reading.passages import PASSAGE_CHARS
from rag_demo.reading.sources import STDIN, Reading, Skipped, is_read, read_source

# Families of models that are trained with prompts, and most of which register none.
_NEEDS_PROMPTS = re.compile(r"(^|[/_-])(e5|bge|nomic)\b", re.IGNORECASE)
_OF_ACTORS = ("dtype", "batch_size", "prompts", "truncate_dim", "trust_remote_code")
_AND = " + "  # between the sources of an index
_UNKNOWN = "a program's texts"  # the source of an index that no command made

_globs = partial(click.option, multiple=True, metavar="GLOB")
_OPTIONS = (
    _globs("--include", help="Read only these files of a folder; unknown types as plain text."),
    _globs("--exclude", help="Skip these files and folders."),
    _globs("--as-text", help="Read these files as plain text."),
    click.option(
        "--chunk-size", type=click.IntRange(100), default=PASSAGE_CHARS, help="Length of passages."
    ),
    click.option("--chunk-overlap", type=click.IntRange(0), default=0, help="Characters shared."),
    click.option("--text-field", default="text", help="Field or column that has the text."),
    options.trust_option,
    options.device_option,
    click.option("--batch-size", type=click.IntRange(1), help="Texts embedded at once."),
    click.option("--cache/--no-cache", default=True, help="Store embeddings on disk, or do not."),
)


def _ingestion_options(command: Any) -> Any:
    """Add the options that both commands have, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("source")
@options.place_option("--out", required=True, help="Folder of the index, or postgresql://...")
@options.model_option
@options.dtype_option
@click.option("--query-prompt", metavar="TEXT", help="Put before queries, as 'query: ' for e5.")
@click.option("--document-prompt", metavar="TEXT", help="Put before texts, as 'passage: ' for e5.")
@click.option("--truncate-dim", type=click.IntRange(1), help="Numbers of a vector that are kept.")
@_ingestion_options
@click.option("--language", help="Stems, such as german; none keeps words. [default: english]")
@click.option("--address", help="Embed on this Ray cluster, in one actor for each CPU or GPU.")
@click.option("--actors", type=click.IntRange(1), help="Embed in so many actors of Ray.")
@click.option("--yes", is_flag=True, help="Replace an index of another source or model.")
def index(source: str, out: Any, language: str | None, yes: bool, **embedding: Any) -> None:
    """Create an index of SOURCE, or update it.

    SOURCE is a folder, a file, or - for standard input. It reads text, Markdown,
    reStructuredText, HTML, Python, notebooks, PDF, JSON lines, JSON and CSV, and skips hidden
    files.
    """
    prompts = {kind: embedding.pop(f"{kind}_prompt") for kind in ("query", "document")}
    embedding["prompts"] = {kind: text for kind, text in prompts.items() if text is not None}
    _restore_options(out, embedding)
    ray = {name: embedding.pop(name) for name in ("address", "actors")}
    is_on_ray = any(ray.values())
    if is_on_ray and embedding["device"] is not None:
        raise click.UsageError("--device has no effect on Ray; actors use GPUs if there are any")
    skipped = Skipped()
    name, documents = _read(source, skipped, embedding)
    if is_on_ray:
        from rag_demo.ray_embedder import RayEmbedder

        ray |= {name: embedding[name] for name in _OF_ACTORS}
        embedder: Any = RayEmbedder(model_name_or_path=embedding["model"], **ray)
    else:
        embedder = options.open_model(**embedding)
    with embedder:
        reused = _ingest(
            documents, embedder, out, skipped, source=name, replace=yes, language=language
        )
        if not is_on_ray and _NEEDS_PROMPTS.search(embedder.name) and not embedder.has_prompts:
            options.warn(
                f"{embedder.name} registers no prompts; if its description names some, pass "
                "--query-prompt and --document-prompt, with --yes"
            )
    known = f", {reused} of them unchanged" if reused else ""
    count = load_manifest(out).count
    options.say(f"indexed {count} text{'s' * (count != 1)} of {name} in {out}{known}")
    if not is_on_ray and embedder.device == "cpu" and embedding["dtype"] == "float32":
        from rag_demo.exact_search.search import bfloat16_units

        if "amx" in bfloat16_units() and not reused:
            how = "--dtype bfloat16 --yes"
            options.say(f"bfloat16 is several times faster on this processor: {how}")
    if skipped:
        options.warn(skipped)


def _restore_options(out: Any, embedding: dict[str, Any]) -> None:
    """Take the prompts and the dimension of the index, where the command names none."""
    with contextlib.suppress(RagDemoError):  # Without an index, nothing is restored.
        known = load_manifest(out).model
        if known is not None and known.name == full_name(embedding["model"] or DEFAULT_MODEL):
            embedding["prompts"] = known.options["prompts"] | embedding["prompts"]
            embedding["truncate_dim"] = embedding["truncate_dim"] or known.options["truncate_dim"]


@click.command()
@options.folder_argument
@click.argument("source")
@options.made_by_option
@_ingestion_options
def add(folder: Any, source: str, **embedding: Any) -> None:
    """Add SOURCE to the index in DIR.

    A file that was added before is replaced, and so is a text with the same id.
    """
    from rag_demo.encoding.model_identity import refuse_other_model

    skipped = Skipped()
    files: set[str] = set()  # read to their end
    made_by = load_manifest(folder).model
    with contextlib.ExitStack() as stack:
        name, documents = _read(source, skipped, embedding, on_read=files.add)
        embedder = stack.enter_context(options.open_model(made_by=made_by, **embedding))
        # All is decided on this state. A service may have changed the index since the first look.
        earlier = stack.enter_context(contextlib.closing(open_store(folder)))
        manifest = earlier.manifest
        sources = (manifest.source or _UNKNOWN).split(_AND)
        if not manifest.finished and sources[-1] != name:
            raise IndexFileError(  # It would look complete.
                f"'{folder}' contains only part of {sources[-1]}, because its command "
                "still runs or was interrupted; let it finish, or run that command again"
            )
        others = [each for each in sources if each != name]
        after = [each for each in others if not _is_within(each, name)]
        if not any(_is_within(name, each) for each in others):
            after.append(name)

        def renamed(document: Document) -> Document:
            # Different files may have the same name; a file that is added again keeps its ids.
            name = document.id
            while document.file and (known := earlier.get([name])[0]) and (
                known.file or known.metadata.get("path")
            ) not in (None, document.file):  # fmt: skip
                name += "~"
            return document._replace(id=name)

        def gone() -> set[str]:
            """Return the files that were read, and those of the folder that are gone."""
            known = earlier.files_in(f"{Path(source).resolve()}{os.sep}")
            return files | {file for file in known if not Path(file).exists()}

        refuse_other_model(manifest.model, embedder.identity, f" in '{folder}'")
        _ingest(
            map(renamed, documents), embedder, folder, skipped, source=_AND.join([*others, name]),
            source_after=_AND.join(after), replace=True,
            based_on=manifest.commit, files=gone,
        )  # fmt: skip
    count = load_manifest(folder).count
    options.say(f"added {name} to {folder}: {count} texts, {manifest.count} before")
    if skipped:
        options.warn(skipped)


def _is_within(source: str, folder: str) -> bool:
    """Tell whether `index` of a folder reads a source too."""
    path = Path(source)
    return path.is_relative_to(folder) and all(map(is_read, path.relative_to(folder).parts))


def _read(
    source: str, skipped: Skipped, choices: dict[str, Any], **more: Any
) -> tuple[str, Iterator[Document]]:
    """Open a source, by the options of the command, which are taken out of ``choices``.

    Returns:
        What tells the source from others, and its documents.

    Raises:
        SourceError: The source is missing, empty or invalid.
    """
    names = ("include", "exclude", "as_text", "chunk_size", "chunk_overlap", "text_field")
    reading = Reading(**{each: choices.pop(each) for each in names}, **more)
    found = read_source(source, skipped, reading)
    first = next(found, None)
    if first is None:
        why = f" ({skipped})" if skipped else ""
        raise SourceError(f"'{source}' holds no text to index{why}; name another folder or file")
    name = str(Path(source).resolve())
    if source == STDIN:  # A pipe is identified by its beginning.
        begins = f"{first.id}\n{first.text}".encode()
        name = f"standard input ({hashlib.sha256(begins).hexdigest()[:8]})"
    return name, itertools.chain([first], found)


def _ingest(
    documents: Iterable[Document], embedder: Any, place: Any, skipped: Skipped, **choices: Any
) -> int:
    """Embed documents into an index, and return how many were unchanged."""
    from rag_demo.stores.ingest import ingest

    try:
        with options.progress("embedding", None) as advance:
            found = ingest(documents, embedder, place, on_progress=advance, **choices)
        for name, reason in found.skipped.items():
            skipped.add(name, reason)
        return found.reused
    except KeyboardInterrupt:
        options.warn("interrupted; run the same command again to continue")
        raise click.Abort from None
