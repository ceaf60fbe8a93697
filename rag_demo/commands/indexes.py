"""The commands of an index: ``rag-demo search``, ``info``, ``list``, ``delete`` and others."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from rag_demo.commands import options
from rag_demo.errors import RagDemoError
from rag_demo.open_index import load_manifest, open_store
from rag_demo.printable import on_one_line
from rag_demo.reading.document import Document
from rag_demo.stores.filters import ID

_BATCH = 256  # queries from a pipe that are searched together
_LISTED_AT_ONCE = 1 << 10
_LISTED_CHARS = 100
_VACUUM = "PostgreSQL removes the rows; compact its files with: VACUUM FULL"
_SHOWN = ("dimension", "language", "source", "finished", "version")  # of a manifest


@click.command()
@options.folder_argument
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@options.top_k_option
@options.where_option
@click.option("--min-score", type=float, help="Lowest score. [default mode with it: dense]")
@options.mode_option
@options.rerank_option
@options.weights_option
@click.option(
    "--neighbors", type=click.IntRange(0), default=0, help="Passages to show before and after."
)
@options.json_option
@options.made_by_option
@options.trust_option
@options.device_option
def search(
    folder: Any,
    questions: tuple[str, ...],
    top_k: int,
    where: dict[str, Any] | None,
    min_score: float | None,
    mode: str | None,
    rerank: str | None,
    weights: tuple[float, float],
    neighbors: int,
    as_json: bool,
    model: str | None,
    trust_remote_code: bool,
    device: str | None,
) -> None:
    """Search the index in DIR for each QUESTION.

    Without a QUESTION, read questions from standard input, one on each line. Results are lines
    with tabs unless stdout is a terminal.
    """
    if not all(question.strip() for question in questions):
        raise click.BadParameter("a question is empty; write some words between the quotes")
    mode = mode or ("hybrid" if min_score is None else "dense")
    if not load_manifest(folder).finished:
        options.warn(f"{folder} is incomplete: its command still runs or was interrupted")
    with contextlib.ExitStack() as stack:
        opened = options.open_retriever(
            stack, folder, mode, model, device, trust_remote_code=trust_remote_code
        )
        reranker = options.open_reranker(stack, rerank, device=device)
        for batch in _read_questions(questions):
            found = opened.search_batch(
                batch,
                top_k,
                min_score,
                where,
                mode,
                weights=weights,
                rerank=reranker,
                neighbors=neighbors,
            )
            if where is not None and not any(found):
                options.explain(where, folder)
            for question, results in zip(batch, found, strict=True):
                options.print_results(
                    question,
                    results,
                    as_json,
                    with_query=len(questions) != 1,
                    whole=neighbors > 0,
                )


def _read_questions(questions: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of questions.

    Raises:
        RagDemoError: No question was given.
    """
    if questions:
        yield list(questions)
        return
    lines: Iterator[str] = (line.strip().lstrip("\ufeff") for line in sys.stdin if line.strip())
    size = 1 if sys.stdin.isatty() else _BATCH
    batches = iter(lambda: list(itertools.islice(lines, size)), [])
    first = next(batches, None)
    if first is None:
        raise RagDemoError("no question given; pass one, or pipe in questions, one per line")
    yield from itertools.chain([first], batches)


@click.command()
@options.folder_argument
@options.json_option
def info(folder: Path, as_json: bool) -> None:
    """Show the model, the source, the size and the metadata keys of the index in DIR."""
    from rich.filesize import decimal

    with contextlib.closing(open_store(folder)) as saved:
        manifest, keys = saved.manifest, sorted({*saved.keys()} - {ID})
        model, nbytes = manifest.model, saved.stats().nbytes
    facts: dict[str, Any] = {"folder": str(folder), "texts": manifest.count}
    facts |= {"model": model and model.name, "dtype": model and model.dtype}
    made_with = {} if model is None else model.options
    facts |= {f"{kind} prompt": text for kind, text in made_with.get("prompts", {}).items()}
    facts |= {each: getattr(manifest, each) for each in _SHOWN} | {"keys": keys, "bytes": nbytes}
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts |= {"keys": ", ".join(keys), "bytes": decimal(nbytes)}
    facts["finished"] = "yes" if manifest.finished else "no"
    for name, value in facts.items():
        options.say(f"{name:10} {value}")


@click.command()
@options.folder_argument
def verify(folder: Path) -> None:
    """Compare the index in DIR with its checksums."""
    from rag_demo.stores.index_folder import SavedIndex

    _refuse_database(folder, "verify it with pg_amcheck")
    with contextlib.closing(SavedIndex(folder)) as saved:
        saved.verify()
        options.say(f"{folder} is whole: {saved.manifest.count} texts")


@click.command()
@options.folder_argument
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def get(folder: Path, ids: tuple[str, ...]) -> None:
    """Print texts of the index in DIR by ID, as JSON lines."""
    with contextlib.closing(open_store(folder)) as saved:
        found = {each.id: each for each in saved.get(ids) if each is not None}
    for document in found.values():
        click.echo(_as_json(document))
    if unknown := set(ids).difference(found):
        raise RagDemoError(f"not in the index: {', '.join(sorted(unknown))}")


