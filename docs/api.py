"""The reference of public names as Markdown, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from docs.tables import table

_WIDTH = 88
PROPERTIES = (property, cached_property)
KEYWORD_ONLY, VAR_POSITIONAL = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL
_HAS_ENTRIES = ("Args", "Attributes", "Raises")
_HEADING = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?):")
_DATA = {"FINDINGS": "The id of each kind of finding, with its title."}


def names_of(package: str) -> str:
    """Return the public names of a package with the first line of each docstring."""
    module = importlib.import_module(package)
    # rag_demo has a public name that ``import *`` leaves out.
    names = sorted(vars(module)["_MODULE_OF"]) if package == "rag_demo" else module.__all__
    docs = {name: _DATA.get(name) or inspect.getdoc(getattr(module, name)) for name in names}
    lines = ((f"[`{n}`](#{n.lower()})", doc.partition("\n")[0]) for n, doc in docs.items())
    return table(["name", "purpose"], lines).replace("--:", ":--")


def reference_of(paths: str) -> str:
    """Return the reference of several names, such as ``torch_utils.release``."""
    return "\n\n".join(part for path in paths.split() for part in _described(path))


def _described(path: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    yield f"#### `{name}`"
    if name in _DATA:
        yield f"{_block(f'{name}: dict[str, str]')}\n\n{_DATA[name]}"
        return
    is_class = isinstance(found, type)
    # Programs get these, and make none.
    is_got = dataclasses.is_dataclass(found) or (
        is_class and issubclass(found, (tuple, dict, Exception))
    )
    bases = ", ".join(base.__name__ for base in getattr(found, "__bases__", ()))
    shown = (
        f"class {name}({bases})" if is_class and issubclass(found, Exception) else f"class {name}"
    )
    yield _block(shown if is_got else _signature(found, name))
    types = getattr(found, "__annotations__", {}) if is_class else {}
    types = {name: getattr(each, "__forward_arg__", each) for name, each in types.items()}
    yield from _markdown(inspect.getdoc(found) or "", types)
    for member, of_member in _members(found):
        if isinstance(of_member, PROPERTIES):
            yield f"##### `{name}.{member}`"
        else:
            yield f"##### `{name}.{member}()`"
            yield _block(_signature(of_member, member, is_method=True))
        yield from _markdown(inspect.getdoc(of_member) or "")


def _members(found: Any) -> Iterator[tuple[str, Any]]:
    """Return the methods and properties of a class that have docstrings, in their order.

    Those of its bases within the package belong to it too, unless a base is public itself.
    """
    if not isinstance(found, type):
        return
    shown = set[str]()
    for cls in found.__mro__:
        package = cls.__module__.partition(".")[0]
        is_public = hasattr(importlib.import_module(package), cls.__name__)
        if package != found.__module__.partition(".")[0] or (cls is not found and is_public):
            continue
        for name, member in vars(cls).items():
            hidden = name.startswith("_") and name != "_release"
            member = getattr(member, "__func__", member)
            is_shown = isinstance(member, (Callable, *PROPERTIES)) and not isinstance(member, type)
            if not hidden and is_shown and name not in shown and member.__doc__:
                shown.add(name)
                yield name, member


class _Source:
    """Text whose repr is the text, which `inspect.Signature` then shows as it is in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(found: Any, name: str, *, is_method: bool = False) -> str:
    """Return a signature, with one parameter on each line if it is long."""
    of_class = isinstance(found, type)
    function = found.__init__ if of_class else inspect.unwrap(found)
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_source(each.annotation), default=_default(each.default))
        for each in list(signature.parameters.values())[of_class or is_method :]
    ]
    returned = signature.empty if of_class else _source(signature.return_annotation)
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    whole = f"{prefix}{name}{signature.replace(parameters=parameters, return_annotation=returned)}"
    if len(whole) <= _WIDTH:
        return whole
    kinds, parts = [each.kind for each in parameters], list(map(str, parameters))
    if KEYWORD_ONLY in kinds and VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(KEYWORD_ONLY), "*")
    lines = "".join(f"    {part},\n" for part in parts)
    end = "" if returned is signature.empty else f" -> {returned}"
    return f"{prefix}{name}(\n{lines}){end}"


def _source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    return _Source(getattr(value, "__name__", "...")) if repr(value).startswith("<func") else value


def _block(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _markdown(doc: str, types: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Return the parts of a docstring in Google's style as Markdown."""
    lines, text = doc.splitlines(), list[str]()
    while lines:
        line = lines.pop(0)
        heading = _HEADING.fullmatch(line)
        if heading is None:
            text.append(line)
            continue
        yield from _paragraphs(text)
        text = []
        body = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        kind, inner = heading[1], textwrap.dedent("\n".join(body)).strip("\n")
        yield f"**{'Arguments' if kind == 'Args' else kind}**"
        if kind in _HAS_ENTRIES:
            yield _entries(inner, types if kind == "Attributes" else {})
        else:
            yield from _paragraphs(inner.splitlines())
    yield from _paragraphs(text)


def _entries(text: str, types: Mapping[str, str]) -> str:
    """Return ``name: description`` entries as a list."""
    items = re.split(r"\n(?=\S)", text)
    split = (re.fullmatch(r"(\*{0,2}[\w.]+(?:, \w+)*): (.*)", item, re.DOTALL) for item in items)
    lines = []
    for item, match in zip(items, split, strict=True):
        if match is None:
            raise ValueError(f"not an entry of a docstring: {item!r}")
        found = match[1].split(", ")
        names = ", ".join(
            f"`{name}: {types[name]}`" if name in types else f"`{name}`" for name in found
        )
        lines.append(f"- {names}: {' '.join(match[2].split())}")
    return "\n".join(lines)


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Return paragraphs; an indented one after ``::`` is a block of code."""
    for paragraph in re.split(r"\n\n+(?=\S)", "\n".join(lines).strip("\n")):
        text, colons, code = paragraph.partition("::\n\n")
        if text:
            yield f"{text}:" if colons else text
        if code:
            yield _block(textwrap.dedent(code))
