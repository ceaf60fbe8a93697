"""``rag-demo evaluate``: retrieval quality on a judged collection."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    dtype_option,
    embedding_options,
    mode_option,
    model_option,
    open_retriever,
    say,
)
from rag_demo.places import as_place


@click.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--index",
    "places",
    multiple=True,
    metavar="DIR",
    type=as_place,
    help="Judge this index instead of the documents in PATH; several are searched as one.",
)
@mode_option
@dtype_option
@click.option(
    "--split", default="test", show_default=True, help="Read judgements from qrels/SPLIT.tsv."
)
@model_option
@embedding_options
def evaluate(
    folder: Path, places: tuple[Any, ...], mode: str, split: str, **embedding: Any
) -> None:
    """Measure retrieval quality on the judged collection in PATH.

    The collection has BEIR's layout. --mode bm25 embeds nothing.
    """
    import numpy as np

    from rag_demo.console import progress
    from rag_demo.evaluate import evaluate, read_beir

    collection = read_beir(folder, split)
    with contextlib.ExitStack() as stack:
        retriever = open_retriever(stack, places, mode, **embedding)
        if not places:
            ids, texts, metadata, _ = zip(*collection.documents, strict=True)
            vectors = np.ones((len(ids), 1)) if mode == "bm25" else None
            with progress("embedding", len(ids)) as advance:
                retriever.add(texts, metadata, ids, vectors=vectors, on_progress=advance)
        scores = evaluate(collection, retriever, mode)
    say(f"{folder.name}, {mode}, {len(collection.queries)} questions")
    for metric, score in scores.items():
        say(f"{metric:12} {score:.4f}")
