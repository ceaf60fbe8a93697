"""``rag-demo info``, ``verify`` and ``delete``: what is in an index, and taking some of it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.conditions import conditions_of
from rag_demo.commands.options import (
    changeable_manifest_of,
    folder_argument,
    manifest_of,
    say,
    warn,
)
from rag_demo.errors import RagDemoError

__all__ = ["delete", "info", "verify"]


@click.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def info(folder: Path, as_json: bool) -> None:
    """Say what is in the index in DIR.

    Texts, vectors, the model, the source, bytes, and whether all of the source was read.
    """
    from rag_demo.index import read_index
    from torch_utils.report import format_bytes

    manifest = manifest_of(folder)
    opened = read_index(folder)
    nbytes = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    facts: dict[str, Any] = {
        "folder": str(folder),
        "texts": len(opened.documents),
        "vectors": len(opened.vectors),
        "dimension": int(opened.vectors.shape[1]),
        "model": manifest["model"],
        "dtype": manifest.get("dtype"),
        "source": manifest.get("source"),
        "finished": manifest.get("finished", True),
        "version": manifest["version"],
        "bytes": nbytes,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts["bytes"] = format_bytes(nbytes)
    facts["finished"] = "yes" if facts["finished"] else "no"
    for name, value in facts.items():
        say(f"{name:10} {value}")


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Compare the index in DIR with its checksums."""
    from rag_demo.index import read_index

    manifest_of(folder)
    opened = read_index(folder)
    count = opened.check_all()
    say(f"{folder} is whole: {count} texts, {len(opened.vectors)} vectors")


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
    from rag_demo.index import identity_of, read_index, replace_index
    from rag_demo.ingest import sigterm_ends_in_order
    from rag_demo.searching.collection import Collection
    from rag_demo.searching.tensor_vectors import TensorVectors
    from rag_demo.storage.writing import lock

    if not ids and not conditions:
        raise RagDemoError("nothing was named to delete; name ids, or --where KEY=VALUE")
    where = conditions_of(conditions)
    changeable_manifest_of(folder)
    with lock(folder), sigterm_ends_in_order():
        manifest = changeable_manifest_of(folder)  # Nobody changes it any more.
        opened = Collection.opened(TensorVectors(), read_index(folder))
        found = opened.ids.find(ids, opened.documents, None)
        numbers = {number for number in found if number is not None}
        fitting = opened.matching(where)
        if fitting is not None:
            numbers.update(fitting.nonzero()[0].tolist())
        left = opened.without([opened.documents[number].id for number in sorted(numbers)]).merged()
        if numbers:
            replace_index(
                folder,
                identity_of(manifest),
                left.vectors.vectors(),
                left.documents,
                left.rows,
                left.derived(),
                source=manifest.get("source"),
                finished=manifest.get("finished", True),
            )
    if unknown := [name for name, number in zip(ids, found, strict=True) if number is None]:
        warn(f"not there: {', '.join(sorted(set(unknown)))}")
    gone = len(numbers)
    say(f"deleted {gone} text{'s' * (gone != 1)} of {folder}; {len(left)} are left")
