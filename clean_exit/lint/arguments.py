"""What a call gives to the parameters of a function."""

from __future__ import annotations

import ast

from clean_exit.lint.scopes import Function


def constant_defaults(function: Function) -> dict[str, object]:
    """Return the parameters that have a constant, where a call does not give another value."""
    return {
        name: default.value
        for name, default in function.defaults.items()
        if isinstance(default, ast.Constant)
    }


def is_open(node: ast.Call) -> bool:
    """Whether a call gives more arguments than its source shows."""
    return any(isinstance(one, ast.Starred) for one in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    )


def match_arguments(function: Function, node: ast.Call, *, bound: bool) -> dict[str, ast.expr]:
    """Match the arguments of a call with the parameters of what is called."""
    names = function.parameters[1 if bound and function.self_name else 0 :]
    given = [] if any(isinstance(one, ast.Starred) for one in node.args) else node.args
    matched = dict(zip(names, given, strict=False))
    matched.update({k.arg: k.value for k in node.keywords if k.arg in function.all_parameters})
    return {name: value for name, value in matched.items() if name is not None}
