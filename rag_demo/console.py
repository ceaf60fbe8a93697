"""What the commands show: progress on stderr, results as a table or as JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rag_demo.retriever import SearchResult

if TYPE_CHECKING:
    from rag_demo.evaluate import Score

__all__ = ["print_json", "print_results", "print_scores", "progress"]


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal; yields what advances it."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        """How many are done in a second."""

        def render(self, task: Task) -> str:
            speed = task.finished_speed or task.speed
            return f"{speed:.0f}/s" if speed else ""

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, Rate(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def print_results(question: str, results: Sequence[SearchResult]) -> None:
    """Print the answers to a question as a table with scores and sources."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A program that reads the table gets lines of a fixed width instead of wrapped ones.
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"[bold]{escape(question)}[/bold]", title_justify="left", expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("text", ratio=3)
    table.add_column("source", ratio=2, overflow="fold")
    for result in results:
        start, stop = result.passage or (0, len(result.text))
        text = " ".join(result.text[start:stop].split())
        table.add_row(
            str(result.rank),
            f"{result.score:.3f}",
            escape(text if len(text) <= 300 else f"{text[:297]}..."),
            escape(str(result.metadata.get("source", result.id))),
        )
    if results:
        console.print(table)
    else:
        console.print(f"{escape(question)}: nothing found")


def print_scores(title: str, scores: Mapping[str, Score]) -> None:
    """Print metrics with their intervals as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("metric", "mean", "95% interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, score in scores.items():
        table.add_row(metric, f"{score.mean:.4f}", f"{score.low:.4f} to {score.high:.4f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def print_json(question: str, results: Sequence[SearchResult]) -> None:
    """Print the answers to a question as one JSON object."""
    record = {"question": question, "results": [result._asdict() for result in results]}
    sys.stdout.write(json.dumps(record) + "\n")
