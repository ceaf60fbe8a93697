"""``rag-demo demo``: compare ways to release a model, then search the Markdown of a folder."""

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
    """Compare ways to release a model, then search the Markdown files of FOLDER.

    By default, the current folder. The default questions are about the folder docs of a clone.
    """
    from rich.filesize import decimal

    from rag_demo.console import print_results, progress
    from rag_demo.documents.sources import Reading, Skipped, read_source
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.memory_comparison import compare_releases
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup

    documents = list(read_source(folder, Skipped(), Reading(include=("*.md",))))
    if not documents:
        raise SourceError(f"'{folder}' has no Markdown files; name a folder that has some")
    say("releasing the same model by three methods, each in a process of its own ...")
    say(f"{'method':30} memory taken, given back, in")
    for each in compare_releases():
        taken, returned = decimal(each.taken_bytes), decimal(each.returned_bytes)
        share, ms = each.returned_bytes / each.taken_bytes, each.seconds * 1e3
        say(f" {each.method:30} {taken}, {returned} ({share:.0%}), {ms:.1f} ms")
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
