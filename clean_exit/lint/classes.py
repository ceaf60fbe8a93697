"""A class with a destructor: its methods, and what the destructor reaches, in order.

The methods of the class, those of its bases in the same file, and the functions of the module are
followed; nothing else is.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_MAX_TRACE = 3  # The destructor and two calls; further away, too much depends on the callers.
# The usual names of functions and attributes that tell whether the interpreter is shutting down.
_SHUTDOWN_CHECK = re.compile(
    r"_*(is_|interpreter_|python_)*(finalizing|shutting_?down|exiting|shutdown_started)"
    r"|_*(is_)?(interpreter_shutdown|python_exit_status)|meta_path"
)
# Any other decorator may catch exceptions.
_TRANSPARENT = {"property", "cached_property", "staticmethod", "classmethod", "override", "final"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Visit:
    """One node that the destructor reaches.

    Attributes:
        node: The node.
        function: The function with the node.
        trace: The functions from the destructor to that one.
        caught: The names of the exceptions that a surrounding handler catches.
        is_guarded: Whether a test of the object's state decides if the node is reached.
        is_alive: Whether a test before has asked if the interpreter is shutting down.
        is_test: Whether the node is a part of a test.
        done: The futures that are done, because a test before has asked them.
        is_default: Whether the parameters have their defaults: the call passes no arguments.
    """

    node: ast.AST
    function: Function
    trace: tuple[Function, ...]
    caught: frozenset[str] = frozenset()
    is_guarded: bool = False
    is_alive: bool = False
    is_test: bool = False
    done: frozenset[str] = frozenset()
    is_default: bool = True

    def catches(self, *names: str) -> bool:
        """Whether an exception of one of these classes is caught."""
        return not self.caught.isdisjoint({"Exception", "BaseException", *names})


@dataclass(eq=False)
class Module:
    """The names of a file.

    Attributes:
        tree: The syntax tree.
        classes: Its classes, inner ones too.
        imported: The full name of each imported name.
        bound: The names that statements outside of functions bind, and their values.
    """

    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    bound: dict[str, list[ast.AST | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported.update(_imported(node))
        for node in inside(self.tree):
            for name, value in bindings(node):
                self.bound.setdefault(name, []).append(value)

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of a function or class, such as "os.path.join"; "" if unknown."""
        if isinstance(node, ast.Call):  # A method of the result.
            name = self.dotted(node.func)
            return f"{name}()" if name else ""
        if isinstance(node, ast.Attribute):
            name = self.dotted(node.value)
            return f"{name}.{node.attr}" if name else ""
        return self.imported.get(node.id, "") if isinstance(node, ast.Name) else ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            place = "." * node.level + (node.module or "")
            yield alias.asname or alias.name, f"{place}.{alias.name}"
        else:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)


def inside(top: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node in the order of the source, without the bodies of functions."""
    for node in ast.iter_child_nodes(top):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from inside(node)


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the names that a statement binds, and each value if it is known."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, node
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((name, node) for name, _ in _imported(node))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_name = isinstance(target, ast.Name)
            for one in [target] if is_name else ast.walk(target):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    yield one.id, node.value if is_name else None


def first_parameter(function: Function) -> str:
    """Return the name of a method's object."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""


def last_name(node: ast.AST) -> str:
    """Return the name of a variable, or the last one of a chain of attributes."""
    return getattr(node, "attr", getattr(node, "id", ""))


def stored_names(function: Function) -> set[str]:
    """Return the variables that a function sets."""
    names = (one for one in ast.walk(function) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, ast.Store)}


def own_attribute(function: Function, node: ast.AST) -> str:
    """Return the attribute of the method's object that an expression is, or ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == first_parameter(function) else ""
    return ""


def assigned(function: Function, node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the attributes of the own object that a statement sets, and each value if known."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_one = isinstance(target, ast.Attribute)
            for one in [target] if is_one else getattr(target, "elts", ()):
                if name := own_attribute(function, one):
                    yield name, node.value if is_one else None


def is_none(node: ast.AST | None) -> bool:
    """Whether an expression is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def decorators(function: Function | ast.ClassDef) -> set[str]:
    """Return the last names of the decorators of a function or class."""
    return {
        last_name(one.func if isinstance(one, ast.Call) else one) for one in function.decorator_list
    }


