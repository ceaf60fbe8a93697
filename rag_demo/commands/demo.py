"""``rag-demo demo``: search the Markdown of a folder, and release everything."""

from __future__ import annotations

import click

from rag_demo.commands.options import say, top_k_option
from rag_demo.errors import SourceError

QUESTIONS = (
    "how do I give cached GPU memory back?",
    "how do I keep a model loaded between requests?",
    "how do I save an index to a folder?",
)


@click.command()
@click.argument("folder", default=".")
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@top_k_option
def demo(folder: str, questions: tuple[str, ...], top_k: int) -> None:
    """Search the Markdown files of FOLDER, and show what the release of the model gives back.

    By default, the current folder. The default questions are about the folder docs of a clone.
    """
    from rag_demo.console import print_results, progress
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from rag_demo.reading.sources import Reading, Skipped, read_source
    from torch_utils import SafePyTorchCleanup

    documents = list(read_source(folder, Skipped(), Reading(include=("*.md",))))
    if not documents:
        raise SourceError(f"'{folder}' has no Markdown files; name a folder that has some")
    say(f"indexing {len(documents)} passages of {folder} ...")
    with SafePyTorchCleanup() as scope:
        embedder = scope.manage(EmbeddingModel())
        retriever = scope.manage(PyTorchGPURetriever(embedder))
        with progress("embedding", len(documents)) as advance:
            ids, texts, metadata, _ = zip(*documents, strict=True)
            retriever.add(texts, metadata, ids, on_progress=advance)
        for question in questions or QUESTIONS:
            print_results(question, retriever.search(question, top_k=top_k), with_query=True)
    say(f"model and index released: {scope.report}")
