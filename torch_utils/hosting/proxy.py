"""What a lease of a model in another process lends: an object whose methods run there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

__all__ = ["Proxy"]


class Proxy:
    """Stands for a model in another process, as long as its lease.

    Methods, the call itself and the values of attributes travel, pickled; an attribute cannot be
    set. One call at a time runs there; further ones wait.

    Args:
        ask: Makes a call: ("call", name, ...) or ("get", name).
        methods: What is known to be a method.
        what: Describes it.
    """

    __slots__ = ("_ask", "_methods", "_what")

    def __init__(self, ask: Callable[..., Any], methods: frozenset[str], what: str) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_methods", methods)
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self._what} answers to no {name}")
        if name in self._methods:
            return partial(self._ask, "call", name)
        can_be_called, value = self._ask("get", name)
        return partial(self._ask, "call", name) if can_be_called else value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model itself."""
        return self._ask("call", "__call__", *arguments, **keywords)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name!r} cannot be set on {self._what}: call a method of the model that does it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self._what} cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<{self._what}>"
