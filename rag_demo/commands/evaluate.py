"""``rag-demo evaluate``: retrieval quality on a judged collection."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    as_place,
    dtype_option,
    embedding_options,
    mode_option,
    model_option,
    open_model,
)
from rag_demo.places import load_manifest, make_retriever, open_indexes


@click.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--index",
    "places",
    multiple=True,
    metavar="DIR",
    callback=as_place,
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
    folder: Path,
    places: tuple[Any, ...],
    mode: str,
    dtype: str,
    split: str,
    model: str | None,
    **embedding: Any,
) -> None:
    """Measure retrieval quality on the judged collection in PATH.

    The collection has BEIR's layout. --mode bm25 embeds nothing.
    """
    from rag_demo.console import print_scores, progress
    from rag_demo.evaluate import NoEmbeddings, evaluate, read_beir, searching

    collection, device = read_beir(folder, split), embedding["device"]
    with contextlib.ExitStack() as stack:
        made_by: Any = load_manifest(places[0]).model if places else None
        if made_by is not None:
            model, dtype = model or made_by.name, made_by.dtype
        embedder: Any = NoEmbeddings(made_by)
        if mode != "bm25":
            embedder = stack.enter_context(open_model(model, dtype, **embedding))
        make = partial(make_retriever, "torch", embedder, device)
        if places:
            retriever = open_indexes(places, embedder, make, stack)
        else:
            retriever = stack.enter_context(make())
            with progress("embedding", len(collection.documents)) as advance:
                ids, texts, metadata, _ = zip(*collection.documents, strict=True)
                retriever.add(texts, metadata, ids, passages=mode != "bm25", on_progress=advance)
        scores = evaluate(collection, searching(retriever, mode))
    print_scores(f"{folder.name}, {mode}, {len(collection.queries)} questions", scores)
