"""``rag-demo info``, ``verify`` and ``delete``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import folder_argument, load_manifest, say, warn
from rag_demo.commands.where_option import parse_conditions, where_option
from rag_demo.errors import RagDemoError


@click.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def info(folder: Path, as_json: bool) -> None:
    """Show the model, the source, the size and the metadata keys of the index in DIR."""
    from rag_demo.stores.saved_index import SavedIndex
    from torch_utils.report import format_bytes

    manifest = load_manifest(folder)
    with contextlib.closing(SavedIndex(folder)) as saved:
        keys = saved.documents.kinds()
    nbytes = sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())
    facts: dict[str, Any] = {
        "folder": str(folder),
        "texts": manifest.count,
        "vectors": manifest.rows,
        "dimension": manifest.dimension,
        "model": manifest.model.name,
        "dtype": manifest.model.dtype,
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
    with contextlib.closing(SavedIndex(folder)) as saved:
        saved.verify()
    say(f"{folder} is whole: {manifest.count} texts, {manifest.rows} vectors")


@click.command()
@folder_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@where_option("Delete the texts that match, such as source=old.md; see rag-demo search --help.")
def delete(folder: Path, ids: tuple[str, ...], conditions: tuple[str, ...]) -> None:
    """Delete texts from the index in DIR, by ID or by metadata.

    rag-demo search --json prints the IDs.
    """
    import numpy as np

    from rag_demo.ingest import exit_on_sigterm
    from rag_demo.stores.writer import IndexWriter

    if not ids and not conditions:
        raise RagDemoError("nothing to delete; pass ids, or --where KEY=VALUE")
    where = parse_conditions(conditions)
    load_manifest(folder)
    with exit_on_sigterm(), IndexWriter(folder) as writer:
        found = writer.find(ids)
        numbers = set(found.values())
        if where is not None:
            matches = writer.documents.matching(where, writer.alive)
            numbers.update(np.flatnonzero(matches).tolist())
        if numbers:
            writer.remove(numbers)
            writer.compact()
            writer.prepare()
            writer.commit()
        remaining = writer.count
    if unknown := set(ids) - found.keys():
        warn(f"not in the index: {', '.join(sorted(unknown))}")
    gone = len(numbers)
    say(f"deleted {gone} text{'s' * (gone != 1)} from {folder}; {remaining} remain")
