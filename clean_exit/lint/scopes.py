"""The modules, classes and functions of a file, and the names that each of them binds."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Union

from clean_exit.lint.files import Source

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)
_NOT_READ = {"setter", "deleter", "overload"}  # Reading the attribute does not run these.

BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, eq=False)
class Imported:
    """A name that an import statement binds: a module, or a name from a module."""

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
        """The name in a trace, after the name of the class if there is one."""
        return f"{self.owner.name}.{self.name}" if self.owner else self.name

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine or an asynchronous generator."""
        return isinstance(self.node, ast.AsyncFunctionDef)

    @cached_property
    def decorators(self) -> list[str]:
        """The last name of each decorator."""
        return decorator_names(self.node)

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
        """The names of the positional parameters."""
        return [one.arg for one in (*self.node.args.posonlyargs, *self.node.args.args)]

    @cached_property
    def all_parameters(self) -> dict[str, ast.arg]:
        """All parameters by name."""
        args = self.node.args
        extra = [one for one in (args.vararg, args.kwarg) if one]
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]
        return {one.arg: one for one in every}

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The default of each parameter that has one."""
        args = self.node.args
        pairs = list(zip(reversed(self.parameters), reversed(args.defaults), strict=False))
        named = zip((one.arg for one in args.kwonlyargs), args.kw_defaults, strict=True)
        return {name: value for name, value in (*pairs, *named) if value is not None}

    @property
    def self_name(self) -> str | None:
        """The name of the parameter for the object, if this is a method."""
        if not self.owner or self.is_static or not self.parameters:
            return None
        return self.parameters[0]

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """The names that the body binds; see `bindings`."""
        return bindings(self.node, self.module)

    @cached_property
    def local_names(self) -> set[str]:
        """The local names: parameters, and names that the body binds."""
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
        """The statements; a lambda has one."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        return self.node.body


@dataclass(eq=False)
class Class:
    """A class; `parent` is the function around it, `outer` the class around it."""

    node: ast.ClassDef
    module: Module
    name: str
    parent: Function | None = None
    outer: Class | None = None

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """The names that the body binds; see `bindings`."""
        return bindings(self.node, self.module)

    @cached_property
    def members(self) -> dict[str, object]:
        """The last value bound to each name, apart from setters: a method, an expression, ..."""
        read = {name: [one for one in bound if not _is_setter(one)]
                for name, bound in self.names.items()}  # fmt: skip
        return {name: bound[-1] for name, bound in read.items() if bound}

    @cached_property
    def methods(self) -> list[Function]:
        """The functions among the members."""
        return [one for one in self.members.values() if isinstance(one, Function)]

    @cached_property
    def annotations(self) -> dict[str, ast.expr]:
        """The annotation of each attribute that has one in the body."""
        return {one.target.id: one.annotation for one in inside(self.node)
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}  # fmt: skip

    @property
    def scope(self) -> Function | Module:
        """The scope in which names are looked up after those of the class."""
        return self.parent or self.module


@dataclass(eq=False)
class Module:
    """A file, with its classes and functions at any depth."""

    source: Source
    name: str
    is_package: bool = False
    definitions: dict[ast.AST, Function | Class] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[str, list[object]]:
        """The names that the top level binds; see `bindings`."""
        return bindings(self.source.tree, self)

    @property
    def stars(self) -> list[Imported]:
        """The ``from x import *`` statements."""
        return [one for one in self.names.get("*", ()) if isinstance(one, Imported)]

    @property
    def classes(self) -> list[Class]:
        """All classes."""
        return [one for one in self.definitions.values() if isinstance(one, Class)]


Scope = Union[Module, Class, Function]  # noqa: UP007  (an alias, for 3.10)


