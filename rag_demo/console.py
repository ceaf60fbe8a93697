"""The output of the commands: progress on a terminal; results as tables, lines or JSON.

Text from documents, files and models passes `rag_demo.printable` first.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rag_demo.printable import on_one_line
from rag_demo.searching.results import SearchResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rag_demo.evaluate import Score
    from rag_demo.memory_comparison import MemoryRelease

_TABLE_CHARS = 300  # of a result's text in a table


@contextlib.contextmanager
def progress(
    label: str, total: int | None, show: str, *, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield the function that advances it.

    Args:
        label: What is being done.
        total: How much there is to do, or None if that is unknown.
        show: "auto" shows it on stderr if that is a terminal. "none" shows nothing.
        transient: Whether to remove the bar at the end.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_hidden = show == "none" or not console.is_terminal
    with Progress(console=console, transient=transient, disable=is_hidden) as bar:
        task = bar.add_task(_as_markup(label), total=total)
        yield lambda count: bar.advance(task, count)


def _as_markup(text: object) -> str:
    from rich.markup import escape

    return escape(on_one_line(text))


class Printer:
    """Prints results on stdout.

    Args:
        layout: "table"; "plain" (a line for each result: rank, score, place and text, separated
            by tabs); "json" (a line for each query); or "auto": a table on a terminal, else
            plain.
        rank_scores: Whether scores are sums of reciprocal ranks, which are small.
    """

    def __init__(self, layout: str, *, rank_scores: bool) -> None:
        if layout == "auto":
            layout = "table" if sys.stdout.isatty() else "plain"
        self._layout = layout
        self._digits = 4 if rank_scores else 3

    def show(
        self,
        query: str,
        results: Sequence[SearchResult],
        *,
        with_query: bool = False,
    ) -> None:
        """Print the results of a query.

        Args:
            query: The query.
            results: The results.
            with_query: Whether plain lines begin with the query.
        """
        if self._layout == "json":
            self._json(query, results)
        elif not results:
            message = f"nothing was found for: {on_one_line(query)}\n"
            if self._layout == "table":
                sys.stdout.write(message)
            else:
                sys.stdout.write(f"# {on_one_line(query)}\n" * with_query)
                sys.stderr.write(f"rag-demo: {message}")
        elif self._layout == "table":
            self._table(query, results)
        else:
            self._plain(query, results, with_query)
        sys.stdout.flush()

    def _json(self, query: str, results: Sequence[SearchResult]) -> None:
        records = [{**result._asdict(), "place": _place(result)} for result in results]
        sys.stdout.write(json.dumps({"question": query, "results": records}) + "\n")

    def _plain(self, query: str, results: Sequence[SearchResult], with_query: bool) -> None:
        sys.stdout.write(f"# {on_one_line(query)}\n" * with_query)
        for result in results:
            text = on_one_line(_text(result))
            place = on_one_line(_place(result))
            score = f"{result.score:.{self._digits}f}"
            sys.stdout.write(f"{result.rank}\t{score}\t{place}\t{text}\n")

    def _table(self, query: str, results: Sequence[SearchResult]) -> None:
        from rich.table import Table
        from rich.text import Text

        title = Text(on_one_line(query), style="bold")
        table = Table(title=title, title_justify="left", expand=True)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("score", justify="right", no_wrap=True)
        table.add_column("text", ratio=3)
        table.add_column("source", ratio=2, overflow="fold")
        for result in results:
            text = on_one_line(_text(result))
            short = text if len(text) <= _TABLE_CHARS else f"{text[: _TABLE_CHARS - 3]}..."
            table.add_row(
                str(result.rank),
                f"{result.score:.{self._digits}f}",
                Text(short),
                Text(on_one_line(_place(result))),
            )
        _console().print(table)


def _place(result: SearchResult) -> str:
    """Return where a result can be opened: a file with its line, page, cell or anchor."""
    metadata = result.metadata
    place = metadata.get("path")
    if not isinstance(place, str):
        return str(metadata.get("source", result.id))
    with contextlib.suppress(OSError, ValueError):  # The file may be elsewhere.
        place = str(Path(place).relative_to(Path.cwd()))
    for name, form in (("line", ":{}"), ("page", "#page={}"), ("cell", " cell {}")):
        if name in metadata:
            place += form.format(metadata[name])
    return f"{place} #{metadata['anchor']}" if "anchor" in metadata else place


def _text(result: SearchResult) -> str:
    start, stop = result.passage or (0, len(result.text))
    return result.text[start:stop]


def _console() -> Console:
    """Return the console for tables. A pipe gets lines of a fixed width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def _small_table(title: str, columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def print_releases(releases: Sequence[MemoryRelease]) -> None:
    """Print a table of the memory that each method released."""
    from torch_utils.report import format_bytes

    weights = format_bytes(releases[0].weights_bytes)
    table = _small_table(
        f"[bold]all-MiniLM-L6-v2, {weights} of weights, after embedding[/bold]",
        ("method", "memory taken", "given back", "share", "still held", "time"),
    )
    for each in releases:
        table.add_row(
            each.method,
            format_bytes(each.taken_bytes),
            format_bytes(each.returned_bytes),
            f"{each.returned_bytes / each.taken_bytes:.0%}",
            format_bytes(each.taken_bytes - each.returned_bytes),
            f"{each.seconds * 1e3:.1f} ms",
        )
    _console().print(table)


def print_scores(title: str, scores: Mapping[str, Score]) -> None:
    """Print a table of metrics with their intervals."""
    table = _small_table(_as_markup(title), ("metric", "mean", "95% interval"))
    for metric, score in scores.items():
        table.add_row(metric, f"{score.mean:.4f}", f"{score.low:.4f} to {score.high:.4f}")
    _console().print(table)
