"""The commands: ``rag-demo index``, ``search`` and ``demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from rag_demo.errors import RagDemoError, SourceError
from torch_utils import fast_exit

__all__ = ["main"]

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
_device_option = click.option("--device", help="torch's name of a device. [default: the best]")


@cli.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@_model_option
@_device_option
@_dtype_option
@_cache_option
def index(
    source: str, out: Path, model: str | None, device: str | None, dtype: str, cache: bool
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
    with embedder, progress("embedding", total) as advance:
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
@click.option("--mode", type=click.Choice(["dense", "bm25", "hybrid"]), default="dense")
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
    read_manifest(folder)  # Cheap, and before a model is loaded in vain.
    from rag_demo.console import print_json, print_results
    from rag_demo.embedding_model import EmbeddingModel

    with EmbeddingModel(model, device=device) as embedder, _open(retriever, embedder) as opened:
        opened.load(folder)
        results = opened.search(question, top_k=top_k, mode=mode)
    (print_json if as_json else print_results)(question, results)


@cli.command()
@click.option("--top-k", default=3, show_default=True, help="Answers to each question.")
def demo(top_k: int) -> None:
    """Index torch's docstrings, ask three questions, release everything, say what came back."""
    if top_k < 1:
        raise click.BadParameter(f"--top-k must be positive, not {top_k}")
    documents = _read("torch")
    from rag_demo.console import print_results, progress
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup

    click.echo(f"indexing {len(documents)} docstrings of torch ...")
    with SafePyTorchCleanup() as scope:
        embedder = scope.manage(EmbeddingModel())
        retriever = scope.manage(PyTorchGPURetriever(embedder))
        with progress("embedding", len(documents)) as advance:
            _add(retriever, documents, advance, passages=False)
        for question in QUESTIONS:
            print_results(question, retriever.search(question, top_k=top_k))
    report = scope.report
    if report is not None:
        before, after = report.before.host.rss_bytes, report.after.host.rss_bytes
        click.echo(
            f"released in {report.duration_s * 1e3:.0f} ms: resident memory "
            f"{before:,} bytes before, {after:,} bytes after, {before - after:,} bytes freed"
        )


@cli.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--format", "layout", type=click.Choice(["beir"]), default="beir")
@click.option("--mode", type=click.Choice(["dense", "bm25", "hybrid"]), default="dense")
@_dtype_option
@click.option("--passages/--no-passages", default=True, help="Embed long documents by passage too.")
@click.option("--split", default="test", show_default=True, help="Of the judgements.")
@_model_option
@_device_option
def evaluate(
    folder: Path,
    layout: str,
    mode: str,
    dtype: str,
    passages: bool,
    split: str,
    model: str | None,
    device: str | None,
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
        progress("embedding", len(collection.documents)) as advance,
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


def main() -> NoReturn:
    """Run a command; an error is one line on stderr and exit code 2."""
    fast_exit()  # Everything is closed by then; nothing has to walk the heap once more.
    try:
        code = cli.main(prog_name="rag-demo", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except RagDemoError as error:
        _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ImportError as error:
        _fail(f'{error}; install what is missing with: pip install "torch-cleanup[rag,model]"')
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    click.echo(f"rag-demo: error: {' '.join(message.split())}", err=True)
    sys.exit(2)
