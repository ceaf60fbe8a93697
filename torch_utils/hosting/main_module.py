"""The program's main module, in another process: for what was defined in it.

Like `multiprocessing` does when it spawns: the module is run once more, as ``__mp_main__``, and
only if something that arrives was defined in it. A program that does not guard its start with
``if __name__ == "__main__"`` is stopped where it would start a model's process itself; what it
has defined until then is there.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["MainModule", "StopMain", "find_main"]

Where = tuple[str, str]  # "file", "module" or "code", and which


def find_main() -> Where | None:
    """Say where this process's main module comes from; None in an interactive session."""
    if MainModule.where is not None:
        return MainModule.where  # Of the program, whose process this is a child of.
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    file = getattr(main, "__file__", None)
    if file is not None and Path(file).is_file():  # A program that is piped in is "<stdin>".
        return "file", str(Path(file).resolve())
    if sys.argv[:1] == ["-c"] and "-c" in sys.orig_argv:
        return "code", sys.orig_argv[sys.orig_argv.index("-c") + 1]
    return None


class StopMain(BaseException):
    """Ends the main module's run in another process, before it starts what runs already."""


class MainModule:
    """The main module of the parent, in its child: run when it is first needed."""

    is_running = False
    where: Where | None = None

    def __init__(self, where: Where | None) -> None:
        self._where = MainModule.where = where
        self._is_there = False

    def __call__(self) -> None:
        """Run it, if that has not happened yet."""
        if self._is_there or self._where is None:
            return
        self._is_there = True
        main = ModuleType("__mp_main__")
        code = _prepare(main, *self._where)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        MainModule.is_running = True
        try:
            exec(code, main.__dict__)
        except (StopMain, SystemExit):
            pass  # Its start is not guarded: what it has defined before that is enough.
        finally:
            MainModule.is_running = False


def stop_main() -> None:
    """End the main module's run here, if this is one in another process."""
    if MainModule.is_running:
        raise StopMain


def _prepare(main: Any, kind: str, which: str) -> CodeType:
    if kind == "module":
        spec = find_spec(which)
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None:
            raise ImportError(f"the main module {which} cannot be found again")
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        code: CodeType = loader.get_code(which)
        return code
    if kind == "file":
        main.__file__ = which
        return compile(Path(which).read_bytes(), which, "exec")
    return compile(which, "<string>", "exec")
