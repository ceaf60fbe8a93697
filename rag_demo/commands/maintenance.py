"""``rag-demo info``, ``verify`` and ``delete``: what is in an index, and taking some of it out."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    folder_argument,
    load_manifest,
    say,
    warn,
)
from rag_demo.commands.where_option import parse_conditions
from rag_demo.errors import RagDemoError

__all__ = ["delete", "info", "verify"]


@click.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def info(folder: Path, as_json: bool) -> None:
    """Say what is in the index in DIR.

    Texts, vectors, the model, the source, bytes, and whether all of the source was read.
    """
    from torch_utils.report import format_bytes

    found = load_manifest(folder)
    nbytes = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    manifest: dict[str, Any] = {
        "folder": str(folder),
        "texts": found.count,
        "vectors": found.rows,
        "dimension": found.dimension,
        "model": found.model.name,
        "dtype": found.model.dtype,
        "source": found.source,
        "finished": found.finished,
        "version": found.version,
        "bytes": nbytes,
    }
    if as_json:
        click.echo(json.dumps(manifest))
        return
    manifest["bytes"] = format_bytes(nbytes)
    manifest["finished"] = "yes" if manifest["finished"] else "no"
    for name, value in manifest.items():
        say(f"{name:10} {value}")


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Compare the index in DIR with its checksums."""
    from rag_demo.store.reader import SavedIndex

    manifest = load_manifest(folder)
    with contextlib.closing(SavedIndex(folder)) as opened:
        opened.check_all()
    say(f"{folder} is whole: {manifest.count} texts, {manifest.rows} vectors")


@click.command()
@folder_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Delete what fits, such as source=old.md; see rag-demo search --help.",
)
def delete(folder: Path, ids: tuple[str, ...], conditions: tuple[str, ...]) -> None:
    """Delete texts from the index in DIR.

    By their IDs, as rag-demo search --json prints them, or by a condition on their metadata.
    """
    import numpy as np

    from rag_demo.ingest import sigterm_ends_in_order
    from rag_demo.store.writer import IndexWriter

    if not ids and not conditions:
        raise RagDemoError("nothing was named to delete; name ids, or --where KEY=VALUE")
    where = parse_conditions(conditions)
    load_manifest(folder)
    with sigterm_ends_in_order(), IndexWriter(folder) as writer:
        found = dict(writer.documents.find(ids))
        numbers = set(found.values())
        if where is not None:
            there = np.unique(writer.owners[writer.owners >= 0])
            fitting = writer.documents.matching(where, 0, int(there.max(initial=-1)) + 1)
            numbers.update(there[fitting[there]].tolist())
        if numbers:
            writer.remove(sorted(numbers))
            writer.compact()
            writer.commit()
        left = writer.count
    if unknown := set(ids) - found.keys():
        warn(f"not there: {', '.join(sorted(unknown))}")
    gone = len(numbers)
    say(f"deleted {gone} text{'s' * (gone != 1)} of {folder}; {left} are left")
