"""The commands: ``rag-demo index``, ``search``, ``demo`` and ``evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rag_demo.errors import RagDemoError, SourceError
from rag_demo.searching.modes import MODES

__all__ = ["run"]

QUESTIONS = (
    "how do I give cached GPU memory back?",
    "how do I save an object to a file?",
    "how do I stop tracking gradients?",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch-cleanup")
def cli() -> None:
    """Index texts, ask questions about them, and leave cleanly."""


_model_option = click.option(
    "--model", help="A sentence-transformers model: folder or name. [default: packaged MiniLM]"
)
_cache_option = click.option(
    "--cache/--no-cache", default=True, help="Keep embeddings on the disk. [default: yes]"
)
_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What the model computes in; bfloat16 is faster where the processor has it.",
)
_progress_option = click.option(
    "--progress",
    "show",
    type=click.Choice(["auto", "terminal", "none"]),
    default="auto",
    show_default=True,
    help="Show it on stderr if that is a terminal; on the terminal wherever stderr goes; not.",
)
_device_option = click.option("--device", help="torch's name of a device. [default: the best]")


@cli.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@_model_option
@_device_option
@_dtype_option
@_cache_option
@_progress_option
def index(
    source: str,
    out: Path,
    model: str | None,
    device: str | None,
    dtype: str,
    cache: bool,
    show: str,
) -> None:
    """Index SOURCE: a folder, a text or .jsonl file, or an installed package's docstrings."""
    from rag_demo.index import refuse_foreign_folder

    refuse_foreign_folder(out)  # Before minutes of work, not after them.
    from rag_demo.console import progress
    from rag_demo.corpus import Skipped, read_source
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.encoding.embedding_cache import default_cache_path
    from rag_demo.ingest import ingest

    total = sum(1 for _ in read_source(source, Skipped()))
    if not total:
        raise SourceError(f"{source} holds no text to index; name another folder or package")
    skipped = Skipped()
    where = default_cache_path() if cache else None
    embedder = EmbeddingModel(model, device=device, dtype=dtype, cache=where)
    with embedder, progress("embedding", total, show) as advance:
        done = ingest(read_source(source, skipped), embedder, out, on_progress=advance)
    if skipped.undecodable:
        click.echo(f"rag-demo: {skipped}", err=True)
    if not done.finished:
        count = done.embedded + done.reused
        click.echo(
            f"rag-demo: interrupted; {count} of {total} texts are in {out}, "
            "and the same command goes on from there",
            err=True,
        )
        raise click.Abort
    known = f", {done.reused} of them unchanged" if done.reused else ""
    click.echo(f"indexed {total} text{'s' * (total != 1)} of {source} in {out}{known}")


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("question")
@click.option("--top-k", default=5, show_default=True, help="How many answers.")
@click.option("--retriever", type=click.Choice(["torch", "faiss"]), default="torch")
@click.option("--mode", type=click.Choice(MODES), default="dense")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@_model_option
@_device_option
def search(
    folder: Path,
    question: str,
    top_k: int,
    retriever: str,
    mode: str,
    as_json: bool,
    model: str | None,
    device: str | None,
) -> None:
    """Ask QUESTION of the index in DIR."""
    from rag_demo.index import read_manifest

    if top_k < 1:
        raise click.BadParameter(f"--top-k must be positive, not {top_k}")
    manifest = read_manifest(folder)  # Cheap, and before a model is loaded in vain.
    from rag_demo.console import print_json, print_results
    from rag_demo.embedding_model import EmbeddingModel

    embedder = EmbeddingModel(model, device=device, dtype=manifest.get("dtype"))
    with embedder, _open(retriever, embedder) as opened:
        opened.load(folder)
        results = opened.search(question, top_k=top_k, mode=mode)
    (print_json if as_json else print_results)(question, results)


