"""Options that several commands have, and how what they name is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rag_demo.errors import AGAIN, IndexFileError
from rag_demo.printable import printable
from rag_demo.searching.modes import MODES

__all__ = [
    "batch_size_option",
    "cache_option",
    "cache_path",
    "device_option",
    "dtype_option",
    "folder_argument",
    "manifest_of",
    "mode_option",
    "model_option",
    "open_retriever",
    "progress_option",
    "say",
    "warn",
    "workers_option",
]

model_option = click.option(
    "--model", help="A sentence-transformers model: folder or name. [default: packaged MiniLM]"
)
device_option = click.option("--device", help="torch's name of a device. [default: the best]")
cache_option = click.option(
    "--cache/--no-cache", default=True, help="Keep embeddings on the disk. [default: yes]"
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What the model computes in; bfloat16 is faster where the processor has it.",
)
progress_option = click.option(
    "--progress",
    "show",
    type=click.Choice(["auto", "terminal", "none"]),
    default="auto",
    show_default=True,
    help="Show it on stderr if that is a terminal; on the terminal wherever stderr goes; not.",
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Processes that embed, each with the model; 0 embeds in this one.",
)
batch_size_option = click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Texts that are embedded at once. [default: 32]",
)
mode_option = click.option(
    "--mode",
    type=click.Choice(MODES),
    default="hybrid",
    show_default=True,
    help="Compare vectors, words, or both and fuse the ranks.",
)
folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


def say(text: object) -> None:
    """Print a line on stdout."""
    click.echo(printable(text))


def warn(text: object) -> None:
    """Print a line on stderr."""
    click.echo(f"rag-demo: {printable(text)}", err=True)


def cache_path(wanted: bool) -> Path | None:
    """Return where embeddings are kept, if they are."""
    from rag_demo.encoding.embedding_cache import default_cache_path

    return default_cache_path() if wanted else None


def manifest_of(folder: Path) -> dict[str, Any]:
    """Read what describes an index; cheap, and done before a model is loaded in vain.

    Raises:
        IndexFileError: There is none, or it is damaged.
    """
    from rag_demo.index import read_manifest

    if not folder.exists():
        raise IndexFileError(
            f"the folder {folder} was not found; make an index with: {_MAKE} {folder}"
        )
    return read_manifest(folder)


_MAKE = AGAIN.removeprefix("make it again with: ")


def open_retriever(kind: str, embedder: Any, device: str | None = None) -> Any:
    """Make the retriever of a kind."""
    if kind == "faiss":
        from rag_demo.faiss_retriever import FaissRetriever

        return FaissRetriever(embedder)
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

    return PyTorchGPURetriever(embedder, device=device)