@dataclass(eq=False)
class Destructible:
    """A class with a destructor.

    Attributes:
        node: The class.
        module: Its module.
        definitions: The methods of each name: its own first, then those of bases in the same file.
        defaults: The values of the class's attributes.
        is_complete: Whether all bases are in the file or in the standard library.
        reached: What the destructor reaches.
    """

    node: ast.ClassDef
    module: Module
    definitions: dict[str, list[Function]] = field(default_factory=dict)
    defaults: dict[str, ast.AST | None] = field(default_factory=dict)
    is_complete: bool = True
    reached: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read(self.node, set())
        if destructor := self.methods.get("__del__"):
            self._enter(Visit(destructor, destructor, ()))

    def _read(self, node: ast.ClassDef, seen: set[str]) -> None:
        for one in inside(node):
            for name, value in bindings(one):
                self.defaults.setdefault(name, value)
                if isinstance(value, _FUNCTIONS):
                    self.definitions.setdefault(name, []).append(value)
        for base in node.bases:
            name = last_name(base.value if isinstance(base, ast.Subscript) else base)
            found = self.module.classes.get(name)
            if found is not None and name not in seen:
                self._read(found, seen | {name})
            elif found is None:
                package = self.module.imported.get(name, name).partition(".")[0]
                self.is_complete &= name == "object" or package in sys.stdlib_module_names

    @cached_property
    def methods(self) -> dict[str, Function]:
        """The methods that the object has."""
        named = {name: found[0] for name, found in self.definitions.items()}
        alias = named.get(last_name(self.defaults.get("__del__") or self.node))  # __del__ = close
        return {**named, "__del__": alias} if alias else named

    def closes_at_exit(self, method: Function) -> bool:
        """Whether a method registers one of the object: the destructor finds it closed then."""
        return any(
            isinstance(one, ast.Call) and self.module.dotted(one.func) == "atexit.register"
            and any(own_attribute(method, argument) for argument in one.args)
            for one in inside(method)
        )  # fmt: skip

    def first_value(self, function: Function, test: ast.expr) -> object:
        """Return whether a test holds if attributes have the class's values; None if unknown."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self.first_value(function, test.operand)
            return None if value is None else not value
        if isinstance(test, ast.Compare) and is_none(test.comparators[0]):
            default = self.defaults.get(own_attribute(function, test.left))
            if isinstance(default, ast.Constant):
                return isinstance(test.ops[0], ast.Is) == is_none(default)
        default = self.defaults.get(own_attribute(function, test))
        return bool(default.value) if isinstance(default, ast.Constant) else None

    # What the destructor reaches

    def _enter(self, visit: Visit) -> None:
        """Visit a function that the node of a visit names or calls."""
        function, node = visit.function, visit.node
        is_seen = function in visit.trace or len(visit.trace) >= _MAX_TRACE
        self.reached += [] if is_seen else [replace(visit, node=function)]
        if is_seen or isinstance(function, ast.AsyncFunctionDef):
            return
        caught = visit.caught
        if decorators(function) - _TRANSPARENT:
            caught |= {"BaseException"}
        passes = isinstance(node, ast.Call) and bool(node.args or node.keywords)
        inner = replace(visit, trace=(*visit.trace, function), caught=caught, is_default=not passes)
        self._block(inner, function.body)

    def _block(self, visit: Visit, statements: list[ast.stmt]) -> None:
        for node in statements:
            self._node(visit, node)
            # What a test has asked holds after it as well, if its body leaves the function.
            if isinstance(node, ast.If) and isinstance(node.body[-1], _LEAVES):
                visit = self._after(visit, node.test, truth=False)
            if isinstance(node, ast.Assert):
                visit = self._after(visit, node.test, truth=True)

    def _after(self, visit: Visit, test: ast.expr, *, truth: bool) -> Visit:
        """Return a visit of what is reached if a test is true or false."""
        names = [one for one in ast.walk(test) if isinstance(one, (ast.Name, ast.Attribute))]
        of_object = {first_parameter(visit.function), *stored_names(visit.function)}
        is_own = not of_object.isdisjoint(map(last_name, names))
        is_own &= self.first_value(visit.function, test) is not truth
        is_alive = any(_SHUTDOWN_CHECK.fullmatch(last_name(one)) for one in names)
        return replace(
            visit,
            is_guarded=visit.is_guarded or is_own,
            is_alive=visit.is_alive or is_alive,
            done=visit.done | _done(test, truth=truth),
        )

    def _node(self, visit: Visit, node: ast.AST) -> None:
        """Visit a node and those below it."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return
        visit = replace(visit, node=node)
        self.reached.append(visit)
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            self._node(replace(visit, is_test=True), node.test)
            true = self._after(visit, node.test, truth=True)
            false = self._after(visit, node.test, truth=False)
            for inner, branch in ((true, node.body), (false, node.orelse)):
                for one in [branch] if isinstance(branch, ast.expr) else ():
                    self._node(inner, one)
                self._block(inner, branch if isinstance(branch, list) else [])
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                self._node(replace(visit, is_test=True), one)
                visit = self._after(visit, one, truth=isinstance(node.op, ast.And))
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            caught = visit.caught.union(*map(_caught_by, node.handlers))  # type: ignore[attr-defined]
            self._block(replace(visit, caught=caught), node.body)  # type: ignore[attr-defined]
            for part in ("handlers", "orelse", "finalbody"):
                self._block(visit, getattr(node, part))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._node(visit, item.context_expr)
                visit = replace(visit, caught=visit.caught | _suppressed(item.context_expr))
            self._block(visit, node.body)
        else:
            for _, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    self._block(visit, value)
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                        self._node(visit, child)
            if function := self.called(visit.function, node):
                self._enter(replace(visit, function=function))

    def called(self, function: Function, node: ast.AST) -> Function | None:
        """Return the method or function of the file that a node calls, or the property it reads."""
        if not isinstance(node, ast.Call):
            found = self.methods.get(own_attribute(function, node))
            is_property = found and decorators(found) & {"property", "cached_property"}
            return found if is_property else None
        if isinstance(node.func, ast.Name):
            local = [one for one in inside(function) if getattr(one, "name", "") == node.func.id]
            known = [*local[-1:], *self.module.bound.get(node.func.id, ())]
            return next((one for one in known if isinstance(one, _FUNCTIONS)), None)
        owner = getattr(node.func, "value", None)
        others = self.definitions.get(last_name(node.func), [])
        if isinstance(owner, ast.Call):
            is_super = last_name(owner.func) == "super" and function in others
            return next(iter(others[others.index(function) + 1 :]), None) if is_super else None
        if base := self.module.classes.get(getattr(owner, "id", "")):  # Base.method(self)
            return next((one for one in others if one in base.body), None)
        return self.methods.get(own_attribute(function, node.func))


