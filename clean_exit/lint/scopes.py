"""Modules, classes and functions of a file, and the names that each of them binds."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Union

from clean_exit.lint.source import Source

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NOT_READ = {"setter", "deleter", "overload"}  # What they decorate is not run by reading.

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


@dataclass(eq=False)
class Function:
    """A function, a method, or a lambda."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Module
    name: str
    owner: Class | None = None
    parent: Function | None = None

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
        return [last_name(d.func if isinstance(d, ast.Call) else d)
                for d in getattr(self.node, "decorator_list", ())]  # fmt: skip

    @property
    def is_static(self) -> bool:
        """Whether it is called without an object."""
        return "staticmethod" in self.decorators

    @property
    def is_of_class(self) -> bool:
        """Whether it is called with the class."""
        return "classmethod" in self.decorators or self.name == "__init_subclass__"

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
        pairs = list(zip(reversed(self.parameters), reversed(given.defaults), strict=False))
        named = zip((one.arg for one in given.kwonlyargs), given.kw_defaults, strict=True)
        return {name: value for name, value in (*pairs, *named) if value is not None}

    @property
    def self_name(self) -> str | None:
        """What it calls its object, if it is a method."""
        if not self.owner or self.is_static or not self.parameters:
            return None
        return self.parameters[0]

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """What it binds in its body; see `bindings`."""
        return bindings(self.node, self.module)

    @cached_property
    def local_names(self) -> set[str]:
        """The names that are its own."""
        nonlocal_names = {name for node in inside(self.node) if isinstance(node, ast.Nonlocal)
                          for name in node.names}  # fmt: skip
        return {*self.all_parameters, *self.names} - self.declared_global - nonlocal_names

    @cached_property
    def declared_global(self) -> set[str]:
        """The names of its ``global`` statements."""
        return {name for node in inside(self.node) if isinstance(node, ast.Global)
                for name in node.names}  # fmt: skip

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements; a lambda has one."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        return self.node.body


@dataclass(eq=False)
class Class:
    """A class; `parent` is the function that it is in, `outer` the class."""

    node: ast.ClassDef
    module: Module
    name: str
    parent: Function | None = None
    outer: Class | None = None

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """What its body binds; see `bindings`."""
        return bindings(self.node, self.module)

    @cached_property
    def members(self) -> dict[str, object]:
        """What reading an attribute gives: a method, an expression, or something else."""
        read = {name: [one for one in bound if not _is_setter(one)]
                for name, bound in self.names.items()}  # fmt: skip
        return {name: bound[-1] for name, bound in read.items() if bound}

    @cached_property
    def methods(self) -> list[Function]:
        """The functions among its members; setters are not."""
        return [one for one in self.members.values() if isinstance(one, Function)]

    @cached_property
    def annotations(self) -> dict[str, ast.expr]:
        """The annotation of each attribute that has one in the body."""
        return {one.target.id: one.annotation for one in statements(self.node.body)
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}  # fmt: skip

    @property
    def scope(self) -> Function | Module:
        """Where names that it uses are looked up after its own."""
        return self.parent or self.module


@dataclass(eq=False)
class Module:
    """A file, and the classes and functions in it at any depth."""

    source: Source
    name: str
    is_package: bool = False
    definitions: dict[ast.AST, Function | Class] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """What its top level binds; see `bindings`."""
        return bindings(self.source.tree, self)

    @property
    def stars(self) -> list[Imported]:
        """Its ``from x import *``."""
        return [one for one in self.names.get("*", ()) if isinstance(one, Imported)]

    @property
    def classes(self) -> list[Class]:
        """All of its classes."""
        return [one for one in self.definitions.values() if isinstance(one, Class)]

    @property
    def functions(self) -> list[Function]:
        """All of its functions and methods; not its lambdas."""
        return [one for one in self.definitions.values() if isinstance(one, Function)]


Scope = Union[Module, Class, Function]  # noqa: UP007  (an alias, for 3.10)


def last_name(node: ast.AST | None) -> str:
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