@cli.command()
@click.option("--top-k", default=3, show_default=True, help="Answers to each question.")
@_progress_option
def demo(top_k: int, show: str) -> None:
    """Search torch's docstrings, and give a model back: by del, and by a scope."""
    if top_k < 1:
        raise click.BadParameter(f"--top-k must be positive, not {top_k}")
    documents = _read("torch")
    from rag_demo.console import print_given_back, print_results, progress
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.give_back import WAYS, give_back_in_processes
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup
    from torch_utils.report import format_bytes

    click.echo(f"indexing {len(documents)} docstrings of torch ...")
    with SafePyTorchCleanup() as scope:
        embedder = scope.manage(EmbeddingModel())
        retriever = scope.manage(PyTorchGPURetriever(embedder))
        with progress("embedding", len(documents), show) as advance:
            _add(retriever, documents, advance, passages=False)
        for question in QUESTIONS:
            print_results(question, retriever.search(question, top_k=top_k))
    report = scope.report
    if report is not None:
        before, after = report.before.host.rss_bytes, report.after.host.rss_bytes
        click.echo(
            f"model and index released in {report.duration_s * 1e3:.0f} ms: resident memory "
            f"{format_bytes(before)} before, {format_bytes(after)} after, "
            f"{format_bytes(before - after)} given back"
        )
    click.echo("\ngiving the same model back in three ways, each in a process of its own ...")
    with progress("giving back", len(WAYS), show) as advance:
        found = give_back_in_processes(advance)
    print_given_back(found)


@cli.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--format", "layout", type=click.Choice(["beir"]), default="beir")
@click.option("--mode", type=click.Choice(MODES), default="dense")
@_dtype_option
@click.option("--passages/--no-passages", default=True, help="Embed long documents by passage too.")
@click.option("--split", default="test", show_default=True, help="Of the judgements.")
@_model_option
@_device_option
@_progress_option
def evaluate(
    folder: Path,
    layout: str,
    mode: str,
    dtype: str,
    passages: bool,
    split: str,
    model: str | None,
    device: str | None,
    show: str,
) -> None:
    """Measure the quality of the answers on the collection in PATH, which has judgements."""
    from rag_demo.console import print_scores, progress
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.evaluate import evaluate, read_beir, searching
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

    collection = read_beir(folder, split)
    with (
        EmbeddingModel(model, device=device, dtype=dtype) as embedder,
        PyTorchGPURetriever(embedder, device=device) as retriever,
        progress("embedding", len(collection.documents), show) as advance,
    ):
        _add(retriever, collection.documents, advance, passages=passages)
        scores = evaluate(collection, searching(retriever, mode))
    print_scores(f"{folder.name}, {mode}, {len(collection.questions)} questions", scores)


def _read(source: str) -> list[Any]:
    from rag_demo.corpus import Skipped, read_source

    skipped = Skipped()
    documents = list(read_source(source, skipped))
    if skipped.undecodable:
        click.echo(f"rag-demo: {skipped}", err=True)
    if not documents:
        raise SourceError(f"{source} holds no text to index; name another folder or package")
    return documents


def _add(retriever: Any, documents: list[Any], advance: Any, *, passages: bool) -> None:
    retriever.add(
        [document.text for document in documents],
        [document.metadata for document in documents],
        [document.id for document in documents],
        passages=passages,
        on_progress=advance,
    )


def _open(kind: str, embedder: Any) -> Any:
    if kind == "faiss":
        from rag_demo.faiss_retriever import FaissRetriever

        return FaissRetriever(embedder)
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

    return PyTorchGPURetriever(embedder)


def run(arguments: list[str]) -> int:
    """Run the command that is named, and return its exit code.

    Raises:
        RagDemoError: What click says about wrong arguments too.
    """
    try:
        code = cli.main(arguments, prog_name="rag-demo", standalone_mode=False)
    except click.ClickException as error:
        raise RagDemoError(error.format_message()) from None
    except click.Abort:
        return 130
    return code if isinstance(code, int) else 0
