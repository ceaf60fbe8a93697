"""``rag-demo search``: questions to an index, from the command line, a pipe or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rag_demo.commands.options import (
    Count,
    Number,
    device_option,
    folder_argument,
    load_manifest,
    made_by_option,
    mode_option,
    open_retriever,
    retriever_option,
)
from rag_demo.commands.where_option import parse_conditions
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
    where = parse_conditions(conditions)
    source = ctx.get_parameter_source("mode")
    if min_score is not None and source is click.core.ParameterSource.DEFAULT:
        mode = "dense"
    made_by = load_manifest(folder).model
    batches = _questions(questions)
    first = next(batches, None)
    if first is None:
        raise RagDemoError("no question was asked; name one, or pipe some in, one a line")
    neighbours = _Neighbours(folder, context)
    printer = Printer("json" if as_json else layout, rank_scores=mode == "hybrid")
    with (
        EmbeddingModel(model or made_by.name, device=device, dtype=made_by.dtype) as embedder,
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
        self._opened: Any = None

    def of(self, results: Sequence[Any]) -> dict[str, tuple[list[str], list[str]]]:
        """Return what stands before and after each answer, by its id."""
        if not self._count:
            return {}
        return {result.id: self._around(result) for result in results}

    def _around(self, result: Any) -> tuple[list[str], list[str]]:
        from rag_demo.documents.passages import passages_of

        if result.passage is not None:
            spans = [passage[:2] for passage in passages_of(result.text)]
            names: list[Any] = list(spans)
            texts, name = [result.text[start:stop] for start, stop in spans], result.passage
        else:
            its = self._of_the_same_file(result)
            names, texts, name = [each.id for each in its], [each.text for each in its], result.id
        if name not in names:
            return [], []
        place = names.index(name)
        return texts[max(0, place - self._count) : place], texts[place + 1 :][: self._count]

    def _of_the_same_file(self, result: Any) -> list[Any]:
        from rag_demo.store.reader import SavedIndex

        if self._opened is None:
            self._opened = SavedIndex(self._folder)
        documents = self._opened.documents
        numbers = [number for _, number in documents.find([result.id])]
        files = [each.file for each in documents.get(numbers) if each.file is not None]
        its = documents.of_file(files[0]) if files else []
        order = ("page", "cell", "start", "line")
        return sorted(its, key=lambda each: [_number(each.metadata.get(name)) for name in order])


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0
