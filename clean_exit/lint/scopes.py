"""Modules, classes and functions of a file, and the names that each of them binds."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Union

from clean_exit.lint.source import Source

Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda]  # noqa: UP007  (an alias, for 3.10)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_PAIRS = {"items", "enumerate"}  # The second of each pair is an element.
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Of every supported Python, and what older code still says.
BUILTINS = frozenset(dir(builtins)) | {
    "BaseExceptionGroup", "EncodingWarning", "ExceptionGroup", "PythonFinalizationError",
    "WindowsError", "_IncompleteInputError", "aiter", "anext", "__file__", "__builtins__",
    "__path__", "__class__",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Imported:
    """A name that an import statement binds: a module, or what is taken from it."""

    module: str
    name: str | None
    level: int


@dataclass(frozen=True, eq=False)
class Item:
    """What a loop binds: an element of something."""

    of: ast.expr


@dataclass(eq=False)
class Function:
    """A function, a method, or a lambda."""

    node: Definition
    module: Module
    name: str
    owner: Class | None = None
    parent: Function | None = None
    names: dict[str, list[object]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in a trace: with its class, if it has one."""
        return f"{self.owner.name}.{self.name}" if self.owner else self.name

    @property
    def is_async(self) -> bool:
        """Whether calling it makes a coroutine or an asynchronous generator."""
        return isinstance(self.node, ast.AsyncFunctionDef)

    @cached_property
    def decorators(self) -> list[str]:
        """The last name of each decorator."""
        if isinstance(self.node, ast.Lambda):
            return []
        return [last_name(d.func if isinstance(d, ast.Call) else d)
                for d in self.node.decorator_list]  # fmt: skip

    @property
    def is_static(self) -> bool:
        """Whether it is called without an object."""
        return "staticmethod" in self.decorators

    @property
    def is_property(self) -> bool:
        """Whether reading the attribute runs it."""
        return any(d.endswith("property") for d in self.decorators)

    @cached_property
    def parameters(self) -> list[str]:
        """Its positional parameters."""
        given = self.node.args
        return [one.arg for one in (*given.posonlyargs, *given.args)]

    @cached_property
    def all_parameters(self) -> dict[str, ast.arg]:
        """All of its parameters."""
        given = self.node.args
        extra = [one for one in (given.vararg, given.kwarg) if one]
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]
        return {one.arg: one for one in every}

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The default of each parameter that has one."""
        given = self.node.args
        positional = [*given.posonlyargs, *given.args]
        pairs = list(zip(reversed(positional), reversed(given.defaults), strict=False))
        named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return {one.arg: value for one, value in (*pairs, *named) if value is not None}

    @property
    def self_name(self) -> str | None:
        """What it calls its object, if it is a method."""
        if not self.owner or self.is_static or not self.parameters:
            return None
        return self.parameters[0]

    @cached_property
    def declared_global(self) -> set[str]:
        """The names of its ``global`` statements."""
        return {name for node in inside(self.node) if isinstance(node, ast.Global)
                for name in node.names}  # fmt: skip

    @cached_property
    def local_names(self) -> set[str]:
        """The names that are its own."""
        outer = {name for node in inside(self.node) if isinstance(node, ast.Nonlocal)
                 for name in node.names}  # fmt: skip
        bound = set(self.all_parameters) | set(bound_names(self.node))
        return bound - self.declared_global - outer

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements; a lambda has one."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        return self.node.body


@dataclass(eq=False)
class Class:
    """A class; `members` has its methods, `values` what else is set in its body."""

    node: ast.ClassDef
    module: Module
    name: str
    parent: Function | None
    outer: Class | None = None
    members: dict[str, Function] = field(default_factory=dict)
    values: dict[str, ast.expr | None] = field(default_factory=dict)
    annotations: dict[str, ast.expr] = field(default_factory=dict)
    names: dict[str, list[object]] = field(default_factory=dict)

    @property
    def scope(self) -> Function | Module:
        """Where names that it uses are looked up after its own."""
        return self.parent or self.module


@dataclass(eq=False)
class Module:
    """A file and what its top level binds."""

    source: Source
    name: str
    is_package: bool = False
    names: dict[str, list[object]] = field(default_factory=dict)
    stars: list[Imported] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)

    @cached_property
    def has_walruses(self) -> bool:
        """Whether it is worth while to look for assignments inside of expressions."""
        return b":=" in self.source.data


Scope = Union[Module, Class, Function]  # noqa: UP007


def last_name(node: ast.AST) -> str:
    """Return the name, or what stands after the last dot; else nothing."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def children(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield what is below, without recursion, and without entering another scope's body."""
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, _SCOPES):
            stack += list(ast.iter_child_nodes(node))[::-1]
        elif not isinstance(node, ast.Lambda):
            stack += node.decorator_list


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function's, class's or module's own scope, in the order of its lines."""
    body = getattr(node, "body", [])
    return children(body if isinstance(body, list) else [body])


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that are bound in a scope."""
    comprehension: set[int] = set()
    for one in inside(node):
        if isinstance(one, _COMPREHENSIONS):
            # Its variables are its own, but for those of a walrus.
            comprehension |= {id(n) for part in one.generators for n in ast.walk(part.target)}
        elif isinstance(one, ast.Name) and isinstance(one.ctx, (ast.Store, ast.Del)):
            if id(one) not in comprehension:
                yield one.id
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield one.name
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            for alias in one.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif (isinstance(one, ast.ExceptHandler) and one.name) or (
            isinstance(one, (ast.MatchAs, ast.MatchStar)) and one.name
        ):
            yield one.name
        elif isinstance(one, ast.MatchMapping) and one.rest:
            yield one.rest


def lambda_of(node: ast.Lambda, scope: Scope) -> Function:
    """Return a lambda as a function; in a class's body it is one of its methods."""
    module = _module_of(scope)
    owner = scope if isinstance(scope, Class) else None
    parent = scope.parent if isinstance(scope, Class) else None
    around = scope if isinstance(scope, Function) else parent
    return Function(node, module, "lambda", owner, around)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope at any depth, in order; expressions are not looked into."""
    stack: list[ast.AST] = [*reversed(list(body))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.stmt):
            yield node
            if isinstance(node, _SCOPES):
                continue
        below: list[ast.AST] = []
        for block in ("body", "handlers", "cases", "orelse", "finalbody"):
            below += getattr(node, block, ())
        stack += below[::-1]


def read_module(source: Source, name: str, *, is_package: bool) -> Module:
    """Find the classes and functions of a file, at any depth."""
    module = Module(source, name, is_package)
    todo: list[tuple[list[ast.stmt], Scope, Function | None]] = [(source.tree.body, module, None)]
    while todo:
        body, scope, function = todo.pop()
        for one in statements(body):
            inner = _bind(one, scope, module, function)
            if inner is not None and not isinstance(inner.node, ast.Lambda):
                around = inner if isinstance(inner, Function) else function
                todo.append((inner.node.body, inner, around))
    return module


def _bind(
    one: ast.stmt, scope: Scope, module: Module, function: Function | None
) -> Function | Class | None:
    """Note what a statement binds; return the scope that it opens, if it does."""
    owner = scope if isinstance(scope, Class) else None
    if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
        made = Function(one, module, one.name, owner, function)
        module.functions.append(made)
        scope.names.setdefault(one.name, []).append(made)
        # The getter is what reading runs, not the setter that has the same name.
        if owner and not {"setter", "deleter", "overload"} & set(made.decorators):
            owner.members[one.name] = made
            owner.values.pop(one.name, None)
        return made
    if isinstance(one, ast.ClassDef):
        inner = Class(one, module, one.name, function, owner)
        module.classes.append(inner)
        scope.names.setdefault(one.name, []).append(inner)
        if owner:
            owner.values[one.name] = None
        return inner
    if isinstance(one, (ast.Import, ast.ImportFrom)):
        _bind_imports(one, scope, module)
    else:
        _bind_values(one, scope, owner)
    return None


def _bind_imports(one: ast.Import | ast.ImportFrom, scope: Scope, module: Module) -> None:
    for alias in one.names:
        if isinstance(one, ast.Import):
            bound = alias.asname or alias.name.partition(".")[0]
            imported = Imported(alias.name if alias.asname else bound, None, 0)
        else:
            bound = alias.asname or alias.name
            imported = Imported(one.module or "", alias.name, one.level)
        if bound == "*":
            module.stars.append(imported)
            continue
        scope.names.setdefault(bound, []).append(imported)
        if isinstance(scope, Class):
            scope.values[bound] = None


def _bind_values(one: ast.stmt, scope: Scope, owner: Class | None) -> None:
    value: ast.expr | None = None
    if isinstance(one, ast.Assign):
        targets, value = one.targets, one.value
    elif isinstance(one, ast.AnnAssign):
        targets, value = [one.target], one.value
        if owner and isinstance(one.target, ast.Name):
            owner.annotations[one.target.id] = one.annotation
        if value is None:
            return
    elif isinstance(one, (ast.For, ast.AsyncFor, ast.AugAssign)):
        targets = [one.target]
    elif isinstance(one, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in one.items if item.optional_vars]
    else:
        for walrus in _walruses(one) if _module_of(scope).has_walruses else ():
            scope.names.setdefault(walrus.target.id, []).append(walrus.value)
        return
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known = scope.names.setdefault(node.id, [])
                if node is target and value is not None:
                    known.append(value)
                elif isinstance(one, (ast.For, ast.AsyncFor)):
                    known += [Item(part) for part in items(target, one.iter, node.id)]
                if owner:
                    owner.values[node.id] = value if node is target else None
                    owner.members.pop(node.id, None)


def items(target: ast.expr, of: ast.expr, name: str) -> list[ast.expr]:
    """Return of what a name becomes an element, if a loop's target has it in a usual way."""
    if isinstance(target, ast.Name):
        return [of]
    if isinstance(target, ast.Tuple) and isinstance(of, ast.Call) and len(target.elts) == 2:
        last = target.elts[1]
        if isinstance(last, ast.Name) and last.id == name and last_name(of.func) in _PAIRS:
            return [of]
    return []


def _module_of(scope: Scope) -> Module:
    return scope if isinstance(scope, Module) else scope.module


def _walruses(one: ast.stmt) -> Iterator[ast.NamedExpr]:
    """Yield the assignments inside of a test or an expression statement."""
    parts = [getattr(one, name, None) for name in ("test", "value", "subject")]
    for part in parts:
        if isinstance(part, ast.expr):
            for node in children([part]):
                if isinstance(node, ast.NamedExpr):
                    yield node
