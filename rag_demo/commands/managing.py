"""``rag-demo info``, ``verify`` and ``delete``: what is in an index, and taking some of it out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.conditions import conditions_of
from rag_demo.commands.options import folder_argument, manifest_of, say, warn
from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import RagDemoError

__all__ = ["delete", "info", "verify"]


@click.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def info(folder: Path, as_json: bool) -> None:
    """Say what is in the index in DIR: texts, vectors, the model, bytes."""
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
    for name, value in facts.items():
        say(f"{name:10} {value}")


@click.command()
@folder_argument
def verify(folder: Path) -> None:
    """Read all of the index in DIR, and compare it with its checksums."""
    from rag_demo.index import read_index

    manifest_of(folder)
    opened = read_index(folder)
    opened.check_vectors()
    count = sum(1 for _ in opened.documents.stream())  # Each block is checked, each line parsed.
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
    """Delete texts from the index in DIR: by their IDs, or by a condition on their metadata."""
    from rag_demo.index import identity_of, read_index
    from rag_demo.ingest import ingest
    from rag_demo.searching.filters import predicate

    if not ids and not conditions:
        raise RagDemoError("nothing was named to delete; name ids, or --where KEY=VALUE")
    where = conditions_of(conditions)
    fits = None if where is None else predicate(where)
    manifest = manifest_of(folder)
    named, unknown, gone = set(ids), set(ids), 0

    def kept() -> Iterator[Document]:
        """Read the index; `ingest` has locked it by the time that it asks for the first one."""
        nonlocal gone
        for document in read_index(folder).documents.stream():
            if document.id in named or (fits is not None and fits(document.metadata)):
                unknown.discard(document.id)
                gone += 1
            else:
                yield document

    known = _Known(identity_of(manifest))
    done = ingest(kept(), known, folder, source=manifest.get("source"), replace=True)
    if not done.finished:
        raise click.Abort
    if unknown:
        warn(f"not there: {', '.join(sorted(unknown))}")
    say(f"deleted {gone} text{'s' * (gone != 1)} of {folder}; {done.reused} are left")


class _Known:
    """Stands in for the model of an index to which nothing new is added."""

    dimension = 0

    def __init__(self, identity: ModelIdentity) -> None:
        self.identity, self.name = identity, identity.name

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])

    def embed_documents(self, texts: Sequence[str]) -> Any:
        raise RagDemoError("the index cannot be read; rag-demo verify says why")
