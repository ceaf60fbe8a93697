"""What the commands show: progress on a terminal, results as tables or as JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rag_demo.retriever import SearchResult

if TYPE_CHECKING:
    from rag_demo.evaluate import Score
    from rag_demo.give_back import GivenBack

__all__ = ["print_given_back", "print_json", "print_results", "print_scores", "progress"]


@contextlib.contextmanager
def progress(what: str, total: int, show: str = "auto") -> Iterator[Callable[[int], None]]:
    """Show a bar; yields what advances it.

    Args:
        what: Is going on.
        total: How much there is to do.
        show: "auto": on stderr if that is a terminal. "terminal": on the terminal that the
            program was started from, wherever stderr goes; no bar where there is none, or
            another program has it. "none": no bar.
    """
    with contextlib.ExitStack() as stack:
        stream: TextIO | None = sys.stderr if show == "auto" else None
        if show == "terminal":
            stream = _open_terminal()
            if stream is not None:
                stack.enter_context(stream)
        if stream is None or not stream.isatty():
            yield lambda count: None
        else:
            yield stack.enter_context(_bar(what, total, stream))


def _open_terminal() -> TextIO | None:
    """Open the terminal of this process's session, if this is the program in its foreground."""
    try:
        terminal = Path("/dev/tty").open("w", encoding="utf-8")  # noqa: SIM115  (the caller does)
    except OSError:  # There is none, or no such file on this system.
        return None
    if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
        return terminal
    terminal.close()
    return None


@contextlib.contextmanager
def _bar(what: str, total: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
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
    with Progress(*columns, Rate(), TimeRemainingColumn(), console=Console(file=stream)) as bar:
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


def print_given_back(found: Sequence[GivenBack]) -> None:
    """Print what was given back, way by way, as a table."""
    from rich.console import Console
    from rich.table import Table

    from torch_utils.report import format_bytes

    weights = format_bytes(found[0].weights_bytes)
    table = Table(
        title=f"[bold]all-MiniLM-L6-v2, {weights} of weights, after embedding[/bold]",
        title_justify="left",
    )
    for column in ("way", "took", "gave back", "of it", "kept", "in"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for each in found:
        table.add_row(
            each.way,
            format_bytes(each.taken_bytes),
            format_bytes(each.returned_bytes),
            f"{each.returned_bytes / each.taken_bytes:.0%}",
            format_bytes(each.taken_bytes - each.returned_bytes),
            f"{each.seconds * 1e3:.1f} ms",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


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