def bindings(top: ast.AST, module: Module) -> dict[str, list[object]]:
    """Return what a scope binds its names to, in the order of its lines.

    A definition, an import, an expression that is assigned, or None for what is not that plain.
    What a loop binds is a Starred: an element of its value.
    """
    found: dict[str, list[object]] = {}
    values: dict[ast.AST, ast.expr] = {}
    elsewhere: set[ast.AST] = set()  # A comprehension's variables are its own.
    for one in inside(top):
        bound: dict[str, object] = {}
        if isinstance(one, _COMPREHENSIONS):
            elsewhere |= {n for part in one.generators for n in ast.walk(part.target)}
        elif isinstance(one, ast.Assign):
            values.update((target, one.value) for target in one.targets)
        elif isinstance(one, (ast.AnnAssign, ast.NamedExpr)):
            if one.value is None:
                elsewhere.add(one.target)
            else:
                values[one.target] = one.value
        elif isinstance(one, (ast.For, ast.AsyncFor)):
            values[one.target] = ast.Starred(one.iter)
        elif isinstance(one, ast.Name):
            if isinstance(one.ctx, ast.Store) and one not in elsewhere:
                bound = {one.id: values.get(one)}
        elif one in module.definitions:
            bound = {module.definitions[one].name: module.definitions[one]}
        elif isinstance(one, ast.Import):
            for alias in one.names:
                top_name = alias.name.partition(".")[0]
                whole = alias.name if alias.asname else top_name
                bound[alias.asname or top_name] = Imported(whole, None, 0)
        elif isinstance(one, ast.ImportFrom):
            for alias in one.names:
                taken = Imported(one.module or "", alias.name, one.level)
                bound[alias.asname or alias.name] = taken
        elif isinstance(one, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and one.name:
            bound = {one.name: None}
        elif isinstance(one, ast.MatchMapping) and one.rest:
            bound = {one.rest: None}
        for name, value in bound.items():
            found.setdefault(name, []).append(value)
    return found


def module_of(scope: Scope) -> Module:
    """Return the module that a scope is in, or is."""
    return scope if isinstance(scope, Module) else scope.module


def lambda_of(node: ast.Lambda, scope: Scope) -> Function:
    """Return a lambda as a function; in a class's body it is one of its methods."""
    owner = scope if isinstance(scope, Class) else None
    around = scope if isinstance(scope, Function) else owner.parent if owner else None
    return Function(node, module_of(scope), "lambda", owner, around)


def read_module(source: Source, name: str, *, is_package: bool) -> Module:
    """Find the classes and functions of a file, at any depth."""
    module = Module(source, name, is_package)
    todo: list[tuple[list[ast.stmt], Class | None, Function | None]]
    todo = [(source.tree.body, None, None)]
    while todo:
        body, owner, function = todo.pop()
        for one in statements(body):
            if isinstance(one, _FUNCTIONS):
                made = Function(one, module, one.name, owner, function)
                module.definitions[one] = made
                todo.append((one.body, None, made))
            elif isinstance(one, ast.ClassDef):
                inner = Class(one, module, one.name, function, owner)
                module.definitions[one] = inner
                todo.append((one.body, inner, function))
    return module


def passed(function: Function, call: ast.Call | None, *, bound: bool) -> dict[str, ast.expr]:
    """Return what each parameter gets: an argument, or a default that is a constant."""
    given: dict[str, ast.expr] = {
        k: v for k, v in function.defaults.items() if isinstance(v, ast.Constant)
    }
    if call is None:
        return given
    is_open = any(isinstance(one, ast.Starred) for one in call.args)
    if is_open or any(keyword.arg is None for keyword in call.keywords):
        given = {}
    names = function.parameters[1 if bound and function.self_name else 0 :]
    given.update(() if is_open else zip(names, call.args, strict=False))
    given.update((k.arg, k.value) for k in call.keywords if k.arg in function.all_parameters)
    return given


def _is_setter(bound: object) -> bool:
    return isinstance(bound, Function) and not _NOT_READ.isdisjoint(bound.decorators)
