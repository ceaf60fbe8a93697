"""What a test tells about what follows: a name that is not None, an attribute that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from clean_exit.lint.scopes import last_name

_DOUBLE_NEGATION = 40  # Nested tests; nobody reads deeper ones.
_META_PATH = re.compile(r"getattr\(_?sys, 'meta_path', None\)")
_STANDING = 15  # What a test that stands for another one adds to its depth.
_ANY = "BaseException"


@dataclass(frozen=True)
class Facts:
    """What holds at a point of a destructor.

    Attributes:
        alive: The interpreter is not being taken apart.
        present: The names, with their module's file, that are not None.
        has: The attributes of the object that exist.
        caught: The exceptions that somebody around here catches.
        known: Attributes with "none", "full" (not None), "true" or "false", as tests told.
        began: The same of what they were when the destructor began, and "stored" for those that
            it has set since: later tests tell nothing of the beginning. "made" if it was not known
            to be there before.
    """

    alive: bool = False
    present: frozenset[tuple[str, str]] = frozenset()
    has: frozenset[str] = frozenset()
    caught: frozenset[str] = frozenset()
    known: frozenset[tuple[str, str]] = frozenset()
    began: frozenset[tuple[str, str]] = frozenset()

    def plus(self, other: Facts) -> Facts:
        """Return what holds if both do."""
        return Facts(
            self.alive or other.alive,
            self.present | other.present,
            self.has | other.has,
            self.caught | other.caught,
            self.known | other.known,
            self.began | {one for one in other.began if (one[0], "stored") not in self.began},
        )

    def common(self, other: Facts) -> Facts:
        """Return what holds on either of two ways."""
        return Facts(
            self.alive and other.alive,
            self.present & other.present,
            self.has & other.has,
            self.caught & other.caught,
            self.known & other.known,
            self.began & other.began,
        )

    def storing(self, name: str, value: ast.AST) -> Facts:
        """Return what holds after an attribute was set."""
        known = {one for one in self.known if one[0] != name}
        if isinstance(value, ast.Constant):
            told = "none" if value.value is None else "true" if value.value else "false"
            known.add((name, told))
        began = self.began | {(name, "stored")}
        if name not in self.has:
            began |= {(name, "made")}
        return replace(self, has=self.has | {name}, known=frozenset(known), began=began)

    def catching(self, names: Iterable[str]) -> Facts:
        """Return what holds inside of a try that catches exceptions."""
        return replace(self, caught=self.caught | set(names))

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", _ANY, *names})


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
            one_by_one: list[ast.expr] = [
                ast.copy_location(
                    ast.Compare(one, [ast.Is() if same else ast.IsNot()], [left]), one
                )
                for one in parts.elts
            ]
            joined = ast.BoolOp(ast.Or() if same else ast.And(), one_by_one)
            return ast.copy_location(joined, node)
    return node


def is_meta_path(node: ast.expr) -> bool:
    """Whether an expression is `sys.meta_path`, which is None or missing at the end."""
    said = ast.unparse(node)
    return said.endswith("sys.meta_path") or bool(_META_PATH.match(said))


NOTHING = Facts()
ALIVE = Facts(alive=True)


class Tests:
    """Reads tests; what a name stands for is asked of the frame that it is in."""

    def __init__(self, frame: FrameLike) -> None:
        self._frame = frame

    def split(self, node: ast.expr, depth: int = 0) -> tuple[Facts, Facts]:
        """Return what holds if a test is true, and what holds if it is false."""
        if depth > _DOUBLE_NEGATION:
            return NOTHING, NOTHING
        node = plain_test(node)
        true, false = self._split(node, depth)
        stood = self._frame.stands_for(node)
        if stood is None:
            return true, false
        frame, test = stood
        behind = Tests(frame).split(test, depth + _STANDING)
        return true.plus(behind[0]), false.plus(behind[1])

    def _split(self, node: ast.expr, depth: int) -> tuple[Facts, Facts]:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            true, false = self.split(node.operand, depth + 1)
            return false, true
        if isinstance(node, ast.BoolOp):
            parts = [self.split(one, depth + 1) for one in node.values]
            both, either = NOTHING, parts[0][0 if isinstance(node.op, ast.Or) else 1]
            for true, false in parts:
                both = both.plus(true if isinstance(node.op, ast.And) else false)
                either = either.common(false if isinstance(node.op, ast.And) else true)
            return (both, either) if isinstance(node.op, ast.And) else (either, both)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.NamedExpr):
            return self.split(node.value, depth + 1)
        return self._known(node, truthy=True).plus(self._told(node, "true")), self._told(
            node, "false"
        )

    def _told(self, node: ast.expr, what: str) -> Facts:
        """Return what a test tells of an attribute's value."""
        name = self._frame.state_name(node)
        if name is None and isinstance(node, ast.Name):
            origin = self._frame.origin(node.id)
            name = origin if isinstance(origin, str) else None
        told = frozenset({(name, what)} if name else ())
        return Facts(known=told, began=told)

    def _known(self, node: ast.expr, *, truthy: bool) -> Facts:
        """Return what holds if an expression is not None."""
        if isinstance(node, ast.NamedExpr):
            node = node.value
        if isinstance(node, ast.Name):
            found = self._frame.origin(node.id)
            if isinstance(found, tuple):
                return Facts(present=frozenset({found}))
            return Facts(has=self._frame.implied(found, truthy)) if found else NOTHING
        name = self._frame.own_attribute(node)
        return Facts(has=self._frame.implied(name, truthy)) if name else NOTHING

    def _compare(self, node: ast.Compare) -> tuple[Facts, Facts]:
        left, right, how = node.left, node.comparators[0], node.ops[0]
        if isinstance(how, (ast.In, ast.NotIn)):
            facts = self._contained(left, right)
            return (facts, NOTHING) if isinstance(how, ast.In) else (NOTHING, facts)
        is_none = isinstance(right, ast.Constant) and right.value is None
        if isinstance(left, ast.Constant) and left.value is None:
            left, is_none = right, True
        if is_none and is_meta_path(left):
            same = isinstance(how, (ast.Is, ast.Eq))
            return (NOTHING, ALIVE) if same else (ALIVE, NOTHING)
        facts = self._known(left, truthy=True)
        if is_none:
            same = isinstance(how, (ast.Is, ast.Eq))
            none, full = self._told(left, "none"), facts.plus(self._told(left, "full"))
            return (none, full) if same else (full, none)
        is_false = isinstance(right, ast.Constant) and not right.value
        if isinstance(how, (ast.Is, ast.Eq)):
            return (NOTHING, facts) if is_false else (facts, NOTHING)
        if isinstance(how, (ast.IsNot, ast.NotEq, ast.Gt)) and is_false:
            return facts, NOTHING
        # A number that is compared at all is not None, and says nothing more.
        plain = self._known(left, truthy=False)
        return plain, plain

    def _contained(self, left: ast.expr, right: ast.expr) -> Facts:
        """Return what ``"name" in self.__dict__`` or ``in globals()`` tells."""
        if not isinstance(left, ast.Constant) or not isinstance(left.value, str):
            return NOTHING
        said = ast.unparse(right)
        if said in {f"{self._frame.self_name}.__dict__", f"vars({self._frame.self_name})",
                    f"dir({self._frame.self_name})"}:  # fmt: skip
            return Facts(has=self._frame.implied(left.value, False))
        return NOTHING

    def _call(self, node: ast.Call) -> tuple[Facts, Facts]:
        if self._frame.asks_for_end(node):
            return NOTHING, ALIVE
        name = last_name(node.func)
        if name == "callable" and node.args:
            return self._known(node.args[0], truthy=True), NOTHING
        if name == "isinstance" and node.args:
            return self._known(node.args[0], truthy=True), NOTHING
        if name in {"hasattr", "getattr", "get"}:
            attribute = self._frame.own_attribute(node)
            if attribute:
                truthy = name != "hasattr"
                has = Facts(has=self._frame.implied(attribute, truthy))
                if not truthy:
                    return has, NOTHING
                default = node.args[2 if name == "getattr" else 1 :][:1]
                if default and isinstance(default[0], ast.Constant) and default[0].value:
                    # Where it is missing, this is true.
                    plain = Facts(has=self._frame.implied(attribute, False))
                    return NOTHING, plain.plus(self._told(node, "false"))
                return has.plus(self._told(node, "true")), self._told(node, "false")
        return self._told(node, "true"), self._told(node, "false")


class FrameLike:
    """What `Tests` has to be told about the function that a test stands in."""

    self_name: str | None

    def origin(self, name: str) -> tuple[str, str] | str | None:
        """Return a global with its module's file, or the attribute that a local was read from."""
        raise NotImplementedError

    def own_attribute(self, node: ast.expr) -> str | None:
        """Return the attribute of the destroyed object that an expression reads, in any way."""
        raise NotImplementedError

    def state_name(self, node: ast.expr) -> str | None:
        """Return the name of an attribute, or of a method that is asked without arguments."""
        raise NotImplementedError

    def implied(self, name: str, truthy: bool) -> frozenset[str]:
        """Return the attributes that exist if one does, or if it is true."""
        raise NotImplementedError

    def stands_for(self, node: ast.expr) -> tuple[FrameLike, ast.expr] | None:
        """Return the test behind a variable, a property or a short function, and its place."""
        raise NotImplementedError

    def asks_for_end(self, node: ast.Call) -> bool:
        """Whether a call asks if the interpreter is finalizing."""
        raise NotImplementedError
