"""What the commands show: progress on a terminal, answers as tables, as lines or as JSON on stdout.

Whatever comes from documents, files and models passes `rag_demo.printable` on its way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rag_demo.printable import on_one_line
from rag_demo.retriever import SearchResult

if TYPE_CHECKING:
    from rich.console import Console

    from rag_demo.evaluate import Score
    from rag_demo.memory_comparison import MemoryRelease

__all__ = ["Printer", "counting", "print_releases", "print_scores", "progress"]

_TABLE_CHARS = 300  # of an answer's text in a table
_Around = Mapping[str, tuple[list[str], list[str]]]


@contextlib.contextmanager
def progress(what: str, total: int | None, show: str = "auto") -> Iterator[Callable[..., None]]:
    """Show a bar; yields what advances it, by a count, and a part of the total if it is none.

    Args:
        what: Is going on.
        total: How much there is to do; None if nobody knows.
        show: "auto": on stderr if that is a terminal. "terminal": on the terminal that the
            program was started from, wherever stderr goes; no bar where there is none, or
            another program has it. "none": no bar.
    """
    with _stream_of(show) as stream:
        if stream is None:
            yield lambda count, part=None: None
        else:
            with _bar(what, total, stream) as advance:
                yield advance


@contextlib.contextmanager
def counting(what: str, show: str = "auto") -> Iterator[Callable[[int], None]]:
    """Show a count that grows, and is gone at the end; see `progress`."""
    with _stream_of(show) as stream:
        if stream is None:
            yield lambda count: None
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn

        columns = SpinnerColumn(), TextColumn("{task.description}: {task.completed:.0f}")
        with Progress(*columns, console=Console(file=stream), transient=True) as bar:
            task = bar.add_task(_as_markup(what), total=None)
            yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def _stream_of(show: str) -> Iterator[TextIO | None]:
    """Open where progress is shown, if it is."""
    stream: TextIO | None = sys.stderr if show == "auto" else None
    with contextlib.ExitStack() as stack:
        if show == "terminal":
            stream = _open_terminal()
            if stream is not None:
                stack.enter_context(stream)
        yield stream if stream is not None and stream.isatty() else None


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
def _bar(what: str, total: int | None, stream: TextIO) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        """How many are done in a second, of what is counted."""

        def render(self, task: Task) -> str:
            elapsed = task.finished_time or task.elapsed
            return f"{task.fields['count'] / elapsed:.0f}/s" if elapsed else ""

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
    with Progress(*columns, Rate(), TimeRemainingColumn(), console=Console(file=stream)) as bar:
        task = bar.add_task(_as_markup(what), total=total, count=0, shown="")
        done = 0

        def advance(count: int, part: int | None = None) -> None:
            nonlocal done
            done += count
            is_part = part is not None or total is None
            texts = "text" if done == 1 else "texts"
            shown = f"{done:,} {texts}" if is_part else f"{done}/{total}"
            bar.update(task, advance=count if part is None else part, count=done, shown=shown)

        yield advance


def _as_markup(text: object) -> str:
    from rich.markup import escape

    return escape(on_one_line(text))


class Printer:
    """Prints answers on stdout.

    Args:
        layout: "table", "plain" (a line for each answer: rank, score, place and text, with tabs
            between them), "json" (a line for each question), or "auto": a table on a terminal,
            else plain.
        rank_scores: Whether scores are small sums of ranks.
    """

    def __init__(self, layout: str, *, rank_scores: bool) -> None:
        if layout == "auto":
            layout = "table" if sys.stdout.isatty() else "plain"
        self._layout = layout
        self._digits = 4 if rank_scores else 3

    def show(
        self,
        question: str,
        results: Sequence[SearchResult],
        around: _Around | None = None,
        *,
        several: bool = False,
    ) -> None:
        """Print the answers to a question.

        Args:
            question: What was asked.
            results: The answers.
            around: Texts before and after answers, by their ids.
            several: Whether there are other questions, and this one has to be named.
        """
        around = around or {}
        if self._layout == "json":
            self._json(question, results, around)
        elif self._layout == "table":
            self._table(question, results, around)
        else:
            self._plain(question, results, around, several)
        sys.stdout.flush()

    def _json(self, question: str, results: Sequence[SearchResult], around: _Around) -> None:
        answers: list[dict[str, Any]] = []
        for result in results:
            answer = {**result._asdict(), "place": place_of(result)}
            if result.id in around:
                answer["before"], answer["after"] = around[result.id]
            answers.append(answer)
        sys.stdout.write(json.dumps({"question": question, "results": answers}) + "\n")

    def _plain(
        self, question: str, results: Sequence[SearchResult], around: _Around, several: bool
    ) -> None:
        if several:
            sys.stdout.write(f"# {on_one_line(question)}\n")
        for result in results:
            before, after = around.get(result.id, ([], []))
            text = on_one_line("\n".join([*before, _text_of(result), *after]))
            place = on_one_line(place_of(result))
            score = f"{result.score:.{self._digits}f}"
            sys.stdout.write(f"{result.rank}\t{score}\t{place}\t{text}\n")
        if not results:
            sys.stderr.write(f"rag-demo: nothing was found for: {on_one_line(question)}\n")

    def _table(self, question: str, results: Sequence[SearchResult], around: _Around) -> None:
        from rich.table import Table
        from rich.text import Text

        console = _console()
        asked = Text(on_one_line(question), style="bold")
        if not results:
            console.print(Text("nothing was found for: ") + asked)
            return
        table = Table(title=asked, title_justify="left", expand=True)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("score", justify="right", no_wrap=True)
        table.add_column("text", ratio=3)
        table.add_column("source", ratio=2, overflow="fold")
        for result in results:
            text = on_one_line(_text_of(result))
            answer = Text(text if len(text) <= _TABLE_CHARS else f"{text[: _TABLE_CHARS - 3]}...")
            before, after = around.get(result.id, ([], []))
            if before or after:
                answer.stylize("bold")
            parts = [Text(on_one_line(each), style="not bold") for each in (*before, *after)]
            parts.insert(len(before), answer)
            table.add_row(
                str(result.rank),
                f"{result.score:.{self._digits}f}",
                Text("\n").join(parts),
                Text(on_one_line(place_of(result))),
            )
        console.print(table)


def place_of(result: SearchResult) -> str:
    """Name where an answer can be opened: a file and a line, a page, a cell, an anchor."""
    metadata = result.metadata
    place = metadata.get("path")
    if not isinstance(place, str):
        return str(metadata.get("source", result.id))
    # From here a file below this folder can be opened by a shorter name.
    with contextlib.suppress(OSError, ValueError):
        place = str(Path(place).relative_to(Path.cwd()))
    if "line" in metadata:
        place += f":{metadata['line']}"
    if "page" in metadata:
        place += f"#page={metadata['page']}"
    if "cell" in metadata:
        place += f" cell {metadata['cell']}"
    if "anchor" in metadata:
        place += f" #{metadata['anchor']}"
    return place


def _text_of(result: SearchResult) -> str:
    start, stop = result.passage or (0, len(result.text))
    return result.text[start:stop]


def _console() -> Console:
    """Make what prints tables: for a program that reads them, with lines of a fixed width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def print_releases(found: Sequence[MemoryRelease]) -> None:
    """Print what was given back, way by way, as a table."""
    from rich.table import Table

    from torch_utils.report import format_bytes

    weights = format_bytes(found[0].weights_bytes)
    table = Table(
        title=f"[bold]all-MiniLM-L6-v2, {weights} of weights, after embedding[/bold]",
        title_justify="left",
    )
    for column in ("way", "memory taken", "given back", "share", "still held", "time"):
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
    _console().print(table)


def print_scores(title: str, scores: Mapping[str, Score]) -> None:
    """Print metrics with their intervals as a table."""
    from rich.table import Table

    table = Table(title=_as_markup(title), title_justify="left")
    for column in ("metric", "mean", "95% interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, score in scores.items():
        table.add_row(metric, f"{score.mean:.4f}", f"{score.low:.4f} to {score.high:.4f}")
    _console().print(table)
