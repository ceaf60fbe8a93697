"""``rag-demo serve``: answers questions to an index over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import click

from rag_demo.commands.options import (
    Count,
    Number,
    device_option,
    facts_of,
    made_by_option,
    retriever_option,
    warn,
)
from rag_demo.errors import RagDemoError

__all__ = ["serve"]

TOKEN, ADMIN_TOKEN = "RAG_DEMO_TOKEN", "RAG_DEMO_ADMIN_TOKEN"


@contextlib.contextmanager
def _without_hangups() -> Iterator[None]:
    """Ignore SIGHUP, which would end what is not ready yet; later it reloads, until the end."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:  # None is what was not made by Python, and cannot be put back.
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


@click.command(
    short_help="Answer questions to an index over HTTP.",
    context_settings={"auto_envvar_prefix": "RAG_DEMO"},
)
@click.option(
    "--index",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of the index.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=Count(0, 65535),
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--keep-alive",
    default="5m",
    show_default=True,
    help="How long an idle model is kept: seconds, 90s, 10m, 1h, 0 (not at all), -1 (for ever).",
)
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    default="thread",
    show_default=True,
    help="A model in a process of its own gives back everything when it is unloaded.",
)
@click.option(
    "--call-timeout",
    type=Number(0, 60, min_open=True),
    help="Seconds for one call of a model in a process of its own. [default: 60]",
)
@click.option(
    "--workers",
    type=Count(1),
    default=1,
    show_default=True,
    help="Processes that serve, each with a model of its own.",
)
@retriever_option
@made_by_option
@device_option
@click.option("--reranker", metavar="NAME", help="A cross-encoder for /rerank: folder or name.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Run code that comes with the models. [default: no]"
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"A file with the token that clients must send. [default: the variable {TOKEN}]",
)
@click.option(
    "--admin-token-file",
    type=click.Path(path_type=Path),
    help="A file with the token for administration and changes. "
    f"[default: the variable {ADMIN_TOKEN}, else the clients' token]",
)
@click.option("--no-token", is_flag=True, help="Answer anybody who can reach --host.")
@click.option("--writable", is_flag=True, help="Let clients add and delete documents.")
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="An origin whose pages may call the service, or *. May be given several times.",
)
@click.option(
    "--drain",
    type=Number(0, 3600),
    default=0.0,
    help="Seconds to go on answering after the signal to stop, while /readyz says 503.",
)
@click.option(
    "--batch",
    type=Count(1),
    default=64,
    show_default=True,
    help="Texts of several clients that are embedded together; 1 for one request at a time.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
    default="INFO",
    show_default=True,
)
@_without_hangups()
def serve(
    keep_alive: str,
    retriever: str,
    isolation: str,
    call_timeout: float | None,
    token_file: Path | None,
    admin_token_file: Path | None,
    no_token: bool,
    cors_origin: tuple[str, ...],
    drain: float,
    batch: int,
    log_format: str,
    log_level: str,
    **options: Any,
) -> int:
    """Answer questions to the index in DIR over HTTP, until SIGTERM or Ctrl-C."""
    # A core that spins until the next product of matrices comes is missing to everybody else; it
    # is read when torch is loaded, here or in another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from rag_demo.service.logs import configure_logging
        from rag_demo.service.server import bind, run_server
        from rag_demo.service.settings import Limits, Settings, is_loopback
        from rag_demo.service.supervisor import run_workers
    except ModuleNotFoundError as error:
        raise RagDemoError(
            f"serve needs {error.name}; install it with: "
            "pip install '.[service]', in a clone of torch-cleanup"
        ) from None
    from torch_utils import ModelHost, exit_on_signals

    kept: float | str = keep_alive
    with contextlib.suppress(ValueError):
        kept = float(keep_alive)
    try:
        ModelHost(dict, keep_alive=kept).close()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--keep-alive'") from None
    host, workers = options["host"], options["workers"]
    if options["writable"] and workers > 1:
        raise RagDemoError("--writable needs --workers 1: other workers would miss the changes")
    if call_timeout is not None and isolation == "thread":
        raise RagDemoError("--call-timeout needs --isolation process: a thread cannot be ended")
    if no_token and token_file is not None:
        raise RagDemoError("give either --no-token or --token-file")
    for origin in cors_origin:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise RagDemoError(
                f"--cors-origin is a scheme and a host, such as https://example.org, not {origin!r}"
            )
    facts_of(options["index"])
    token = _token(TOKEN, token_file)
    if token is None and not is_loopback(host):
        if not no_token:
            raise RagDemoError(
                f"{host or 'this machine'} can be reached from elsewhere, and there is no token; "
                f"put one into {TOKEN} or a --token-file, or say --no-token to serve anybody"
            )
        warn(f"WARNING: there is no token: whoever reaches {host} can read the whole index")
    settings = Settings(
        **options,
        retriever=cast(Literal["torch", "faiss"], retriever),
        keep_alive=kept,
        isolation=cast(Literal["thread", "process"], isolation),
        call_timeout_s=call_timeout,
        token=token,
        admin_token=_token(ADMIN_TOKEN, admin_token_file),
        cors_origins=cors_origin,
        drain_s=drain,
        limits=Limits(batch_texts=batch),
    )
    listener = bind(settings)
    configure_logging(log_format, log_level)
    if workers > 1:
        return 128 + run_workers(settings, listener, (log_format, log_level))
    exit_on_signals()  # The server stops in order, and raises its signal again when it has.
    return 128 + run_server(settings, listener)  # A signal that is ignored is raised in vain.


for _option in serve.params:
    cast(click.Option, _option).show_envvar = True


def _token(variable: str, file: Path | None) -> str | None:
    # Other bytes than ASCII are refused below, whatever their encoding.
    try:
        token = (
            os.environ.get(variable) if file is None else file.read_text("utf-8", "surrogateescape")
        )
    except OSError as error:
        reason = error.strerror or error
        raise RagDemoError(f"the token file '{file}' cannot be read: {reason}") from error
    if token is None:
        return None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        where = f"the variable {variable}" if file is None else f"the file '{file}'"
        what = "is not printable ASCII without spaces" if token else "is empty"
        raise RagDemoError(f"the token in {where} {what}; put another one there, or remove it")
    return token
