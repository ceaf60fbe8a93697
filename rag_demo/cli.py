"""``rag-demo``: runs a command, and prints an error as one line on stderr."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TextIO

from rag_demo.errors import HOW_TO_INSTALL, RagDemoError
from rag_demo.printable import on_one_line

_BROKEN_PIPE = 1  # as in click and in the documentation of Python's signals


def main() -> NoReturn:
    """Run a command. An error is one line on stderr and exit code 2.

    If the reader of the output has gone away, as ``head`` does, the exit code is 1.
    """
    try:
        _check_torch_utils()
        # Imported inside the block, where Ctrl-C shows no traceback.
        from torch_utils import is_out_of_memory

        # All files are closed at exit, so a last garbage collection would only take time.
        atexit.register(gc.freeze)
        sys.stdin = sys.stdin or io.TextIOWrapper(io.BytesIO())  # It may be closed.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # Names of files may have any bytes.
                stream.reconfigure(errors="backslashreplace")
        # Without the extra ``rag`` this raises ModuleNotFoundError for click.
        from rag_demo.commands import run

        code = run(sys.argv[1:])
        sys.stdout.flush()
    except RagDemoError as error:
        _fail(str(error))
    except SystemExit:  # A signal has its own exit code.
        _settle()
        raise
    except KeyboardInterrupt:
        _leave(130)
    except BrokenPipeError:
        _leave(_BROKEN_PIPE)
    except ModuleNotFoundError as error:
        _fail(f"{error}; {HOW_TO_INSTALL}")
    except ImportError as error:  # For lack of memory, for example.
        _fail(f"a library cannot be loaded: {error}")
    except (MemoryError, RuntimeError) as error:
        # torch raises RuntimeError for lack of memory, and so does a thread that cannot start.
        if not is_out_of_memory(error) and "can't start new thread" not in str(error):
            raise
        _fail(
            "there is not enough memory; use a smaller --batch-size "
            f"({on_one_line(error) or type(error).__name__})"
        )
    except OSError as error:
        if error.filename is not None:
            _fail(f"{error.strerror or error}: {error.filename!r}")
        is_output = _unwritable(sys.stdout) is not None
        _fail(f"{'the output' if is_output else 'a file'} cannot be written or read: {error}")
    _leave(code)


def _check_torch_utils() -> None:
    """Refuse a package of the same name, which other projects have too."""
    spec = find_spec("torch_utils")
    found = Path(spec.origin or "") if spec is not None else Path()
    if found.parent.resolve() != Path(__file__).resolve().parents[1] / "torch_utils":
        other = found.parent if found.name == "__init__.py" else found
        raise RagDemoError(
            f"Python finds another torch_utils at {str(other)!r}; rename it, or remove its folder "
            "from PYTHONPATH and the current directory"
        )


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed or full.
        sys.stderr.write(f"rag-demo: error: {on_one_line(message)}\n")
        sys.stderr.flush()
    _leave(2)


def _leave(code: int) -> NoReturn:
    _settle()
    sys.exit(code)


def _settle() -> None:
    """Prepare for exit, so that the interpreter prints no further error.

    Everything is closed, so Ctrl-C may end the process at once. As an exception, it would show a
    traceback from the interpreter's shutdown.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # Only the main thread may set a handler.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if _unwritable(stream) is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _unwritable(stream: TextIO) -> Exception | None:
    """Return why the output cannot be written, or None."""
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        return error
    return None
