"""``rag-demo info``, ``verify``, ``get``, ``list`` and ``delete``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    folder_argument,
    load_manifest,
    open_database,
    open_saved,
    say,
    warn,
)
from rag_demo.commands.where_option import explain, parse_conditions, where_option
from rag_demo.documents.document import Document
from rag_demo.errors import RagDemoError
from rag_demo.printable import on_one_line

_LISTED_AT_ONCE = 1 << 10
_LISTED_CHARS = 100


@click.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def info(folder: Path, as_json: bool) -> None:
    """Show the model, the source, the size and the metadata keys of the index in DIR."""
    from torch_utils.report import format_bytes

    manifest = load_manifest(folder)
    with contextlib.closing(open_saved(folder)) as saved:
        keys = saved.kinds()
    if isinstance(folder, Path):
        rows = manifest.rows
        nbytes = sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())
    else:
        with open_database(folder) as store:
            rows, nbytes = store.size()
    facts: dict[str, Any] = {
        "folder": str(folder),
        "texts": manifest.count,
        "vectors": rows,
        "dimension": manifest.dimension,
        "model": manifest.model and manifest.model.name,
        "dtype": manifest.model and manifest.model.dtype,
        "source": manifest.source,
        "finished": manifest.finished,
        "version": manifest.version,
        "keys": sorted(keys),
        "bytes": nbytes,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts |= {"keys": ", ".join(facts["keys"])}
    facts |= {"bytes": format_bytes(nbytes), "finished": "yes" if manifest.finished else "no"}
    for name, value in facts.items():
        say(f"{name:10} {value}")


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Compare the index in DIR with its checksums."""
    from rag_demo.stores.saved_index import SavedIndex

    manifest = load_manifest(folder)
    if not isinstance(folder, Path):
        with open_database(folder) as store:
            store.verify()
        say(f"{folder} is whole: {manifest.count} texts")
        return
    with contextlib.closing(SavedIndex(folder)) as saved:
        saved.verify()
    say(f"{folder} is whole: {manifest.count} texts, {manifest.rows} vectors")


@click.command()
@folder_argument
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def get(folder: Path, ids: tuple[str, ...]) -> None:
    """Print texts of the index in DIR by ID, as JSON lines."""
    load_manifest(folder)
    with contextlib.closing(open_saved(folder)) as saved:
        found = saved.known(ids)[1]
    for name in dict.fromkeys(ids):
        if name in found:
            click.echo(_as_json(found[name]))
    if unknown := set(ids) - found.keys():
        raise RagDemoError(f"not in the index: {', '.join(sorted(unknown))}")


@click.command("list")
@folder_argument
@where_option("List the texts that match, such as source=old.md; see rag-demo search --help.")
@click.option("--limit", type=click.IntRange(1), help="List so many texts at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, with texts and metadata.")
def list_texts(folder: Path, conditions: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """List the texts of the index in DIR: each ID with the beginning of its text."""
    load_manifest(folder)
    where = parse_conditions(conditions)
    with contextlib.closing(open_saved(folder)) as saved:
        numbers = saved.matching(where)[:limit]
        if where is not None and not numbers:
            explain(where, folder)
        for start in range(0, len(numbers), _LISTED_AT_ONCE):
            for document in saved.at(numbers[start : start + _LISTED_AT_ONCE]):
                text = on_one_line(document.text)[:_LISTED_CHARS]
                click.echo(_as_json(document) if as_json else f"{on_one_line(document.id)}\t{text}")


def _as_json(document: Document) -> str:
    return json.dumps({"id": document.id, "text": document.text, "metadata": document.metadata})


@click.command()
@folder_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@where_option("Delete the texts that match, such as source=old.md; see rag-demo search --help.")
def delete(folder: Path, ids: tuple[str, ...], conditions: tuple[str, ...]) -> None:
    """Delete texts from the index in DIR, by ID or by metadata.

    rag-demo search --json prints the IDs.
    """
    import numpy as np

    from rag_demo.stores.ingest import exit_on_sigterm
    from rag_demo.stores.writer import IndexWriter

    if not ids and not conditions:
        raise RagDemoError("nothing to delete; pass ids, or --where KEY=VALUE")
    where = parse_conditions(conditions)
    load_manifest(folder)
    if not isinstance(folder, Path):
        with exit_on_sigterm(), open_database(folder) as store:
            known = {each.id for each in store.get(ids) if each is not None}
            gone = store.delete([*known, *(store.matching(where) if where is not None else ())])
            remaining = store.count
    else:
        with exit_on_sigterm(), IndexWriter(folder) as writer:
            found = writer.find(ids)
            known, numbers = set(found), set(found.values())
            if where is not None:
                matches = writer.documents.matching(where, writer.alive)
                numbers.update(np.flatnonzero(matches).tolist())
            if numbers:
                writer.remove(numbers)
                writer.compact()
                writer.prepare()
                writer.commit()
            gone, remaining = len(numbers), writer.count
    if unknown := set(ids) - known:
        warn(f"not in the index: {', '.join(sorted(unknown))}")
    say(f"deleted {gone} text{'s' * (gone != 1)} from {folder}; {remaining} remain")
