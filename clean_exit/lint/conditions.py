"""Reads tests: what holds where one is true, and where it is false."""

from __future__ import annotations

import ast
import re
from functools import reduce
from typing import Union

from clean_exit.lint.facts import ALIVE, NOTHING, Facts, told
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import last_name

_DEEPEST_TEST = 40  # Nested tests; nobody reads deeper ones.
_STANDING = 15  # What a test that stands for another one adds to its depth.
_META_PATH = re.compile(r"getattr\(_?sys, 'meta_path', None\)")
_Branch = Union[Facts, None]  # noqa: UP007
_Both = tuple[_Branch, _Branch]


def split(frame: Frame, node: ast.expr, depth: int = 0) -> _Both:
    """Return what holds if a test is true, and if it is false; None for what cannot be."""
    if depth > _DEEPEST_TEST:
        return NOTHING, NOTHING
    node = plain_test(node)
    true, false = _split(frame, node, depth)
    stood = frame.stands_for(node)
    if stood is None:
        return true, false
    behind = split(*stood, depth + _STANDING)
    return _both(true, behind[0]), _both(false, behind[1])


def _both(first: _Branch, second: _Branch) -> _Branch:
    return None if first is None or second is None else first.plus(second)


def either(first: _Branch, second: _Branch) -> _Branch:
    """Return what holds on any of two ways; None if neither is possible."""
    return first.common(second) if first and second else first or second


def _split(frame: Frame, node: ast.expr, depth: int) -> _Both:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return split(frame, node.operand, depth + 1)[::-1]
    if isinstance(node, ast.BoolOp):
        # What "and" is for true, "or" is for false.
        step = 1 if isinstance(node.op, ast.And) else -1
        parts = [split(frame, one, depth + 1)[::step] for one in node.values]
        joined = (
            reduce(_both, (all_of for all_of, _ in parts)),
            reduce(either, (one_of for _, one_of in parts)),
        )
        return joined[::step]  # type: ignore[return-value]
    if isinstance(node, ast.NamedExpr):
        return split(frame, node.value, depth + 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(frame, node)
    if isinstance(node, ast.Constant):
        return _decided(bool(node.value))
    if last_name(node) == "TYPE_CHECKING":
        return _decided(False)
    if isinstance(node, ast.Name) and node.id in frame.constants:
        return _decided(bool(frame.constants[node.id]))
    if isinstance(node, ast.Call):
        return _call(frame, node)
    return _both(_told(frame, node, "true"), _there(frame, node)), _told(frame, node, "false")


def _decided(truth: bool) -> _Both:
    return (NOTHING, None) if truth else (None, NOTHING)


def _told(frame: Frame, node: ast.expr, what: str) -> _Branch:
    """Return what a test tells of an attribute's value; None if it is known to be another one."""
    name = frame.state_name(node)
    return None if name and frame.facts.rules_out(name, what) else told(name, what)


def _there(frame: Frame, node: ast.expr) -> Facts:
    """Return what holds if an expression is something, and not None."""
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Name) and frame.named(node.id).kind == "global":
        place = (frame.function.module.source.path, node.id)
        return Facts(present=frozenset({place}))
    return told(frame.attribute_behind(node), "there")


def _compare(frame: Frame, node: ast.Compare) -> _Both:
    left, right, how = node.left, node.comparators[0], node.ops[0]
    if isinstance(how, (ast.In, ast.NotIn)):
        facts = _contained(frame, left, right)
        return (facts, NOTHING) if isinstance(how, ast.In) else (NOTHING, facts)
    same = isinstance(how, (ast.Is, ast.Eq))
    if isinstance(left, ast.Constant) and left.value is None:
        left, right = right, left
    there = _there(frame, left)
    if not isinstance(right, ast.Constant) or not isinstance(
        how, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
    ):  # What is compared by size is not None.
        is_positive = isinstance(how, ast.Gt) and isinstance(right, ast.Constant)
        if is_positive and right.value == 0:  # type: ignore[attr-defined]
            return _both(there, _told(frame, left, "true")), NOTHING
        return there, there
    if right.value is None and is_meta_path(left):
        return (NOTHING, ALIVE) if same else (ALIVE, NOTHING)
    if isinstance(left, ast.Name) and left.id in frame.constants:
        return _decided((frame.constants[left.id] == right.value) == same)
    equal: _Branch
    other: _Branch
    if right.value is None:
        equal, other = _told(frame, left, "none"), _both(there, _told(frame, left, "full"))
    elif right.value:
        equal, other = _both(there, _told(frame, left, "true")), NOTHING
    else:
        equal, other = _told(frame, left, "false"), _both(there, _told(frame, left, "true"))
    return (equal, other) if same else (other, equal)


def _contained(frame: Frame, left: ast.expr, right: ast.expr) -> Facts:
    """Return what ``"name" in self.__dict__``, ``vars(self)`` or ``dir(self)`` tells."""
    if isinstance(left, ast.Constant) and isinstance(left.value, str):
        me = frame.self_name
        if ast.unparse(right) in {f"{me}.__dict__", f"vars({me})", f"dir({me})"}:
            return told(left.value, "there")
    return NOTHING


def _call(frame: Frame, node: ast.Call) -> _Both:
    if frame.asks_for_end(node):
        return NOTHING, ALIVE
    name = last_name(node.func)
    if name in {"callable", "isinstance"} and node.args:
        return _there(frame, node.args[0]), NOTHING
    attribute = frame.own_attribute(node)
    if name == "hasattr" and attribute:
        return told(attribute, "there"), None if frame.facts.has(attribute) else NOTHING
    true, false = _told(frame, node, "true"), _told(frame, node, "false")
    if name in {"getattr", "get"} and attribute:
        default = node.args[2 if name == "getattr" else 1 :][:1]
        there = told(attribute, "there")
        if default and isinstance(default[0], ast.Constant) and default[0].value:
            return NOTHING, _both(there, false)  # Where it is missing, this is true.
        return _both(there, true), false
    return true, false


def plain_test(node: ast.expr) -> ast.expr:
    """Return ``all((a, b))``, ``any(...)`` and ``None in (a, b)`` as what they say: a and b."""
    if isinstance(node, ast.Call) and last_name(node.func) in {"all", "any"} and node.args:
        parts, op = node.args[0], ast.And() if last_name(node.func) == "all" else ast.Or()
        if isinstance(parts, (ast.Tuple, ast.List)) and len(parts.elts) > 1:
            return ast.copy_location(ast.BoolOp(op, parts.elts), node)
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], (ast.Tuple, ast.List)):
        left, how, parts = node.left, node.ops[0], node.comparators[0]
        is_none = isinstance(left, ast.Constant) and left.value is None
        if is_none and isinstance(how, (ast.In, ast.NotIn)) and len(parts.elts) > 1:
            same = isinstance(how, ast.In)
            test = ast.Is() if same else ast.IsNot()
            each: list[ast.expr] = [
                ast.copy_location(ast.Compare(one, [test], [left]), one) for one in parts.elts
            ]
            return ast.copy_location(ast.BoolOp(ast.Or() if same else ast.And(), each), node)
    return node


def is_none_test(node: ast.expr) -> bool:
    """Whether something is compared with None, which is harmless for a name that is None."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, *node.comparators)
    return any(isinstance(one, ast.Constant) and one.value is None for one in sides)


def is_meta_path(node: ast.expr) -> bool:
    """Whether an expression is `sys.meta_path`, which is None or missing at the end."""
    said = ast.unparse(node)
    return said.endswith("sys.meta_path") or bool(_META_PATH.match(said))