@click.command("list")
@options.folder_argument
@options.where_option
@click.option("--after", metavar="ID", help="List only the IDs after this one.")
@click.option("--limit", type=click.IntRange(1), help="List so many texts at most.")
@options.json_option
def list_texts(
    folder: Path, where: dict[str, Any] | None, after: str | None, limit: int | None, as_json: bool
) -> None:
    """List the texts of the index in DIR by ID: each ID with the beginning of its text."""
    with contextlib.closing(open_store(folder)) as saved:
        names = saved.matching(where, after, limit)
        for start in range(0, len(names), _LISTED_AT_ONCE):
            for document in filter(None, saved.get(names[start : start + _LISTED_AT_ONCE])):
                text = on_one_line(document.text)[:_LISTED_CHARS]
                click.echo(_as_json(document) if as_json else f"{on_one_line(document.id)}\t{text}")
    if where is not None and not names:
        options.explain(where, folder)


def _refuse_database(place: Any, advice: str) -> None:
    if not isinstance(place, Path):
        raise RagDemoError(f"{place} is not a folder; {advice}")


def _as_json(document: Document) -> str:
    return json.dumps({"id": document.id, "text": document.text, "metadata": document.metadata})


@click.command()
@options.folder_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@options.where_option
@click.option("--erase", is_flag=True, help="Compact the index too.")
def delete(folder: Path, ids: tuple[str, ...], where: dict[str, Any] | None, erase: bool) -> int:
    """Delete texts from the index in DIR, by ID or by metadata.

    rag-demo list prints the IDs. The exit code is 1 if there is nothing to delete. The data of
    deleted texts stay in the files for some time, unless you --erase them.
    """
    from rag_demo.stores.index_folder import open_writer
    from rag_demo.stores.ingest import exit_on_sigterm

    if not ids and where is None:
        raise RagDemoError("nothing to delete; pass ids, or --where KEY=VALUE")
    if erase:
        _refuse_database(folder, _VACUUM)
    load_manifest(folder)
    open_place: Any = open_writer if isinstance(folder, Path) else open_store
    with exit_on_sigterm(), open_place(folder) as writer:
        known = {each.id for each in writer.get(ids) if each is not None}
        matching = [] if where is None else writer.matching(where)
        deleted = writer.delete(list(known.union(matching)))
        if deleted:
            writer.keep(writer.manifest.source, finished=writer.manifest.finished)
        if erase:
            writer.compact()
        remaining = writer.manifest.count
    if erase:
        _clear_cache()
    if unknown := set(ids) - known:
        options.warn(f"not in the index: {', '.join(sorted(unknown))}")
    if where is not None and not matching:
        options.explain(where, folder)
    options.say(f"deleted {deleted} text{'s' * (deleted != 1)} from {folder}; {remaining} remain")
    return int(not deleted)


@click.command()
@options.folder_argument
def compact(folder: Path) -> None:
    """Make the files of the index in DIR again, without anything of deleted texts.

    The embedding cache is emptied, because its entries do not tell their texts. Snapshots are not
    changed.
    """
    from rag_demo.stores.index_folder import open_writer
    from rag_demo.stores.ingest import exit_on_sigterm

    _refuse_database(folder, _VACUUM)
    load_manifest(folder)
    with exit_on_sigterm(), open_writer(folder, check=True) as writer:
        writer.compact()
        count = writer.manifest.count
    _clear_cache()
    options.say(f"compacted {folder}: {count} text{'s' * (count != 1)}")


def _clear_cache() -> None:
    from rag_demo.encoding.embedding_cache import EmbeddingCache, default_cache_path

    if (path := default_cache_path()).exists():
        with contextlib.closing(EmbeddingCache(path)) as cache:
            cache.clear()


@click.command()
@options.folder_argument
@options.place_option("--to", "folder_of_snapshots", required=True, help="Folder of snapshots.")
def snapshot(folder: Any, folder_of_snapshots: Any) -> None:
    """Copy the index in DIR into a new numbered folder, which never changes.

    Replicas serve SNAPSHOTS/latest, or fetch the newest number. Other processes may change DIR
    meanwhile.
    """
    from rag_demo.stores.index_folder import open_writer
    from rag_demo.stores.ingest import exit_on_sigterm

    for place in (folder, folder_of_snapshots):
        _refuse_database(place, "copy a database with pg_dump")
    if folder_of_snapshots.resolve() == folder.resolve():
        raise RagDemoError(f"{folder} is the index; name another folder for its snapshots")
    folder_of_snapshots.mkdir(parents=True, exist_ok=True)
    numbers = [int(each.name) for each in folder_of_snapshots.iterdir() if each.name.isdigit()]
    target = folder_of_snapshots / f"{max(numbers, default=0) + 1:06}"
    with (
        exit_on_sigterm(),
        TemporaryDirectory(prefix=f".{target.name}-", dir=folder_of_snapshots) as unfinished,
        contextlib.closing(open_store(folder)) as store,
    ):
        index, link = Path(unfinished, "index"), Path(unfinished, "latest")
        store.save(index, store.manifest.model)
        with open_writer(index) as writer:
            if writer.contents.has_deleted:
                writer.compact()
        index.rename(target)
        link.symlink_to(target.name)
        link.replace(folder_of_snapshots / link.name)
        options.say(f"{target}: {store.count} texts")
