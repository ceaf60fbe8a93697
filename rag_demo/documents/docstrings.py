"""The docstrings of an installed package, read from its source without running it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from rag_demo.errors import SourceError

__all__ = ["docstrings_of_file", "find_package", "opening_paragraph"]

# A parsed source takes up to 600 bytes of memory for each of its characters; what is longer than
# this was written by a program, or is a table.
_MOST_CHARS = 1 << 20
# How C extensions get their documentation in Python source: torch's and numpy's own helpers.
_REGISTRARS = {"add_docstr": (0, 1), "_add_docstr": (0, 1), "add_newdoc": (1, 2)}
_SIGNATURE = re.compile(r"^[\w.]+\(.*\)\s*(->.*)?$", re.DOTALL)
# Bounded, so that time is linear in whatever looks like one.
_ROLE = re.compile(r":[\w:]{1,64}:`~?([^`<]{1,500}?)(?:\s*<[^`]{0,500}>)?`")


def find_package(name: str) -> Path:
    """Return the folder, or the one file, of an installed package. Does not import it.

    Raises:
        SourceError: There is none of that name, or it has no Python source.
    """
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise SourceError(
            f"{name!r} is neither a file or folder here nor an installed package; "
            "check the spelling, or install it beside rag-demo"
        )
    roots = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    path = Path(roots[0]).joinpath(*name.split(".")[1:])
    for candidate in (path, path.with_suffix(".py")):
        if candidate.is_dir() or (candidate.suffix == ".py" and candidate.is_file()):
            return candidate
    raise SourceError(f"the package {name!r} has no Python source to read docstrings from")


def docstrings_of_file(
    source: str, module: str, *, public_only: bool = True
) -> Iterator[tuple[str, int, str]]:
    """Yield the qualified name, line and text of each docstring in a module's source.

    Args:
        source: The Python source. One that does not parse, or is longer than a million
            characters, yields nothing.
        module: The module's dotted name.
        public_only: Leave out what a leading underscore makes private.
    """
    if len(source) > _MOST_CHARS:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Templates, and sources of other Python versions.
    pending: list[tuple[str, ast.AST]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield name, getattr(node, "lineno", 1), text
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if not (public_only and child.name.startswith("_")):
                    pending.append((f"{name}.{child.name}", child))
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                yield from _registered(child.value, module)
            elif isinstance(child, (ast.If, ast.Try)):
                pending.append((name, child))


def _registered(call: ast.Call, module: str) -> Iterator[tuple[str, int, str]]:
    """Yield what a call such as ``add_docstr(torch.add, "...")`` documents."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in _REGISTRARS:
        return
    of, text = (call.args[i] if i < len(call.args) else None for i in _REGISTRARS[called])
    if isinstance(text, ast.Call) and isinstance(text.func, ast.Attribute):
        text = text.func.value  # "...".format(**common_args)
    if isinstance(text, ast.BinOp):
        text = text.left
    if of is None or not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
        return
    if isinstance(of, ast.Constant):
        name = f"{module.partition('.')[0]}.{of.value!s}"
    else:
        try:
            name = ast.unparse(of).replace("torch._C._VariableFunctions", "torch")
        except RecursionError:
            return  # No name that anybody could ask for.
    yield name, call.lineno, text.value.strip()


def opening_paragraph(docstring: str) -> str:
    """Return a docstring's first paragraph on one line, without the marks of its markup.

    A paragraph that is only a signature, as C extensions put it first, is passed over.
    """
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        text = " ".join(paragraph.split())
        if text and not _SIGNATURE.match(text):
            return _ROLE.sub(r"\1", text).replace("``", "`")
    return ""


def may_register(source: str) -> bool:
    """Whether a private module's source may document public objects of C extensions."""
    return any(f"{name}(" in source for name in _REGISTRARS)


def module_name(path: Path, root: Path, package: str) -> str:
    """Name the module in a file below a package's folder."""
    parts = list(path.relative_to(root).with_suffix("").parts) if path != root else []
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join([package, *parts])


def is_public(module: str) -> bool:
    """Whether no part of a module's name starts with an underscore."""
    return not any(part.startswith("_") for part in module.split("."))
