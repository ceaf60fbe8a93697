"""``rag-demo evaluate``: retrieval quality on a judged collection."""

from __future__ import annotations

from pathlib import Path

import click

from rag_demo.commands.options import (
    Embedding,
    dtype_option,
    embedding_options,
    mode_option,
    model_option,
    open_retriever,
    progress_option,
)


@click.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@mode_option
@dtype_option
@click.option(
    "--passages/--no-passages", default=True, help="Embed the passages of long documents too."
)
@click.option(
    "--split", default="test", show_default=True, help="Read judgements from qrels/SPLIT.tsv."
)
@model_option
@embedding_options
@progress_option
def evaluate(
    folder: Path,
    mode: str,
    dtype: str,
    passages: bool,
    split: str,
    model: str | None,
    embedding: Embedding,
    show: str,
) -> None:
    """Measure retrieval quality on the judged collection in PATH.

    The collection has BEIR's layout. --mode bm25 embeds nothing.
    """
    from rag_demo.console import print_scores, progress
    from rag_demo.evaluate import NoEmbeddings, evaluate, read_beir, searching
    from torch_utils import SafePyTorchCleanup

    collection = read_beir(folder, split)
    with SafePyTorchCleanup() as scope:
        embedder = NoEmbeddings() if mode == "bm25" else scope.manage(embedding.open(model, dtype))
        retriever = scope.manage(open_retriever("torch", embedder, embedding.device))
        with progress("embedding", len(collection.documents), show) as advance:
            retriever.add(
                [document.text for document in collection.documents],
                [document.metadata for document in collection.documents],
                [document.id for document in collection.documents],
                passages=passages and mode != "bm25",
                on_progress=advance,
            )
        scores = evaluate(collection, searching(retriever, mode))
    print_scores(f"{folder.name}, {mode}, {len(collection.queries)} questions", scores)