def last_name(node: ast.AST | None) -> str:
    """Return a name, or the part after the last dot; "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def decorator_names(node: ast.AST) -> list[str]:
    """Return the last name of each decorator of a class or function."""
    return [last_name(d.func if isinstance(d, ast.Call) else d)
            for d in getattr(node, "decorator_list", ())]  # fmt: skip


def children(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and all nodes below them, in order, without entering another scope's body."""
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, _SCOPES):
            stack += list(ast.iter_child_nodes(node))[::-1]


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in the own scope of a function, class or module, in order."""
    body = getattr(node, "body", [])
    return children(body if isinstance(body, list) else [body])


def bindings(top: ast.AST, module: Module) -> dict[str, list[object]]:
    """Return the values that a scope binds to each name, in order.

    A value is a definition, an import, an assigned expression, or None for anything else.
    """
    found: dict[str, list[object]] = {}
    values: dict[ast.AST, ast.expr | None] = {}
    for one in inside(top):
        bound: dict[str, object] = {}
        if isinstance(one, ast.Assign):
            values.update((target, one.value) for target in one.targets)
        elif isinstance(one, (ast.AnnAssign, ast.NamedExpr)):
            values[one.target] = one.value
        elif isinstance(one, ast.Name):
            if isinstance(one.ctx, ast.Store):
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
        for name, value in bound.items():
            found.setdefault(name, []).append(value)
    return found


def module_of(scope: Scope) -> Module:
    """Return the module that a scope is in, or is."""
    return scope if isinstance(scope, Module) else scope.module


def lambda_of(node: ast.Lambda, scope: Scope) -> Function:
    """Return a lambda as a function; in the body of a class it is a method."""
    owner = scope if isinstance(scope, Class) else None
    around = scope if isinstance(scope, Function) else owner.parent if owner else None
    return Function(node, module_of(scope), "lambda", owner, around)


def read_module(source: Source, name: str, *, is_package: bool) -> Module:
    """Find the classes and functions of a file, at any depth."""
    module = Module(source, name, is_package)
    todo: list[tuple[ast.AST, Class | None, Function | None]] = [(source.tree, None, None)]
    while todo:
        top, owner, function = todo.pop()
        for one in inside(top):
            if isinstance(one, _FUNCTIONS):
                made = Function(one, module, one.name, owner, function)
                module.definitions[one] = made
                todo.append((one, None, made))
            elif isinstance(one, ast.ClassDef):
                inner = Class(one, module, one.name, function, owner)
                module.definitions[one] = inner
                todo.append((one, inner, function))
    return module


def bind_arguments(
    function: Function, call: ast.Call | None, *, bound: bool
) -> dict[str, ast.expr]:
    """Return the argument, or else the constant default, of each parameter of a call.

    Args:
        function: The function that is called.
        call: The call; None if only the defaults are known.
        bound: Whether the object is passed implicitly.
    """
    bound_to: dict[str, ast.expr] = {
        k: v for k, v in function.defaults.items() if isinstance(v, ast.Constant)
    }
    if call is None:
        return bound_to
    is_open = any(isinstance(one, ast.Starred) for one in call.args)
    if is_open or any(keyword.arg is None for keyword in call.keywords):
        bound_to = {}
    names = function.parameters[1 if bound and function.self_name else 0 :]
    bound_to.update(() if is_open else zip(names, call.args, strict=False))
    bound_to.update((k.arg, k.value) for k in call.keywords if k.arg in function.all_parameters)
    return bound_to


def _is_setter(bound: object) -> bool:
    return isinstance(bound, Function) and not _NOT_READ.isdisjoint(bound.decorators)


class Assignment(NamedTuple):
    """An assignment to an attribute of the own object.

    Attributes:
        name: The attribute, as Python stores its name.
        value: The assigned expression; None if it is a part of a value.
        annotation: The annotation of the assignment.
    """

    name: str
    value: ast.expr | None = None
    annotation: ast.expr | None = None


def mangle(name: str, cls: Class | None) -> str:
    """Return a name as Python stores it: private names have the class before them."""
    if cls and name.startswith("__") and not name.endswith("__") and cls.name.strip("_"):
        return f"_{cls.name.lstrip('_')}{name}"
    return name


def unmangle(name: str, cls: Class) -> str:
    """Return a name as the source of the class has it."""
    prefix = f"_{cls.name.lstrip('_')}__"
    return name[len(prefix) - 2 :] if name.startswith(prefix) else name


def assignments_in(node: ast.AST, function: Function) -> list[Assignment]:
    """Return the assignments to attributes of the own object that a node makes in a method."""
    pairs: list[tuple[ast.AST | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    found = []
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs += [(one, None) for one in target.elts]
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == function.self_name
        ):
            annotation = getattr(node, "annotation", None)
            found.append(Assignment(mangle(target.attr, function.owner), value, annotation))
    return found