def _done(test: ast.expr, *, truth: bool) -> set[str]:
    """Return the futures whose ``done()`` was true if a test is true or false."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _done(test.operand, truth=not truth)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is truth:
        return set().union(*(_done(one, truth=truth) for one in test.values))
    function = test.func if truth and isinstance(test, ast.Call) else None
    is_done = isinstance(function, ast.Attribute) and function.attr == "done"
    return {ast.unparse(function.value)} if is_done else set()  # type: ignore[union-attr]


def raises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler may raise."""
    return any(isinstance(one, ast.Raise) for one in inside(handler))


def _caught_by(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of the exceptions that go no further; none if the handler may raise."""
    if raises(handler):
        return set()
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {last_name(kind) if kind is not None else "BaseException" for kind in kinds}


def _suppressed(node: ast.expr) -> set[str]:
    """Return the names of the exceptions that ``contextlib.suppress(...)`` catches."""
    if isinstance(node, ast.Call) and last_name(node.func).strip("_") == "suppress":
        return {last_name(one) for argument in node.args for one in ast.walk(argument)}
    return set()


def destructible_classes(module: Module) -> Iterator[Destructible]:
    """Yield the classes with a destructor, their own or one of a base in the same file."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            cls = Destructible(node, module)
            if "__del__" in cls.methods and not any(map(cls.closes_at_exit, cls.methods.values())):
                yield cls
