"""``rag-demo search``: questions to an index, from the command line, a pipe or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.conditions import conditions_of
from rag_demo.commands.options import (
    Count,
    Number,
    device_option,
    folder_argument,
    made_by_option,
    manifest_of,
    mode_option,
    open_retriever,
    retriever_option,
)
from rag_demo.errors import RagDemoError

__all__ = ["search"]

_AT_ONCE = 256  # questions out of a pipe that are asked together


@click.command()
@folder_argument
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@click.option(
    "--top-k", type=Count(1), default=5, show_default=True, help="How many answers to each."
)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only documents whose metadata fit: lang=en, year>=2020. Several must all hold.",
)
@click.option(
    "--min-score",
    type=Number(),
    help="Leave out what scores lower; makes --mode dense the default, whose scores are cosines.",
)
@click.option(
    "--context",
    type=Count(min=0),
    default=0,
    metavar="N",
    help="Show N passages before and after each answer.",
)
@mode_option
@retriever_option
@click.option(
    "--format",
    "layout",
    type=click.Choice(["auto", "table", "plain", "json"]),
    default="auto",
    show_default=True,
    help="A table on a terminal, else a line of tabs an answer; or JSON, a line a question.",
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
    layout: str,
    as_json: bool,
    model: str | None,
    device: str | None,
    context: int,
) -> None:
    """Ask QUESTIONs of the index in DIR.

    Without one, those on standard input are asked, one a line, or those at a prompt.
    """
    from rag_demo.console import Printer
    from rag_demo.embedding_model import EmbeddingModel

    if not all(question.strip() for question in questions):
        raise click.BadParameter("a question is empty; put some words between the quotes")
    where = conditions_of(conditions)
    source = ctx.get_parameter_source("mode")
    if min_score is not None and source is click.core.ParameterSource.DEFAULT:
        mode = "dense"
    manifest = manifest_of(folder)
    batches = _questions(questions)
    first = next(batches, None)
    if first is None:
        raise RagDemoError("no question was asked; name one, or pipe some in, one a line")
    neighbours = _Neighbours(folder, context)
    printer = Printer("json" if as_json else layout, rank_scores=mode == "hybrid")
    with (
        EmbeddingModel(
            model or manifest["model"], device=device, dtype=manifest.get("dtype")
        ) as embedder,
        open_retriever(retriever, embedder, device) as opened,
    ):
        opened.load(folder)
        while first is not None:
            asked = opened.search_batch(first, top_k, min_score, where, mode=mode)
            for question, results in zip(first, asked, strict=True):
                several = len(questions) != 1
                printer.show(question, results, neighbours.of(results), several=several)
            first = next(batches, None)


def _questions(given: Sequence[str]) -> Iterator[list[str]]:
    """Yield the questions to ask together."""
    if given:
        yield list(given)
    elif sys.stdin is not None and sys.stdin.isatty():
        while (question := _prompted()) is not None:
            if question.strip():
                yield [question]
    elif sys.stdin is not None:
        asked: list[str] = []
        for line in sys.stdin:
            if line.strip():
                asked.append(line.strip())
            if len(asked) == _AT_ONCE:
                yield asked
                asked = []
        if asked:
            yield asked


def _prompted() -> str | None:
    """Ask for a question at the terminal; None at the end."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (Lets input() edit the line, and remember earlier ones.)
    try:
        return input("question> ")
    except EOFError:
        click.echo()
        return None


class _Neighbours:
    """The passages around an answer: of a long document, else of the same file."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._documents: Any = None
        self._number_of: dict[str, int] = {}

    def of(self, results: Sequence[Any]) -> dict[str, tuple[list[str], list[str]]]:
        """Return what stands before and after each answer, by its id."""
        if not self._count:
            return {}
        return {result.id: self._around(result) for result in results}

    def _around(self, result: Any) -> tuple[list[str], list[str]]:
        from rag_demo.documents.passages import passages_of

        if result.passage is not None:
            spans = [passage[:2] for passage in passages_of(result.text)]
            texts = [result.text[start:stop] for start, stop in spans]
            place = spans.index(result.passage) if result.passage in spans else None
        else:
            texts, place = self._of_the_same_file(result)
        if place is None:
            return [], []
        return texts[max(0, place - self._count) : place], texts[place + 1 :][: self._count]

    def _of_the_same_file(self, result: Any) -> tuple[list[str], int | None]:
        from rag_demo.index import read_index

        if self._documents is None:
            self._documents = read_index(self._folder).documents
            numbered = enumerate(self._documents.stream())
            self._number_of = {document.id: number for number, document in numbered}
        number = self._number_of.get(result.id)
        if number is None or (source := self._file(number)) is None:
            return [], None
        low = high = number
        while low > 0 and number - low < self._count and self._file(low - 1) == source:
            low -= 1
        last = len(self._documents) - 1
        while high < last and high - number < self._count and self._file(high + 1) == source:
            high += 1
        return [self._documents[n].text for n in range(low, high + 1)], number - low

    def _file(self, number: int) -> object:
        metadata = self._documents[number].metadata
        return metadata.get("path", metadata.get("source"))
