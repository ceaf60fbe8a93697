"""``rag-demo evaluate``: the quality of the answers on a collection with judgements."""

from __future__ import annotations

from pathlib import Path

import click

from rag_demo.commands.options import (
    batch_size_option,
    cache_option,
    cache_path,
    device_option,
    dtype_option,
    mode_option,
    model_option,
    progress_option,
    workers_option,
)

__all__ = ["evaluate"]


@click.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--format", "layout", type=click.Choice(["beir"]), default="beir")
@mode_option
@dtype_option
@click.option("--passages/--no-passages", default=True, help="Embed long documents by passage too.")
@click.option("--split", default="test", show_default=True, help="Of the judgements.")
@model_option
@device_option
@workers_option
@batch_size_option
@cache_option
@progress_option
def evaluate(
    folder: Path,
    layout: str,
    mode: str,
    dtype: str,
    passages: bool,
    split: str,
    model: str | None,
    device: str | None,
    workers: int,
    batch_size: int | None,
    cache: bool,
    show: str,
) -> None:
    """Measure the quality of the answers on the collection in PATH, which has judgements.

    Embeddings come from the cache where they are in it; --mode bm25 embeds nothing.
    """
    from rag_demo.console import print_scores, progress
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.evaluate import NoEmbeddings, evaluate, read_beir, searching
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup

    collection = read_beir(folder, split)
    with SafePyTorchCleanup() as scope:
        embedder: EmbeddingModel | NoEmbeddings = NoEmbeddings()
        if mode != "bm25":
            embedder = scope.manage(
                EmbeddingModel(
                    model,
                    device=device,
                    dtype=dtype,
                    cache=cache_path(cache),
                    workers=workers,
                    batch_size=batch_size,
                )
            )
        retriever = scope.manage(PyTorchGPURetriever(embedder, device=device))
        with progress("embedding", len(collection.documents), show) as advance:
            retriever.add(
                [document.text for document in collection.documents],
                [document.metadata for document in collection.documents],
                [document.id for document in collection.documents],
                passages=passages and mode != "bm25",
                on_progress=advance,
            )
        scores = evaluate(collection, searching(retriever, mode))
    print_scores(f"{folder.name}, {mode}, {len(collection.questions)} questions", scores)
