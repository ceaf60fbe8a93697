"""The rules: each looks at places of a kind, and says what is wrong with one, or nothing.

What the places have in common is the frame: the function on the way from a destructor, and what
is known there. The rules of `SITES` look at calls anywhere in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clean_exit.lint.rules import (
    bare_except,
    coroutines,
    device,
    explicit_call,
    global_names,
    half_built,
    imports,
    keeping,
    log,
    raising,
    register,
    wait,
)

Rules = Sequence[tuple[str, Callable[..., str]]]

STATEMENTS: Rules = (
    ("import", imports.on_statement),
    ("raise", raising.on_statement),
    ("async", coroutines.on_statement),
    ("bare-except", bare_except.on_statement),
)
CALLS: Rules = (
    ("import", imports.on_call),
    ("wait", wait.on_call),
    ("device", device.on_call),
    ("log", log.on_call),
    ("register", register.on_call),
    ("async", coroutines.on_call),
)
NAMES: Rules = (("global", global_names.on_name),)
ATTRIBUTES: Rules = (("half-built", half_built.on_attribute),)
WITHS: Rules = (("wait", wait.on_with), ("bare-except", bare_except.on_with))
SITES: Rules = (
    ("explicit-call", explicit_call.on_site),
    ("finalize-keeps-alive", keeping.finalize_keeps_alive),
    ("atexit-keeps-alive", keeping.atexit_keeps_alive),
)
