"""Options of several commands, functions that open the indexes and models, and the output.

Text from documents, files and models passes `rag_demo.printable` first.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.open_index import load_manifest, open_index, open_store
from rag_demo.printable import on_one_line, printable
from rag_demo.search_request import MODES, SearchResult
from rag_demo.stores.address import as_place
from rag_demo.stores.filters import COMPARISONS

if TYPE_CHECKING:
    from rag_demo.embedding_model import EmbeddingModel


folder_argument = click.argument("folder", metavar="DIR", type=as_place)
place_option = partial(click.option, metavar="DIR", type=as_place)
model_option = click.option("--model", help="Folder or name of a model. [default: packaged MiniLM]")
made_by_option = click.option("--model", help="Folder or name. [default: the model of the index]")
trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run code that comes with the model."
)
device_option = click.option("--device", help="cpu, cuda, cuda:1, mps or xpu. [default: the best]")
_DTYPES = click.Choice(["float32", "bfloat16"])
dtype_option = click.option("--dtype", type=_DTYPES, default="float32", help="Dtype of the model.")
rerank_option = click.option(
    "--rerank", metavar="MODEL", help="A cross-encoder that orders the best again."
)
weights_option = click.option(
    "--weights", type=(float, float), default=(1, 1), help="Of vectors and words."
)
mode_option = click.option("--mode", type=click.Choice(MODES), help="[default: hybrid]")
top_k_option = click.option("--top-k", type=click.IntRange(1), default=5, help="Results, at most.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")


def open_model(
    model: str | None, made_by: ModelIdentity | None = None, *, cache: bool = False, **options: Any
) -> EmbeddingModel:
    """Create the model, which the caller must close. It is loaded on first use.

    Args:
        model, cache: The options of the command.
        made_by: The model of an index: it gives the options, and the name unless that is one.
        options: Other options of `EmbeddingModel`.
    """
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.encoding.embedding_cache import default_cache_path

    if made_by is not None:
        model, options = model or made_by.name, {**made_by.options, **options}
    path = default_cache_path() if cache else None
    return EmbeddingModel(model, cache=path, **options)


def open_retriever(
    stack: ExitStack, place: Any, mode: str, model: str | None, device: str | None, **options: Any
) -> Any:
    """Open the retriever of an index, which the stack closes."""
    made_by = load_manifest(place).model
    # A search by words needs no model, only the identity of the one that made the index.
    embedder: Any = made_by or ModelIdentity("none")
    if mode != "bm25":
        embedder = stack.enter_context(open_model(model, made_by, device=device, **options))
    return open_index(place, embedder, stack, device=device)


def open_reranker(stack: ExitStack, model: str | None, **options: Any) -> Any:
    """Create the reranker, which the stack closes; None without a name."""
    if model is None:
        return None
    from rag_demo.reranker import Reranker

    return stack.enter_context(Reranker(model, **options))


def say(text: object) -> None:
    """Print a line on stdout."""
    click.echo(printable(text))


def warn(text: object) -> None:
    """Print a line on stderr."""
    click.echo(f"rag-demo: {on_one_line(text)}", err=True)


_CONDITION = re.compile(r"\s*(\$id|[^$=<>!~][^=<>!~]*?)\s*(<=|>=|!=|=|<|>|~)(?![=<>~])(.*)", re.S)
_OPERATORS = {"!=": "$nin", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte", "~": "$contains"}


def _parse_conditions(
    context: click.Context, parameter: click.Parameter, conditions: Sequence[str]
) -> dict[str, Any] | None:
    """Make a filter of conditions that must all hold. Without conditions, return None.

    The operators are ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` and ``~``: a list has the value,
    or a string contains it. A value is read as JSON (a number, true, false), or else as a string.
    With ``=`` and ``!=`` it also matches the string of its spelling. A string that begins with an
    operator must be in double quotes. Several values for ``=`` of one key are alternatives.

    Raises:
        click.BadParameter: A condition is invalid.
    """
    filters: list[dict[str, Any]] = []
    alternatives: dict[str, list[Any]] = {}
    for condition in conditions:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            raise click.BadParameter(
                f"{condition!r} is not a condition; write KEY=VALUE, or !=, <, <=, >, >=, ~; "
                "put a value that begins with an operator in double quotes"
            )
        key, sign, value = found[1], found[2], found[3].strip()
        try:
            typed = json.loads(value, parse_constant=str)  # NaN is a text.
        except (ValueError, RecursionError):
            typed = value
        values = [typed if isinstance(typed, (str, int, float)) else value, value]
        if not value and sign not in ("=", "!="):
            raise click.BadParameter(f"{condition!r} has no value after {sign}")
        if sign == "=":
            alternatives.setdefault(key, []).extend(values)
        else:
            filters.append({key: {_OPERATORS[sign]: values if sign == "!=" else values[0]}})
    filters += [{key: {"$in": values}} for key, values in alternatives.items()]
    return {"$and": filters} if filters else None


where_option = click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    callback=_parse_conditions,
    help="Metadata of the documents: lang=en, 'year>=2020', or tags~news for a part of a list or a "
    "text. Several conditions must all hold.",
)


def explain(where: Mapping[str, Any], place: Any) -> None:
    """Warn of conditions with a key, or with a kind of value, that no document of an index has."""
    with contextlib.closing(open_store(place)) as store:
        known = set(store.keys())
        for each in where["$and"]:
            ((key, condition),) = each.items()
            ((sign, value),) = condition.items()
            if key not in known:
                keys = ", ".join(sorted(known))
                warn(f"no document has the metadata key {key!r}; the keys are: {keys}")
            elif sign in COMPARISONS:
                kind, least = ("text", "") if isinstance(value, str) else ("number", -1e308)
                if not store.matching({key: {"$gte": least}}, limit=1):
                    warn(f"no document has a {kind} as {key!r}, to compare with {value!r}")


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
    if not console.is_terminal:  # A hidden bar of older rich prints an empty line.
        yield lambda count: None
        return
    columns, done = Progress.get_default_columns(), TextColumn("{task.completed} done")
    with Progress(*columns[: 4 if total else 3], done, console=console) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


def print_results(
    query: str,
    results: Sequence[SearchResult],
    as_json: bool = False,
    *,
    with_query: bool = False,
    whole: bool = False,
) -> None:
    """Print the results of a query on stdout: for a terminal, or a line with tabs for each.

    Args:
        query: The query.
        results: The results.
        as_json: Whether to print one line of JSON instead.
        with_query: Whether plain lines begin with the query. On a terminal, they always do.
        whole: Whether to print whole texts instead of passages, or of their beginnings.
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
        text = on_one_line(each.text) if whole else on_one_line(each.passage_text)[:most]
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
