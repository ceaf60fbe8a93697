"""The docstrings of an installed package, read from its source without running it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from rag_demo.errors import SourceError

# A parsed source takes up to 600 bytes of memory for each character. Longer sources are generated.
_MOST_CHARS = 1 << 20
# The helpers of torch and numpy that document C extensions, and the places of their arguments.
_REGISTRARS = {"add_docstr": (0, 1), "_add_docstr": (0, 1), "add_newdoc": (1, 2)}
_SIGNATURE = re.compile(r"^[\w.]+\(.*\)\s*(->.*)?$", re.DOTALL)
# Bounded, so that time is linear.
_ROLE = re.compile(r":[\w:]{1,64}:`~?([^`<]{1,500}?)(?:\s*<[^`]{0,500}>)?`")


def find_package(name: str) -> Path:
    """Return the folder or the file of an installed package, without importing it.

    Raises:
        SourceError: The package is not installed, or has no Python source.
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
        source: The Python source. Nothing is yielded if it does not parse, or has more than a
            million characters.
        module: The module's dotted name.
        public_only: Whether to leave out names with a leading underscore.
    """
    if len(source) > _MOST_CHARS:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # It is a template, or for another Python version.
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
    """Yield the docstring of a call such as ``add_docstr(torch.add, "...")``."""
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
            return
    yield name, call.lineno, text.value.strip()


def opening_paragraph(docstring: str) -> str:
    """Return a docstring's first paragraph on one line, without markup.

    The signature, with which docstrings of C extensions begin, is skipped.
    """
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        text = " ".join(paragraph.split())
        if text and not _SIGNATURE.match(text):
            return _ROLE.sub(r"\1", text).replace("``", "`")
    return ""


def may_register(source: str) -> bool:
    """Tell whether a private module may document public objects of C extensions."""
    return any(f"{name}(" in source for name in _REGISTRARS)


def module_name(path: Path, root: Path, package: str) -> str:
    """Return the dotted name of the module in a file of a package."""
    parts = list(path.relative_to(root).with_suffix("").parts) if path != root else []
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join([package, *parts])


def is_public(module: str) -> bool:
    """Tell whether no part of a dotted name begins with an underscore."""
    return not any(part.startswith("_") for part in module.split("."))
