"""What ``__init__`` sets and what may fail before it, in the order of the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from clean_exit.lint.classes import (
    Destructible,
    Function,
    assigned,
    decorators,
    is_none,
    last_name,
    raises,
)

_MAX_CALLS = 2  # calls on the way from __init__
# Calls that fail in ordinary use: a file, a program, a library or a network may be missing.
_LIKELY = re.compile(
    r"os\.(listdir|stat|remove|rename)|(.*\.)?(bind|listen|open|fdopen|connect|create_connection"
    r"|Popen|check_call|check_output|dlopen|mkdir|makedirs|mkdtemp|mkstemp|NamedTemporaryFile"
    r"|TemporaryFile|TemporaryDirectory|urlopen|ZipFile|TarFile|CDLL|WinDLL|LoadLibrary|mmap|memmap"
    r"|SharedMemory|import_module|__import__|load|loads|load_library|getaddrinfo|unlink|read|recv"
    r"|\w*parse\w*|send|sendall|login|urlretrieve|fromfile|from_file|from_pretrained|tcgetattr)"
)
# These cannot fail, or read from memory.
_UNLIKELY = re.compile(
    r"(super|dict|list|set|tuple|str|bool|len|type|isinstance|hasattr|getattr|id|repr)"
    r"|(os\.(environ|path)|threading|collections|weakref|logging|time|functools)\..*|.*\.stat\.\w+"
)
_DYNAMIC = {"__getattr__", "__getattribute__", "__new__"}
_UNKNOWN_NAMES = {"setattr", "vars", "__dict__", "__setstate__"}


@dataclass(frozen=True)
class Step:
    """One thing that a construction does: it sets an attribute, or may fail."""

    node: ast.AST
    name: str = ""  # the attribute; "" if this may fail
    value: ast.AST | None = None
    is_likely: bool = False

    def __str__(self) -> str:
        line = getattr(self.node, "lineno", 0)
        if not isinstance(self.node, ast.Call):
            return f"line {line} raises"
        name = ast.unparse(self.node.func).replace("\n", " ")
        return f"{name if len(name) <= 40 else '...' + name[-37:]}() fails in line {line}"


@dataclass
class Construction:
    """What the construction of an object does, as if all branches ran.

    Attributes:
        cls: The class of the object.
        steps: What happens, in the order of the source.
        setters: For each attribute, the other methods that set it, and whether to None.
    """

    cls: Destructible
    steps: list[Step] = field(default_factory=list)
    setters: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        methods = self.cls.methods
        if init := methods.get("__init__") or methods.get("__post_init__"):
            self.steps += self._steps(init, ())
        for name, method in methods.items():
            for node, _ in _evaluated(method.body) if name not in ("__init__", "__del__") else ():
                for attribute, value in assigned(method, node):
                    self.setters.setdefault(attribute, []).append((name, is_none(value)))

    @property
    def is_known(self) -> bool:
        """Whether it is known which code sets attributes."""
        methods = self.cls.methods
        names = {last_name(one) for method in methods.values() for one in ast.walk(method)}
        is_data = {"dataclass", "define", "attrs", "s"} & decorators(self.cls.node)
        return not (is_data or _DYNAMIC & methods.keys() or _UNKNOWN_NAMES & names)

    def why_missing(self, name: str, seen: Set[str]) -> Step | str | None:
        """Return why an attribute may be missing: a step that fails, or the method that sets it.

        Args:
            name: The attribute.
            seen: The attributes that exist, as the destructor has used them before.
        """
        names = [step.name for step in self.steps]
        if name in self.cls.defaults:
            return None
        if name in names:
            before = self.steps[self._start(seen) : names.index(name)]
            return next((one for one in before if one.is_likely), None)
        others = self.setters.get(name)
        return others[0][0] if others and self.cls.is_complete else None

    def why_none(self, name: str, seen: Set[str]) -> Step | str | None:
        """Return why an attribute may still be None, as `why_missing` does."""
        places = [index for index, step in enumerate(self.steps) if step.name == name]
        others = [index for index in places if not is_none(self.steps[index].value)]
        start = 0 if is_none(self.cls.defaults.get(name)) else None
        if start is None and places and places[0] not in others:
            start = places[0] + 1
        if start is None:
            return None
        if others:
            before = self.steps[max(start, self._start(seen)) : others[0]]
            return next((one for one in before if not one.name), None)
        return next((by for by, sets_none in self.setters.get(name, ()) if not sets_none), None)

    def _start(self, seen: Set[str]) -> int:
        """Return the number of the step after those that must have succeeded."""
        return max((at + 1 for at, one in enumerate(self.steps) if one.name in seen), default=0)

    def _steps(self, function: Function, above: Sequence[Function]) -> Iterator[Step]:
        for node, is_handled in _evaluated(function.body):
            for name, value in assigned(function, node):
                yield Step(node, name, value)
            if is_handled:
                continue
            if isinstance(node, ast.Raise):
                yield Step(node, is_likely=True)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or alias.name for alias in node.names]
                first = {name.partition(".")[0] for name in names}
                if not (getattr(node, "level", 0) or first <= sys.stdlib_module_names):
                    yield Step(node, is_likely=True)
            elif isinstance(node, ast.Call):
                inner = self.cls.called(function, node)
                if inner is not None and inner not in above and len(above) < _MAX_CALLS:
                    yield from self._steps(inner, (*above, function))
                    continue
                name = self.cls.module.dotted(node.func) or ast.unparse(node.func)
                if not _UNLIKELY.fullmatch(name):
                    yield Step(node, is_likely=bool(_LIKELY.fullmatch(name)))


def _evaluated(
    nodes: Sequence[ast.AST], is_handled: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """Yield nodes in the order of their evaluation, and whether a handler catches their errors."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        inner = is_handled
        if isinstance(node, ast.Try) and node.handlers:
            is_caught = inner or not any(map(raises, node.handlers))
            yield from _evaluated(node.body, is_caught)
            yield from _evaluated([*node.handlers, *node.orelse, *node.finalbody], inner)
        else:
            yield from _evaluated(list(ast.iter_child_nodes(node)), inner)
        yield node, inner
