"""``rag-demo serve``: searches an index over HTTP."""

from __future__ import annotations

import os
from typing import Any

import click

from rag_demo.errors import RagDemoError
from rag_demo.open_index import load_manifest

__all__ = ["serve"]


class _Command(click.Command):
    """A command whose options are the fields of `rag_demo.service.settings.Settings`."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        try:
            from rag_demo.service.settings import options
        except ModuleNotFoundError as error:
            raise RagDemoError(
                f"serve needs {error.name}; install it with: "
                "pip install '.[service]' in a clone of torch-cleanup"
            ) from None
        return [*options(), *super().get_params(context)]


@click.command(cls=_Command, short_help="Search an index over HTTP.")
def serve(**options: Any) -> int:
    """Search an index over HTTP, until SIGTERM or Ctrl-C.

    Each option is also a variable: RAG_DEMO_INDEX, RAG_DEMO_BATCH_TOKENS. The variables
    RAG_DEMO_TOKEN and RAG_DEMO_ADMIN_TOKEN hold tokens.
    """
    from rag_demo.service.settings import Settings, is_loopback, read_tokens

    settings = Settings.read(
        **{name: value for name, value in options.items() if value not in (None, ())}
    )
    # Threads that spin between two calls take their cores from others. OpenMP (of torch) and
    # OpenBLAS (of NumPy, whose threads always spin) read the variables when they are loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from rag_demo.service.logs import configure_logging
    from rag_demo.service.server import bind, run_server
    from torch_utils import exit_on_signals

    load_manifest(settings.index)  # Its errors are for the terminal.
    host = settings.host
    if not (read_tokens(settings)[0] or is_loopback(host) or settings.no_token):
        raise RagDemoError(
            f"{host or 'this machine'} can be reached by other machines without a token; "
            "set RAG_DEMO_TOKEN or --token-file, or use --no-token to answer every client"
        )
    listener = bind(settings)
    configure_logging(settings.log_format, settings.log_level)
    exit_on_signals()  # The server raises its signal again after it has stopped.
    return 128 + run_server(settings, listener)  # It returns only if the signal is ignored.
