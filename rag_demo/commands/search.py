"""``rag-demo search``: queries from the command line, a pipe or a prompt."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    device_option,
    folder_argument,
    load_manifest,
    made_by_option,
    mode_option,
    open_index,
    retriever_option,
    warn,
)
from rag_demo.commands.where_option import explain, parse_conditions, where_option
from rag_demo.errors import RagDemoError

_BATCH = 256  # queries from a pipe that are searched together


@click.command()
@folder_argument
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@click.option(
    "--top-k",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Results for each question.",
)
@where_option(
    "Search only documents whose metadata match: lang=en, 'year>=2020', tags~news (a list has "
    "news, or a text contains it). Several conditions must all hold."
)
@click.option(
    "--min-score",
    type=float,
    help="Lowest score of a result. Makes --mode dense the default, whose scores are cosines.",
)
@mode_option
@retriever_option
@click.option("--rerank", metavar="MODEL", help="A cross-encoder that orders the best again.")
@click.option(
    "--weights",
    type=(float, float),
    default=(1.0, 1.0),
    metavar="DENSE WORDS",
    help="How much both rankings count in --mode hybrid.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["auto", "table", "plain", "json"]),
    default="auto",
    show_default=True,
    help="auto: a table on a terminal, else plain. plain: one line with tabs for each result. "
    "json: one line for each question.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@made_by_option
@device_option
@click.pass_context
def search(
    ctx: click.Context,
    folder: Path,
    questions: tuple[str, ...],
    top_k: int,
    conditions: tuple[str, ...],
    min_score: float | None,
    mode: str,
    retriever: str,
    rerank: str | None,
    weights: tuple[float, float],
    layout: str,
    as_json: bool,
    model: str | None,
    device: str | None,
) -> None:
    """Search the index in DIR for each QUESTION.

    Without a QUESTION, read questions from standard input, one on each line, or from a prompt.
    """
    from rag_demo.console import Printer
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.evaluate import NoEmbeddings
    from rag_demo.reranker import Reranker

    if not all(question.strip() for question in questions):
        raise click.BadParameter("a question is empty; write some words between the quotes")
    where = parse_conditions(conditions)
    source = ctx.get_parameter_source("mode")
    if min_score is not None and source is click.core.ParameterSource.DEFAULT:
        mode = "dense"
    manifest = load_manifest(folder)
    made_by = manifest.model
    if not manifest.finished:
        warn(f"{folder} is incomplete, because the command that makes it was interrupted")
    batches = _read_questions(questions)
    batch = next(batches, None)
    if batch is None:
        raise RagDemoError("no question given; pass one, or pipe in questions, one per line")
    printer = Printer(
        "json" if as_json else layout, rank_scores=mode == "hybrid" and rerank is None
    )
    with contextlib.ExitStack() as stack:
        embedder: Any = NoEmbeddings(made_by)
        if mode != "bm25":
            name = model or made_by.name
            embedder = EmbeddingModel(name, device=device, dtype=made_by.dtype)
            stack.enter_context(embedder)
        opened = stack.enter_context(open_index(folder, retriever, embedder, device))
        reranker = None if rerank is None else stack.enter_context(Reranker(rerank, device=device))
        while batch is not None:
            try:
                found = opened.search_batch(
                    batch, top_k, min_score, where, mode, weights=weights, rerank=reranker
                )
            except ValueError as error:  # An option has an impossible value.
                raise RagDemoError(str(error)) from None
            if where is not None and not any(found):
                explain(where, folder)
            for question, results in zip(batch, found, strict=True):
                several = len(questions) != 1
                printer.show(question, results, with_query=several)
            batch = next(batches, None)


def _read_questions(questions: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of questions."""
    if questions:
        yield list(questions)
    elif sys.stdin.isatty():
        while (question := _prompt()) is not None:
            if question.strip():
                yield [question]
    else:
        lines = (line.strip().lstrip("\ufeff") for line in sys.stdin if line.strip())
        while batch := list(itertools.islice(lines, _BATCH)):
            yield batch


def _prompt() -> str | None:
    """Ask for a question at the terminal. Return None at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and a history)
    try:
        return input("question> ")
    except EOFError:
        click.echo()
        return None
