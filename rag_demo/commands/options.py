"""Options that several commands share, and functions that open what they name."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rag_demo.errors import RagDemoError
from rag_demo.printable import on_one_line, printable
from rag_demo.searching.arguments import MODES

if TYPE_CHECKING:
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.ray_embedder import RayEmbedder
    from rag_demo.stores.index_format import Manifest


def _check_device(context: click.Context, option: click.Parameter, device: str | None) -> Any:
    if device is None or re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", device):
        return device
    raise click.BadParameter(
        f"the device {device!r} is unknown; use cpu, cuda, mps or xpu, or a number as in cuda:1"
    )


model_option = click.option(
    "--model", help="A sentence-transformers model: folder or name. [default: packaged MiniLM]"
)
made_by_option = click.option(
    "--model", help="A folder or name. [default: the model that made the index]"
)
device_option = click.option(
    "--device",
    callback=_check_device,
    help="Device to compute on: cpu, cuda, cuda:1, mps or xpu. [default: the best available]",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of the model; bfloat16 is faster on processors that support it.",
)
progress_option = click.option(
    "--progress",
    "show",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="auto: on stderr if it is a terminal.",
)
retriever_option = click.option(
    "--retriever",
    type=click.Choice(["torch", "faiss"]),
    default="torch",
    show_default=True,
    help="Library that searches the vectors.",
)
mode_option = click.option(
    "--mode",
    type=click.Choice(MODES),
    default="hybrid",
    show_default=True,
    help="Search vectors (dense), full text (bm25), or both.",
)


def as_place(context: click.Context, option: click.Parameter, value: str) -> Any:
    """Parse the place of an index: the path of a folder, or the URL of a database."""
    if not value.startswith(("postgresql://", "postgres://")):
        return Path(value)
    from rag_demo.stores.postgres import PostgresUrl

    return PostgresUrl.parse(value)


folder_argument = click.argument("folder", metavar="DIR", callback=as_place)


class Embedding(NamedTuple):
    """The values of `embedding_options`."""

    device: str | None
    batch_size: int | None
    cache: bool

    def open_on_ray(self, model: str | None, dtype: str | None, **where: Any) -> RayEmbedder:
        """Create a model in actors of Ray, which start at the first text."""
        from rag_demo.ray_embedder import RayEmbedder

        return RayEmbedder(
            **where, model_name_or_path=model, dtype=dtype, batch_size=self.batch_size
        )

    def open(self, model: str | None, dtype: str | None) -> EmbeddingModel:
        """Create the model, which the caller must close. It is loaded on first use."""
        from rag_demo.embedding_model import EmbeddingModel
        from rag_demo.encoding.embedding_cache import default_cache_path

        return EmbeddingModel(
            model,
            dtype=dtype,
            device=self.device,
            batch_size=self.batch_size,
            cache=default_cache_path() if self.cache else None,
        )


def ray_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of embedding on Ray to a command."""
    for option in (
        click.option(
            "--actors", type=click.IntRange(1), help="Actors of Ray. [default: one per CPU]"
        ),
        click.option("--address", help="Address of a Ray cluster. [default: start Ray here]"),
        click.option(
            "--on", type=click.Choice(["local", "ray"]), default="local", help="Where to embed."
        ),
    ):
        command = option(command)
    return command


def embedding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of embedding to a command, which gets them as ``embedding``."""

    @wraps(command)
    def with_embedding(*args: Any, **options: Any) -> Any:
        values = {name: options.pop(name) for name in Embedding._fields}
        with _warnings_printed():
            return command(*args, embedding=Embedding(**values), **options)

    options = (
        device_option,
        click.option(
            "--batch-size",
            type=click.IntRange(min=1),
            help="Number of texts embedded at once. [default: 32]",
        ),
        click.option(
            "--cache/--no-cache", default=True, help="Store embeddings on disk. [default: yes]"
        ),
    )
    with_options: Callable[..., Any] = with_embedding
    for option in reversed(options):
        with_options = option(with_options)
    return with_options


def say(text: object) -> None:
    """Print a line on stdout."""
    click.echo(printable(text))


def warn(text: object) -> None:
    """Print a line on stderr."""
    click.echo(f"rag-demo: {on_one_line(text)}", err=True)


class _WarningHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


@contextlib.contextmanager
def _warnings_printed() -> Iterator[None]:
    """Print the library's log warnings, such as a cache that cannot be used."""
    logger, handler = logging.getLogger("rag_demo"), _WarningHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def open_database(url: Any, **options: Any) -> Any:
    """Open the store of an index in a database, which the caller must close."""
    from rag_demo.stores.postgres import PostgresStore

    return PostgresStore(url, **{"create": False, **options})


def open_saved(folder: Path) -> Any:
    """Open an index to read its documents; the caller must close it."""
    from rag_demo.stores.saved_index import SavedIndex

    return SavedIndex(folder) if isinstance(folder, Path) else open_database(folder)


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index, before a model is loaded in vain.

    Raises:
        IndexFileError: The index is missing or damaged.
    """
    from rag_demo.stores.index_format import read_manifest

    if isinstance(folder, Path):
        return read_manifest(folder)
    with open_database(folder) as store:
        manifest: Manifest = store.manifest
        return manifest


def open_retriever(kind: str, embedder: Any, device: str | None = None) -> Any:
    """Create a retriever of the kind "torch" or "faiss".

    Raises:
        RagDemoError: The device cannot be used.
    """
    if kind == "faiss":
        from rag_demo.faiss_retriever import FaissRetriever

        return FaissRetriever(embedder)
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

    if device is not None:
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch has no CUDA.
            raise RagDemoError(f"the device {device!r} cannot be used: {error}") from None
    return PyTorchGPURetriever(embedder, device=device)


def open_index(folder: Path, kind: str, embedder: Any, device: str | None = None) -> Any:
    """Open an index in a folder, or in a database, which has its own kind of retriever."""
    if not isinstance(folder, Path):
        from rag_demo.pgvector_retriever import PgVectorRetriever

        return PgVectorRetriever(embedder, folder.conninfo, folder.table)
    retriever = open_retriever(kind, embedder, device)
    try:
        retriever.load(folder)
    except BaseException:  # After an interrupt too, nothing else would close it.
        retriever.close()
        raise
    return retriever
