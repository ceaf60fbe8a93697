"""Options that several commands have, and how what they name is opened."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rag_demo.errors import HOW_TO_CREATE, IndexFileError, RagDemoError
from rag_demo.printable import printable
from rag_demo.searching.arguments import MODES

if TYPE_CHECKING:
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.store.index_format import Manifest

__all__ = [
    "Count",
    "Embedding",
    "Number",
    "device_option",
    "dtype_option",
    "embedding_options",
    "folder_argument",
    "made_by_option",
    "load_manifest",
    "mode_option",
    "model_option",
    "open_retriever",
    "progress_option",
    "retriever_option",
    "say",
    "warn",
]

model_option = click.option(
    "--model", help="A sentence-transformers model: folder or name. [default: packaged MiniLM]"
)
made_by_option = click.option(
    "--model", help="A folder or name. [default: the one that made the index]"
)
device_option = click.option("--device", help="torch's name of a device. [default: the best]")
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
    help="auto: if stderr is a terminal; terminal: also if stderr goes elsewhere; none: never.",
)
retriever_option = click.option(
    "--retriever",
    type=click.Choice(["torch", "faiss"]),
    default="torch",
    show_default=True,
    help="What compares the vectors.",
)
mode_option = click.option(
    "--mode",
    type=click.Choice(MODES),
    default="hybrid",
    show_default=True,
    help="Compare vectors, words, or both and fuse the ranks.",
)
folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


class Number(click.FloatRange):
    """A number on the command line; NaN, which no range keeps out, and infinity are none."""

    name = "number"

    def _describe_range(self) -> str:  # click's, which says "x<=None" where there is no end.
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class Count(click.IntRange):
    """A whole number on the command line, and an error that says which are taken."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            taken = f"{self.min} or more" if self.max is None else f"from {self.min} to {self.max}"
            self.fail(f"{value!r} is not possible; give a whole number, {taken}", param, ctx)


class Embedding(NamedTuple):
    """How a command embeds: what `embedding_options` were given."""

    device: str | None
    workers: int
    batch_size: int | None
    cache: bool

    def open(self, model: str | None, dtype: str | None) -> EmbeddingModel:
        """Open a model, which is loaded when it is needed; the caller closes it."""
        from rag_demo.embedding_model import EmbeddingModel
        from rag_demo.encoding.embedding_cache import default_cache_path

        return EmbeddingModel(
            model,
            dtype=dtype,
            device=self.device,
            workers=self.workers,
            batch_size=self.batch_size,
            cache=default_cache_path() if self.cache else None,
        )


def embedding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of how it embeds, which it gets as an `Embedding`."""

    @wraps(command)
    def with_embedding(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in Embedding._fields}
        with _log_said():
            return command(*args, embedding=Embedding(**given), **options)

    options = (
        device_option,
        click.option(
            "--workers",
            type=Count(min=0),
            default=0,
            show_default=True,
            help="Processes that embed, each with the model; 0 embeds in this one.",
        ),
        click.option(
            "--batch-size",
            type=Count(min=1),
            help="Texts that are embedded at once. [default: 32]",
        ),
        click.option(
            "--cache/--no-cache", default=True, help="Keep embeddings on the disk. [default: yes]"
        ),
    )
    with_options: Callable[..., Any] = with_embedding
    for option in reversed(options):
        with_options = option(with_options)
    return with_options


def say(text: object) -> None:
    """Print a line on stdout."""
    click.echo(_line(text))


def warn(text: object) -> None:
    """Print a line on stderr."""
    click.echo(f"rag-demo: {_line(text)}", err=True)


class _Saying(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # Nobody reads it; the work goes on.
            warn(record.getMessage())


@contextlib.contextmanager
def _log_said() -> Iterator[None]:
    """Print what the library warns of, such as a cache that cannot be used."""
    logger, handler = logging.getLogger("rag_demo"), _Saying(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _line(text: object) -> str:
    return printable(text).replace("\n", "\\n")


def load_manifest(folder: Path) -> Manifest:
    """Read what describes an index; cheap, and done before a model is loaded in vain.

    Raises:
        IndexFileError: There is none, or it is damaged.
    """
    from rag_demo.store.index_format import read_manifest

    if not folder.exists():
        raise IndexFileError(f"the folder '{folder}' was not found; {HOW_TO_CREATE}")
    return read_manifest(folder)


def open_retriever(kind: str, embedder: Any, device: str | None = None) -> Any:
    """Make the retriever of a kind.

    Raises:
        RagDemoError: There is no such device.
    """
    if kind == "faiss":
        from rag_demo.faiss_retriever import FaissRetriever

        return FaissRetriever(embedder)
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever

    if device is not None:
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # The latter without CUDA in this torch.
            raise RagDemoError(f"the device {device!r} cannot be used: {error}") from None
    return PyTorchGPURetriever(embedder, device=device)
