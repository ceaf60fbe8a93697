"""``rag-demo demo``: compare ways to release a model, then search torch's docstrings."""

from __future__ import annotations

import click

from rag_demo.commands.options import Count, progress_option, say

PACKAGES = ("torch.autograd", "torch.cuda", "torch.serialization", "torch.utils")
QUESTIONS = (
    "how do I give cached GPU memory back?",
    "how do I save an object to a file?",
    "how do I stop tracking gradients?",
)


@click.command()
@click.option(
    "--top-k", type=Count(1), default=3, show_default=True, help="Results for each question."
)
@progress_option
def demo(top_k: int, show: str) -> None:
    """Compare ways to release a model, then search torch's docstrings."""
    from rag_demo.console import Printer, print_releases, progress
    from rag_demo.corpus import Skipped, read_source
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.memory_comparison import METHODS, compare_releases
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup
    from torch_utils.report import format_bytes

    say("releasing the same model by three methods, each in a process of its own ...")
    with progress("releasing", len(METHODS), show) as advance:
        releases = compare_releases(advance)
    print_releases(releases)
    say("")
    every = read_source("torch", Skipped())
    documents = [each for each in every if each.metadata["title"].startswith(PACKAGES)]
    say(f"indexing {len(documents)} docstrings of torch ...")
    printer = Printer("table", rank_scores=False)
    with SafePyTorchCleanup() as scope:
        embedder = scope.manage(EmbeddingModel())
        retriever = scope.manage(PyTorchGPURetriever(embedder))
        with progress("embedding", len(documents), show) as advance:
            retriever.add(
                [document.text for document in documents],
                [document.metadata for document in documents],
                [document.id for document in documents],
                on_progress=advance,
            )
        for question in QUESTIONS:
            printer.show(question, retriever.search(question, top_k=top_k))
    report = scope.report
    if report is not None:
        before, after = report.before.host.rss_bytes, report.after.host.rss_bytes
        say(
            f"model and index released in {report.duration_s * 1e3:.0f} ms: resident memory "
            f"{format_bytes(before)} before, {format_bytes(after)} after, "
            f"{format_bytes(before - after)} given back"
        )
