"""``rag-demo search``: queries from the command line or standard input."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from rag_demo.commands import options
from rag_demo.errors import RagDemoError
from rag_demo.places import as_place, load_manifest

_BATCH = 256  # queries from a pipe that are searched together


@click.command()
@options.folder_argument
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@click.option(
    "--also", multiple=True, metavar="DIR", type=as_place, help="Search another index too."
)
@options.top_k_option
@options.where_option(
    "Search only documents whose metadata match: lang=en, 'year>=2020', tags~news (a list has "
    "news, or a text contains it). Several conditions must all hold."
)
@click.option(
    "--min-score",
    type=float,
    help="Lowest score of a result. Makes --mode dense the default, whose scores are cosines.",
)
@options.mode_option
@click.option("--rerank", metavar="MODEL", help="A cross-encoder that orders the best again.")
@click.option(
    "--weights",
    type=(float, float),
    default=(1.0, 1.0),
    metavar="DENSE WORDS",
    help="How much both rankings count in --mode hybrid.",
)
@options.json_option
@options.made_by_option
@options.device_option
def search(
    folder: Any,
    questions: tuple[str, ...],
    also: tuple[Any, ...],
    top_k: int,
    where: dict[str, Any] | None,
    min_score: float | None,
    mode: str | None,
    rerank: str | None,
    weights: tuple[float, float],
    as_json: bool,
    model: str | None,
    device: str | None,
) -> None:
    """Search the index in DIR for each QUESTION.

    Without a QUESTION, read questions from standard input, one on each line. Results are lines
    with tabs unless stdout is a terminal.
    """
    from rag_demo.console import print_results
    from rag_demo.reranker import Reranker

    if not all(question.strip() for question in questions):
        raise click.BadParameter("a question is empty; write some words between the quotes")
    places = (folder, *also)
    mode = mode or ("hybrid" if min_score is None else "dense")
    for place in places:
        if not load_manifest(place).finished:
            options.warn(f"{place} is incomplete: its command still runs or was interrupted")
    with contextlib.ExitStack() as stack:
        opened = options.open_retriever(stack, places, mode, model, device)
        reranker = None if rerank is None else stack.enter_context(Reranker(rerank, device=device))
        for batch in _read_questions(questions):
            found = opened.search_batch(
                batch, top_k, min_score, where, mode, weights=weights, rerank=reranker
            )
            if where is not None and not any(found):
                options.explain(where, places)
            for question, results in zip(batch, found, strict=True):
                print_results(question, results, as_json, with_query=len(questions) != 1)


def _read_questions(questions: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of questions.

    Raises:
        RagDemoError: No question was given.
    """
    if questions:
        yield list(questions)
        return
    lines: Iterator[str] = (line.strip().lstrip("\ufeff") for line in sys.stdin if line.strip())
    size = 1 if sys.stdin.isatty() else _BATCH
    batch = list(itertools.islice(lines, size))
    if not batch:
        raise RagDemoError("no question given; pass one, or pipe in questions, one per line")
    while batch:
        yield batch
        batch = list(itertools.islice(lines, size))
