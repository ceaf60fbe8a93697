"""Which attributes of its object a statement sets."""

from __future__ import annotations

import ast
from typing import NamedTuple

from clean_exit.lint.scopes import Class, Function, last_name


class Stored(NamedTuple):
    """An attribute that is set, as Python stores its name.

    `value` is None where the source does not say which part of a value it is.
    """

    name: str
    value: ast.expr | None = None
    annotation: ast.expr | None = None


def mangle(name: str, cls: Class | None) -> str:
    """Return a private name as Python stores it."""
    if cls and name.startswith("__") and not name.endswith("__") and cls.name.strip("_"):
        return f"_{cls.name.lstrip('_')}{name}"
    return name


def unmangle(name: str, cls: Class) -> str:
    """Return a name as the class's own source has it."""
    prefix = f"_{cls.name.lstrip('_')}__"
    return name[len(prefix) - 2 :] if name.startswith(prefix) else name


def _is_name(node: ast.AST, function: Function) -> bool:
    return isinstance(node, ast.Name) and node.id == function.self_name


def stores(node: ast.AST, function: Function) -> list[Stored]:
    """Return the attributes of its own object that a node sets in a method."""
    pairs: list[tuple[ast.AST | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        pairs = [(node.target, None)]
    elif isinstance(node, ast.withitem):
        pairs = [(node.optional_vars, None)]
    elif isinstance(node, ast.Call) and last_name(node.func) in {"setattr", "__setattr__"}:
        name = node.args[-2] if len(node.args) in (2, 3) else None
        return [Stored(str(name.value), node.args[-1])] if isinstance(name, ast.Constant) else []
    found = []
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs += [(one, None) for one in target.elts]
        elif isinstance(target, ast.Starred):
            pairs.append((target.value, None))
        elif isinstance(target, ast.Attribute) and _is_name(target.value, function):
            annotation = getattr(node, "annotation", None)
            found.append(Stored(mangle(target.attr, function.owner), value, annotation))
        elif isinstance(target, ast.Subscript) and last_name(target.value) == "__dict__":
            key = target.slice
            found += [Stored(str(key.value), value)] if isinstance(key, ast.Constant) else []
    return found
