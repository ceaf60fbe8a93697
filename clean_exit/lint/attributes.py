"""Which attributes of its object a statement sets."""

from __future__ import annotations

import ast

from clean_exit.lint.scopes import Class, Function, last_name


def mangle(name: str, cls: Class) -> str:
    """Return a private name as Python stores it."""
    if name.startswith("__") and not name.endswith("__") and cls.name.strip("_"):
        return f"_{cls.name.lstrip('_')}{name}"
    return name


def unmangle(name: str, cls: Class) -> str:
    """Return a name as the class's own source has it."""
    prefix = f"_{cls.name.lstrip('_')}__"
    return name[len(prefix) - 2 :] if name.startswith(prefix) else name


def stores(node: ast.AST, function: Function) -> list[tuple[str, ast.AST]]:
    """Return the attributes of its own object that a node sets, with the statement that does."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target] if node.value is not None else []
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    elif isinstance(node, ast.Call):
        name = _set_by_name(node)
        return [(name, node)] if name else []
    found: list[tuple[str, ast.AST]] = []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
            node = ast.Pass()  # Which part of the value it is, nobody says.
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == function.self_name
        ):
            found.append((target.attr, node))
        elif (
            isinstance(target, ast.Subscript)
            and isinstance(target.slice, ast.Constant)
            and last_name(target.value) == "__dict__"
        ):
            found.append((str(target.slice.value), node))
    return found


def _set_by_name(node: ast.Call) -> str | None:
    """Return the name that ``setattr(self, "name", value)`` sets."""
    if last_name(node.func) in {"setattr", "__setattr__"} and len(node.args) in (2, 3):
        name = node.args[-2]
        return str(name.value) if isinstance(name, ast.Constant) else None
    return None
