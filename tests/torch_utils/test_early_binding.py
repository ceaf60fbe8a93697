"""There is one way of binding early, and it binds all that is called."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from programs import ROOT
from torch_utils._releasing.holders import find_holders
from torch_utils._runtime import early_bound

PACKAGE = ROOT / "torch_utils"
FILES = [p for f in (PACKAGE, PACKAGE / "_releasing") for p in sorted(f.glob("*.py"))]
REACHED_LATE = ("_runtime", "_registry", "_interrupts", "resource", "_releasing.tombstone")


def private_defaults(source: str) -> list[str]:
    """Parameters that are none: what is bound by a default argument."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            places = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) :]
            places = places if node.args.defaults else []
            keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            named = [*places, *(arg for arg, default in keywords if default is not None)]
            found += [arg.arg for arg in named if arg.arg.startswith("_")]
    return found


def is_early(function: FunctionType) -> bool:
    """Whether its globals are its own."""
    name = function.__module__
    return function.__globals__ is not vars(importlib.import_module(name))


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """All that a module defines, methods and properties included."""
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def late_names(function: FunctionType) -> list[str]:
    """What an early-bound function names that is not early-bound itself."""
    return [
        f"{function.__qualname__} names {name}"
        for name, value in function.__globals__.items()
        if inspect.isfunction(value)
        and value.__module__.startswith("torch_utils")
        and not is_early(value)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_one_way(file: Path) -> None:
    """No default argument binds early: `early_bound` does, and leaves signatures as they are."""
    assert private_defaults(file.read_text(encoding="utf-8")) == []


def test_what_is_called_is_bound_as_well() -> None:
    """A function that is bound early would otherwise look up its helper's globals late."""
    modules = [importlib.import_module(f"torch_utils.{name}") for name in REACHED_LATE]
    early = [f for module in modules for f in functions_of(module) if is_early(f)]
    assert len(early) > 25
    assert [late for function in early for late in late_names(function)] == []


def test_default_is_found() -> None:
    """The control, of each kind of parameter."""
    source = "def f(a, _b=1, *, c=2, _d=3): pass\nlambda x, _e=4: 0\ndef g(_a, *, _c): pass"
    assert private_defaults(source) == ["_b", "_d", "_e"]


def test_late_helper_is_found() -> None:
    """The control: a helper that is an ordinary function."""
    namespace: dict[str, Any] = {"__name__": "torch_utils.errors", "helper": find_holders}
    exec("def destructor(): helper()", namespace)
    assert late_names(early_bound(namespace["destructor"])) == ["destructor names helper"]
