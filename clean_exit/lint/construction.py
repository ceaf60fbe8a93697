"""What ``__init__`` sets and what may fail before it, in the order of the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from clean_exit.lint.evaluator import Bound, Env, Evaluator, Instance, Value, dotted
from clean_exit.lint.scopes import (
    Class,
    Function,
    assignments_in,
    decorator_names,
    inside,
    last_name,
    mangle,
)

_FIELDS = {"dataclass", "define", "frozen", "mutable", "attrs", "attr", "s", "pydantic_dataclass"}
# Calls that fail in ordinary use: a file, a program, a library or a network may be missing.
_LIKELY = re.compile(
    r"os\.(listdir|stat|remove|rename)|socket\..*\.(bind|listen)"
    r"|(.*\.)?(open|fdopen|connect|create_connection|Popen|check_call|check_output|dlopen"
    r"|mkdir|makedirs|mkdtemp|mkstemp|NamedTemporaryFile|TemporaryFile|TemporaryDirectory|urlopen"
    r"|ZipFile|TarFile|CDLL|WinDLL|LoadLibrary|mmap|memmap|SharedMemory|import_module|__import__"
    r"|load|loads|load_library|get_distribution|getaddrinfo|unlink"
    r"|read|recv|send|sendall|login|urlretrieve|fromfile|from_file|from_pretrained|tcgetattr)"
)
# These load and read from memory, or are methods of dictionaries and lists.
_UNLIKELY = re.compile(r"(os\.environ|builtins\.(dict|list|set|str))\..*|.*\.(path|stat)\.\w+")
_MAX_METHODS = 2  # methods of the object on the way from __init__


class Step(NamedTuple):
    """One thing that a construction does: it sets an attribute, or makes a call that may fail."""

    name: str  # the attribute; "" if this may fail
    node: ast.AST
    where: Function
    is_first_value: bool = False


class Construction:
    """What the construction of an object does, in the order of the source.

    Branches and loops count as if all of them ran. That loses findings, but a finding names a call
    that comes before the attribute in the source.

    Attributes:
        defaults: The attributes of the class, which always exist.
        first_values: The constants that attributes have first.
        setters: For each attribute, the methods that set it.
        is_known: Whether all code that sets attributes is known.
        steps: The steps.
    """

    def __init__(self, evaluator: Evaluator, cls: Class) -> None:
        self._evaluator = evaluator
        self.defaults: set[str] = set()
        self.first_values: dict[str, object] = {}
        self.setters: dict[str, list[str]] = {}
        self.is_known = True
        self.steps: list[Step] = []
        order, _ = evaluator.mro(cls)
        for one in reversed(order):
            self._read_class(one)
        init = evaluator.method(cls, "__init__") or evaluator.method(cls, "__post_init__")
        if init:
            self.steps += self._steps(cls, init, ())

    def why_missing(self, name: str, used: Set[str], changed: Set[str]) -> Step | str | None:
        """Return the step that may fail before an attribute is set.

        Args:
            name: The attribute.
            used: The attributes that the destructor has used or asked for before.
            changed: The attributes that have not their first value any more.

        Returns:
            The step; the name of a method if ``__init__`` does not set the attribute; else None.
        """
        if not self.is_known or name in self.defaults or name not in self.setters:
            return None
        names = [step.name for step in self.steps]
        last = {one: at for at, one in enumerate(names)}
        others = {step.name for step in self.steps if not step.is_first_value}
        # What a test or a use has shown was set before this point.
        shown = (used & self.setters.keys()) - self.defaults | changed
        if shown - last.keys() or changed - others:
            return None  # Another method sets it, after the construction.
        if name not in last:
            # If a base's __init__ sets it, a class that inherits from both may call that.
            return None if "__init__" in self.setters[name] else self.setters[name][0]
        start = max((last[one] + 1 for one in shown), default=0)
        return next((one for one in self.steps[start : names.index(name)] if not one.name), None)

    def _note_first(self, name: str, value: object) -> bool:
        """Note the first value of an attribute if it is a constant; return whether it is this."""
        try:
            known = ast.literal_eval(value)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return False
        return bool(self.first_values.setdefault(name, known) == known)

    def _read_class(self, cls: Class) -> None:
        """Note the defaults of a class, and the methods that set attributes."""
        is_dataclass = _FIELDS & set(decorator_names(cls.node))
        for name in {**cls.members, **(cls.annotations if is_dataclass else {})}:
            value = cls.members.get(name)
            if not _is_set_later(value):
                self.defaults.add(mangle(name, cls))
                self._note_first(mangle(name, cls), value)
        for name, set_by in self._evaluator.assignments(cls).items():
            methods = [function for function, _ in set_by]
            self.setters.setdefault(name, []).extend(one.name for one in methods)
            if any(one.is_of_class or one.name == "__new__" for one in methods):
                self.defaults.add(name)  # It is set on the class, or before __init__.
        is_read = all(self._is_read(cls, base) for base in cls.node.bases)
        is_dynamic = {"__getattr__", "__getattribute__", "__new__"} & set(cls.members)
        is_dynamic |= {one.name for one in cls.methods if _sets_unknown_names(one)}
        self.is_known = self.is_known and is_read and not is_dynamic

    def _is_read(self, cls: Class, base: ast.expr) -> bool:
        """Whether the attributes that a base sets are known: it was read, or is Python's own."""
        base = base.value if isinstance(base, ast.Subscript) else base
        value = self._evaluator.evaluate(base, Env(cls.outer or cls.scope))
        package = dotted(value).partition(".")[0]
        return isinstance(value, Class) or package in sys.stdlib_module_names

    def _steps(self, cls: Class, function: Function, above: tuple[Function, ...]) -> Iterator[Step]:
        """Yield the steps of a method of the object."""
        env, callers = Env(function, Instance(cls, is_self=True)), (*above, function)
        for node in _in_order(function.node):
            for one in assignments_in(node, function):
                yield Step(one.name, node, function, self._note_first(one.name, one.value))
            if isinstance(node, ast.Call):
                value = self._evaluator.evaluate(node.func, env)
                own = value.function if isinstance(value, Bound) else value
                if isinstance(own, Function) and _is_method_of_object(own, value, node, callers):
                    yield from self._steps(cls, own, callers)
                elif self._call_may_fail(value, node, function, 0):
                    yield Step("", node, function)
            elif _may_raise(node, function):
                yield Step("", node, function)

    def _call_may_fail(
        self, value: Value | None, node: ast.Call, caller: Function, depth: int
    ) -> bool:
        """Whether a call often fails: by its name, or as a function with such a call or a raise."""
        if is_class := isinstance(value, Class):
            value = self._evaluator.method(value, "__init__")
        function = value.function if isinstance(value, Bound) else value
        if not isinstance(function, Function):
            name = dotted(value) or ast.unparse(node.func)
            return bool(_LIKELY.fullmatch(name)) and not _UNLIKELY.fullmatch(name)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        is_constant = bool(arguments or is_class) and not any(
            isinstance(part, ast.Name) and part.id in caller.local_names
            for one in arguments
            for part in ast.walk(one)
        )
        if function.is_async or depth or is_constant:
            return False
        return any(
            self._call_may_fail(
                self._evaluator.evaluate(one.func, Env(function)), one, function, depth + 1
            )
            if isinstance(one, ast.Call)
            else _may_raise(one, function)
            for one in _in_order(function.node)
        )


