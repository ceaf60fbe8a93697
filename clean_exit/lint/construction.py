"""How far an object may have come when its construction ends, in the middle or at its end."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field

from clean_exit.lint.attributes import mangle, stores
from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.facts import Facts, truth_of
from clean_exit.lint.scopes import Class, Function, inside, last_name
from clean_exit.lint.values import Env, dotted

_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}


@dataclass(frozen=True)
class Exit:
    """A way in which the construction ends: after `cause`, which raised, or at its end."""

    facts: Facts
    cause: ast.AST | None = None
    where: Function | None = None


@dataclass
class Construction:
    """Every way in which the construction of a class's objects can end.

    Attributes:
        begin: What holds before ``__init__``.
        defaults: The attributes of the class, which are there in any case.
        assigned: The attributes that methods of the class set.
        is_known: Whether all that sets attributes has been seen.
        exits: The ways; the walker adds them.
    """

    cls: Class
    begin: Facts
    defaults: set[str]
    assigned: set[str]
    is_known: bool
    exits: list[Exit] = field(default_factory=list)

    def missing(self, name: str, facts: Facts, *, tested: bool) -> Exit | None:
        """Return a way in which an attribute is not set at the end; None if there is none.

        Where attributes were `tested`, one that is set under conditions may be used under the same
        ones.
        """
        set_by = next((at for at, one in enumerate(self.exits) if name in one.facts.maybe),
                      len(self.exits))  # fmt: skip
        seen = [(one, what) for one, what in facts.began if one in self.assigned]
        set_by_then = {one for one, what in seen if what in ("true", "full")
                       or (what == "there" and one not in self.defaults)}  # fmt: skip
        ways = [
            one
            for at, one in enumerate(self.exits)
            if not one.facts.has(name)
            and not (tested and (one.cause is None or at >= set_by))
            and set_by_then <= one.facts.maybe
            and not any(one.facts.rules_out(*each) for each in seen)
        ]
        # What fails in the class's own __init__ says more than what does in a base's.
        own = [one for one in ways if one.where and one.where.owner is self.cls]
        return next(iter(own or ways), None)


def begin_construction(evaluator: Evaluator, cls: Class) -> Construction:
    """Return what is known of a class's objects before ``__init__``."""
    order, _ = evaluator.linear(cls)
    begin, defaults, assigned = Facts(), set(), set()
    for one in reversed(order):
        for name, value in one.members.items():
            if not _is_field(value):
                defaults.add(mangle(name, one))
                begin = begin.storing(mangle(name, one), *truth_of(value))
        for name in one.annotations if _FIELDS & _decorators(one) else ():
            if not _is_not_init(one.members.get(name)):
                begin = begin.storing(name)
        for name, settings in evaluator.assignments(one).items():
            assigned.add(name)
            if any(function.is_of_class for function, _ in settings):
                defaults.add(name)  # Set on the class, at whatever time.
        new = one.members.get("__new__")
        for node in inside(new.node) if isinstance(new, Function) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                begin = begin.storing(mangle(node.attr, one))
    is_known = all(_is_known(evaluator, one, base) for one in order for base in one.node.bases)
    return Construction(cls, begin, defaults, assigned | begin.maybe, is_known)


def _is_known(evaluator: Evaluator, cls: Class, base: ast.expr) -> bool:
    """Whether a base sets no attributes that are not seen: it was read, or is Python's own."""
    base = base.value if isinstance(base, ast.Subscript) else base
    value = evaluator.evaluate(base, Env(cls.outer or cls.scope))
    package = dotted(value).partition(".")[0]
    return isinstance(value, Class) or package in sys.stdlib_module_names


def is_dynamic(node: ast.Call, function: Function) -> bool:
    """Whether a call sets attributes whose names the source does not say."""
    if last_name(node.func) == "update" and "__dict__" in ast.dump(node.func):
        return True
    return last_name(node.func) == "setattr" and not stores(node, function)


def _decorators(cls: Class) -> set[str]:
    return {last_name(d.func if isinstance(d, ast.Call) else d) for d in cls.node.decorator_list}


def _is_field(value: object) -> bool:
    """Whether a class-level value is a dataclass field that leaves no attribute on the class."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    return not any(keyword.arg == "default" for keyword in value.keywords)


def _is_not_init(value: object) -> bool:
    """Whether a dataclass field is one that nothing sets."""
    if not isinstance(value, ast.Call) or not _is_field(value):
        return False
    said = {k.arg: k.value for k in value.keywords}
    off = said.get("init")
    never = isinstance(off, ast.Constant) and off.value is False
    return never and "default_factory" not in said and "factory" not in said
