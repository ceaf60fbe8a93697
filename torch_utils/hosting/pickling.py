"""What travels between a model's process and its parent: pickles, large buffers beside them."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch_utils.errors import ModelProcessError, shown
from torch_utils.resource import add_note

__all__ = ["dump", "dump_call", "dump_error", "load_here", "load_there", "raise_error"]

Message = tuple[bytes, list[memoryview]]


def dump(value: object) -> Message:
    """Pickle a value; the memory of arrays is not copied but returned beside it.

    Raises:
        Exception: It cannot be pickled; classes raise what they like then.
    """
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return content, [buffer.raw() for buffer in buffers]


def dump_call(name: str, method: str, arguments: Any, keywords: Any) -> Message:
    """Pickle a call of a model's method.

    Raises:
        PicklingError: An argument cannot be pickled.
        MemoryError: There is no room for it.
    """
    try:
        return dump(("call", method, arguments, keywords))
    except MemoryError:
        raise
    except Exception as error:
        # Classes raise what they like when they cannot be pickled.
        raise pickle.PicklingError(
            f"{name}.{method}() runs in another process, and an argument cannot be sent there "
            f"({shown(error)}); pass plain objects, arrays, and functions and classes of a module; "
            'or use isolation="thread"'
        ) from error


def load_there(content: Any, buffers: Sequence[Any], main: Callable[[], object]) -> Any:
    """Read what the parent sent, in the model's process; ``main`` loads the main module."""
    return _Reader(content, buffers, main).load()


def load_here(content: Any, buffers: Sequence[Any] = ()) -> Any:
    """Read what the model's process sent, in its parent, which imports nothing for it.

    Raises:
        UnpicklingError: It is of a class that this process has not imported.
    """
    return _Reader(content, buffers, None).load()


class _Reader(pickle.Unpickler):
    def __init__(
        self, content: Any, buffers: Sequence[Any], main: Callable[[], object] | None
    ) -> None:
        super().__init__(io.BytesIO(content), buffers=buffers)
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        """Find a class; the model's process calls the main module by another name."""
        if self._main is not None:
            if module in ("__main__", "__mp_main__"):  # The latter where the parent is such one.
                self._main()
        elif module == "__mp_main__":
            module = "__main__"
        elif module not in sys.modules and not _is_harmless(module):
            # Otherwise an answer could bring torch, with all its memory, into this process.
            raise pickle.UnpicklingError(
                f"it contains a {module}.{name}, and this process has not imported {module}; "
                "import it here, or let the model return numpy arrays and plain objects"
            )
        return super().find_class(module, name)


def _is_harmless(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "numpy" or root in sys.stdlib_module_names


def dump_error(error: BaseException) -> tuple[bytes | None, str, str]:
    """Describe an exception to the parent: pickled if it can be, its repr, and its traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    content = None
    if isinstance(error, Exception):  # Others would end the parent, or a task of it.
        try:
            content = pickle.dumps(error)
            if type(pickle.loads(content)) is not type(error):
                content = None
        except Exception:
            # A class of the program's own, whose pickling raises what it likes.
            content = None
    return content, shown(error), text


def raise_error(name: str, content: bytes | None, said: str, text: str) -> None:
    """Raise in the parent what a model raised: as it was, or as a `ModelProcessError`."""
    where = f"in the process of {name}:\n{text.rstrip()}"
    error: BaseException | None = None
    if content is not None:
        try:
            error = load_here(content)
        except Exception as failure:
            # As above; and what this process has not imported.
            where += f"\n(it could not be brought here as it was: {shown(failure)})"
    if not isinstance(error, Exception):
        error = ModelProcessError(f"{name} raised {said}")
    add_note(error, where)
    raise error