def _in_order(node: ast.AST, is_caught: bool = False) -> Iterator[ast.AST]:
    """Yield a node and those below it in the order of evaluation, without other scopes.

    What a handler may catch does not fail, but what it sets is set. Handlers are left out as well,
    except for what they set and raise: a second failure is too rare.
    """
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        parts = [node.value]  # It is evaluated before the attribute is set.
    elif isinstance(node, ast.Try):
        for handler in node.handlers:  # One that sets something has made up for the failure.
            sets = [
                part for part in inside(handler) if isinstance(part, (ast.Assign, ast.AnnAssign))
            ]
            yield from sets or (part for part in inside(handler) if isinstance(part, ast.Raise))
        for part in (*node.finalbody, *node.body):
            yield from _in_order(part, is_caught or bool(node.handlers))
        parts = node.orelse
    for one in parts:
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _in_order(one, is_caught)
    if not (is_caught and isinstance(node, (ast.Call, ast.Raise, ast.Import, ast.ImportFrom))):
        yield node


def _is_method_of_object(
    own: Function, value: Value | None, node: ast.Call, callers: tuple[Function, ...]
) -> bool:
    """Whether a call runs another method of the object that is built."""
    if own.owner is None or own.is_async or own in callers or len(callers) > _MAX_METHODS:
        return False
    if isinstance(value, Bound):
        return isinstance(value.receiver, Instance) and value.receiver.is_self
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Name) and first.id == callers[-1].self_name


def _is_set_later(value: object) -> bool:
    """Whether a value in a class body is a dataclass field that ``__init__`` does not set."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in {"field", "ib", "attrib"}:
        return False
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    init = options.get("init")
    is_off = isinstance(init, ast.Constant) and init.value is False
    return is_off and options.keys().isdisjoint({"default", "default_factory", "factory"})


def _may_raise(node: ast.AST, where: Function) -> bool:
    """Whether a node raises by itself, apart from abstract methods."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return last_name(raised) not in {"NotImplementedError", "StopIteration"}
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    own = where.module.name.partition(".")[0]
    return any(
        top != own and top not in sys.stdlib_module_names
        for top in (name.partition(".")[0] for name in names)
    )


def _sets_unknown_names(function: Function) -> bool:
    """Whether a method sets attributes whose names are not in the source."""
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("setattr", "__setattr__", "__dict__.update"))
        for node in inside(function.node)
    )
