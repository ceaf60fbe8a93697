"""``rag-demo serve``: searches an index over HTTP."""

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
    device_option,
    finite,
    load_manifest,
    made_by_option,
    retriever_option,
    warn,
)
from rag_demo.errors import RagDemoError

__all__ = ["serve"]

TOKEN, ADMIN_TOKEN = "RAG_DEMO_TOKEN", "RAG_DEMO_ADMIN_TOKEN"


@contextlib.contextmanager
def _without_hangups() -> Iterator[None]:
    """Ignore SIGHUP until the server handles it, and after the server has stopped."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:  # None: the handler was not installed from Python, so it cannot be restored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


@click.command(
    short_help="Search an index over HTTP.",
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
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 for a free port.",
)
@click.option(
    "--keep-alive",
    default="5m",
    show_default=True,
    help="How long an idle model stays loaded: 90, 90s, 10m, 1h, 0 (not at all), -1 (forever).",
)
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    default="thread",
    show_default=True,
    help="Run models in this process, or in processes whose end returns all memory.",
)
@click.option(
    "--call-timeout",
    type=click.FloatRange(0, 60, min_open=True),
    callback=finite,
    help="Seconds for one call of a model; needs --isolation process. [default: 60]",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of processes that serve, each with its own model.",
)
@retriever_option
@made_by_option
@device_option
@click.option("--reranker", metavar="NAME", help="Cross-encoder for /rerank: folder or name.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Run code that comes with the models. [default: no]"
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the token that clients must send. [default: the variable {TOKEN}]",
)
@click.option(
    "--admin-token-file",
    type=click.Path(path_type=Path),
    help="File with the token for administration and changes. "
    f"[default: the variable {ADMIN_TOKEN}, else the clients' token]",
)
@click.option("--no-token", is_flag=True, help="Answer every client that can reach --host.")
@click.option(
    "--writable", is_flag=True, help="Let clients add and delete documents; needs --workers 1."
)
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of pages that may call the service, or *. May be repeated.",
)
@click.option(
    "--drain",
    type=click.FloatRange(0, 3600),
    callback=finite,
    default=0.0,
    help="Seconds to accept requests after a signal to stop, while /readyz returns 503.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Maximum number of texts from several clients to embed together; 1 disables batching.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log on stderr.",
)
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
    default="INFO",
    show_default=True,
    help="Lowest level of the lines in the log.",
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
    """Search the index in DIR over HTTP, until SIGTERM or Ctrl-C."""
    # OpenMP threads that spin between two calls take their cores from other threads. OpenMP reads
    # the variable when torch is loaded, here or in another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from rag_demo.service.logs import configure_logging
        from rag_demo.service.server import bind, run_server
        from rag_demo.service.settings import Limits, Settings, is_loopback
        from rag_demo.service.supervisor import run_workers
    except ModuleNotFoundError as error:
        raise RagDemoError(
            f"serve needs {error.name}; install it with: "
            "pip install '.[service]' in a clone of torch-cleanup"
        ) from None
    from torch_utils import ModelHost, exit_on_signals

    keep_alive_s: float | str = keep_alive
    with contextlib.suppress(ValueError):
        keep_alive_s = float(keep_alive)
    try:
        ModelHost(dict, keep_alive=keep_alive_s).close()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--keep-alive'") from None
    host, workers = options["host"], options["workers"]
    if options["writable"] and workers > 1:
        raise RagDemoError("--writable needs --workers 1; other workers would miss the changes")
    if call_timeout is not None and isolation == "thread":
        raise RagDemoError("--call-timeout needs --isolation process; a thread cannot be ended")
    if no_token and token_file is not None:
        raise RagDemoError("use either --no-token or --token-file, not both")
    for origin in cors_origin:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise RagDemoError(
                f"--cors-origin must be like https://example.org, without a path, got {origin!r}"
            )
    load_manifest(options["index"])
    token = _token(TOKEN, token_file)
    if token is None and not is_loopback(host):
        if not no_token:
            raise RagDemoError(
                f"{host or 'this machine'} can be reached by other machines without a token; "
                f"set {TOKEN} or --token-file, or use --no-token to answer every client"
            )
        warn(f"WARNING: without a token every client that reaches {host} can read the whole index")
    settings = Settings(
        **options,
        retriever=cast(Literal["torch", "faiss"], retriever),
        keep_alive=keep_alive_s,
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
    exit_on_signals()  # The server raises its signal again after it has stopped.
    return 128 + run_server(settings, listener)  # It returns only if the signal is ignored.


for _option in serve.params:
    cast(click.Option, _option).show_envvar = True


def _token(variable: str, file: Path | None) -> str | None:
    # Bytes that are not ASCII are refused below in any encoding.
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
        raise RagDemoError(f"the token in {where} {what}; set another token, or remove it")
    return token
