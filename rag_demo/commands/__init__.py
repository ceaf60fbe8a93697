"""The commands of ``rag-demo``."""

from __future__ import annotations

import logging

import click

from rag_demo.commands.evaluate import demo, evaluate
from rag_demo.commands.indexes import (
    compact,
    delete,
    get,
    info,
    list_texts,
    search,
    snapshot,
    verify,
)
from rag_demo.commands.indexing import add, index
from rag_demo.commands.options import warn
from rag_demo.errors import RagDemoError
from rag_demo.service.command import serve


@click.group(
    commands=[
        *(index, add, delete, compact, search, get, list_texts, serve),
        *(info, verify, snapshot, evaluate, demo),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="torch-cleanup")
def cli() -> None:
    """Index texts and search them."""


class _WarningHandler(logging.Handler):
    """Prints the library's warnings, such as a cache that cannot be used."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code. Without arguments, show the help.

    Raises:
        RagDemoError: The command failed, or click refused the arguments.
    """
    logger, handler = logging.getLogger("rag_demo"), _WarningHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        code = cli.main(arguments or ["--help"], prog_name="rag-demo", standalone_mode=False)
    except click.ClickException as error:
        raise RagDemoError(error.format_message()) from None
    except click.Abort:
        return 130
    finally:
        logger.removeHandler(handler)
    return code if isinstance(code, int) else 0
