"""The output of the commands: progress on a terminal; results as text, lines or JSON.

Text from documents, files and models passes `rag_demo.printable` first.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from rag_demo.printable import on_one_line
from rag_demo.searching import SearchResult

_DONE = "{task.completed} done"
_SHOWN_CHARS = 300  # of a result's text on a terminal


@contextlib.contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if that is a terminal; yield the function that advances it.

    Args:
        label: What is done.
        total: How much there is to do; None if that is unknown.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    columns = [*Progress.get_default_columns()[: 4 if total else 3], TextColumn(_DONE)]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


def print_results(
    query: str, results: Sequence[SearchResult], as_json: bool = False, *, with_query: bool = False
) -> None:
    """Print the results of a query on stdout: for a terminal, or a line with tabs for each.

    Args:
        query: The query.
        results: The results.
        as_json: Whether to print one line of JSON instead.
        with_query: Whether plain lines begin with the query. On a terminal, they always do.
    """
    if as_json:
        records = [{**result._asdict(), "place": _place(result)} for result in results]
        click.echo(json.dumps({"question": query, "results": records}))
        return
    form, most = "{}\t{:.4g}\t{}\t{}", None
    if sys.stdout is not None and sys.stdout.isatty():  # It may be closed.
        form, most, with_query = "{:>3}  {:.4g}  {}\n     {}", _SHOWN_CHARS, True
    if with_query:
        click.echo(f"# {on_one_line(query)}")
    for each in results:
        text = on_one_line(each.text[slice(*(each.passage or (None,)))])[:most]
        click.echo(form.format(each.rank, each.score, on_one_line(_place(each)), text))
    if not results:
        click.echo(f"rag-demo: nothing was found for: {on_one_line(query)}", err=True)


def _place(result: SearchResult) -> str:
    """Return where a result can be opened: a file with its line, pages or cell."""
    metadata = result.metadata
    place = metadata.get("path")
    if not isinstance(place, str):
        return str(metadata.get("source", result.id))
    with contextlib.suppress(OSError, ValueError):  # The file may be elsewhere.
        place = str(Path(place).relative_to(Path.cwd()))
    for name, form in (("line", ":{}"), ("page", "#page={}"), ("cell", " cell {}")):
        if name in metadata:
            place += form.format(metadata[name])
    if "last_page" in metadata:
        place += f" to {metadata['last_page']}"
    return place
