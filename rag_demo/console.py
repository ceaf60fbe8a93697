"""The output of the commands: progress on a terminal; results as tables, lines or JSON.

Text from documents, files and models passes `rag_demo.printable` first.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_demo.printable import on_one_line
from rag_demo.searching.results import SearchResult

if TYPE_CHECKING:
    from rag_demo.memory_comparison import MemoryRelease

_TABLE_CHARS = 300  # of a result's text in a table


@contextlib.contextmanager
def progress(
    label: str, total: int | None, status: Callable[[], str] = str
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if that is a terminal; yield the function that advances it.

    Args:
        label: What is done.
        total: How much there is to do; None if that is unknown.
        status: Returns a text that is shown behind the bar.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console, last = Console(stderr=True), "{task.completed} done {task.fields[status]}"
    if not console.is_terminal:  # A hidden bar of older rich prints an empty line.
        yield lambda count: None
        return
    columns = Progress.get_default_columns()[: 4 if total else 3]
    with Progress(*columns, TextColumn(last), console=console) as bar:
        task = bar.add_task(label, total=total, status="")
        yield lambda count: bar.update(task, advance=count, status=status())


class Printer:
    """Prints results on stdout: as a table, lines with tabs, or lines of JSON.

    A plain line has rank, score, place and text.

    Args:
        as_json: Whether to print JSON.
        as_table: Whether to print a table; by default on a terminal.
        rank_scores: Whether scores are sums of reciprocal ranks, which are small.
    """

    def __init__(
        self, *, as_json: bool = False, as_table: bool | None = None, rank_scores: bool
    ) -> None:
        self._as_json, self._digits = as_json, 4 if rank_scores else 3
        self._as_table = sys.stdout.isatty() if as_table is None else as_table

    def show(
        self, query: str, results: Sequence[SearchResult], *, with_query: bool = False
    ) -> None:
        """Print the results of a query.

        Args:
            query: The query.
            results: The results.
            with_query: Whether plain lines begin with the query.
        """
        title = on_one_line(query)
        if self._as_json:
            records = [{**result._asdict(), "place": _place(result)} for result in results]
            sys.stdout.write(json.dumps({"question": query, "results": records}) + "\n")
            sys.stdout.flush()
            return
        if with_query and not self._as_table:
            sys.stdout.write(f"# {title}\n")
        rows = [
            (str(each.rank), f"{each.score:.{self._digits}f}",
             on_one_line(each.text[slice(*(each.passage or (None,)))]), on_one_line(_place(each)))
            for each in results
        ]  # fmt: skip
        if not rows:
            sys.stderr.write(f"rag-demo: nothing was found for: {title}\n")
        elif self._as_table:
            short = [(n, score, _shortened(text), place) for n, score, text, place in rows]
            _print_table(title, ("#", "score", "text", "source"), short, wide=True)
        else:
            for number, score, text, place in rows:
                sys.stdout.write(f"{number}\t{score}\t{place}\t{text}\n")
        sys.stdout.flush()


def _shortened(text: str) -> str:
    return text if len(text) <= _TABLE_CHARS else f"{text[: _TABLE_CHARS - 3]}..."


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


def _print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, wide: bool = False
) -> None:
    """Print a table; its last two columns may wrap if it is ``wide``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=wide)
    for number, column in enumerate(columns):
        wraps = wide and number > 1
        right = not wraps and (wide or number > 0)
        table.add_column(
            column, justify="right" if right else "left", no_wrap=not wraps,
            overflow="fold", ratio=5 - number if wraps else None,
        )  # fmt: skip
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(Text(title, style="bold"), table)


def print_releases(releases: Sequence[MemoryRelease]) -> None:
    """Print a table of the memory that each method released."""
    from torch_utils.report import format_bytes

    weights = format_bytes(releases[0].weights_bytes)
    _print_table(
        f"all-MiniLM-L6-v2, {weights} of weights, after embedding",
        ("method", "memory taken", "given back", "share", "still held", "time"),
        [
            (each.method, format_bytes(each.taken_bytes), format_bytes(each.returned_bytes),
             f"{each.returned_bytes / each.taken_bytes:.0%}",
             format_bytes(each.taken_bytes - each.returned_bytes), f"{each.seconds * 1e3:.1f} ms")
            for each in releases
        ],
    )  # fmt: skip


def print_scores(title: str, scores: Mapping[str, float]) -> None:
    """Print a table of metrics."""
    rows = [(metric, f"{score:.4f}") for metric, score in scores.items()]
    _print_table(on_one_line(title), ("metric", "mean"), rows)
