"""Read which modules of a package import which, without importing any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import statement's target.

    Attributes:
        importer: The module that imports, dotted.
        module: What it imports, dotted; relative imports are made absolute.
        name: What it takes from there, if it says ``from``.
        is_late: Whether it is in a function, and so runs when that is called.
    """

    importer: str
    module: str
    name: str | None
    is_late: bool


def modules_of(package: Path) -> dict[str, Path]:
    """Return the file of each module below a package's folder, by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _statements(node: ast.AST, late: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the import statements below a node, and whether each one is late."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        elif _is_for_types_only(child):
            for statement in child.orelse:  # type: ignore[attr-defined]
                yield from _statements(ast.Module([statement], []), late)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _statements(child, late or is_function)


def imports_of(name: str, source: str, *, is_package: bool = False) -> list[Import]:
    """Return what one module imports, but for what only type checkers see."""
    found = []
    for statement, late in _statements(ast.parse(source), False):
        if isinstance(statement, ast.Import):
            found += [Import(name, alias.name, None, late) for alias in statement.names]
            continue
        base = statement.module or ""
        if statement.level:
            above = name.split(".")[: None if is_package else -1]
            above = above[: len(above) - statement.level + 1]
            base = ".".join([*above, base] if base else above)
        found += [Import(name, base, alias.name, late) for alias in statement.names]
    return found


def read(package: Path) -> list[Import]:
    """Return every import of a package's modules."""
    return [
        one
        for name, path in modules_of(package).items()
        for one in imports_of(
            name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
        )
    ]


def arrows(imports: list[Import], modules: set[str]) -> dict[str, set[str]]:
    """Return which module of a package imports which others of it.

    ``from package import module`` is an arrow to the module, not to the package.
    """
    found: dict[str, set[str]] = {module: set() for module in modules}
    for one in imports:
        full = f"{one.module}.{one.name}"
        target = full if full in modules else one.module
        if target in modules and target != one.importer:
            found[one.importer].add(target)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle, in order, or nothing."""
    done: set[str] = set()

    def follow(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if found := follow(target, [*way, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := follow(module, []):
            return found
    return []
