"""``rag-demo``: runs a command; whatever goes wrong is one line on stderr."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TextIO

from rag_demo.errors import HOW_TO_INSTALL, RagDemoError
from rag_demo.printable import on_one_line

__all__ = ["main"]

_BROKEN_PIPE = 1  # as click has it, and the documentation of Python's signals


def main() -> NoReturn:
    """Run a command; an error is one line on stderr and exit code 2.

    Nothing is said where the reader of the output has gone away, as ``head`` does: exit code 1.
    """
    try:
        _check_torch_utils()
        # Imported here, where a Ctrl-C is no traceback any more.
        from torch_utils import is_out_of_memory

        # All files are closed by then, and the end of the process gives back the rest: nothing
        # has to walk the heap once more.
        atexit.register(gc.freeze)
        _open_streams()
        # The commands need the extra ``rag``, click first of all: without it this says so.
        from rag_demo.commands import run

        code = run(sys.argv[1:])
        sys.stdout.flush()
    except RagDemoError as error:
        _fail(str(error))
    except SystemExit:  # By a signal, which has its own exit code.
        _settle()
        raise
    except KeyboardInterrupt:
        _leave(130)
    except BrokenPipeError:
        _leave(_BROKEN_PIPE)
    except ModuleNotFoundError as error:
        _fail(f"{error}; {HOW_TO_INSTALL}")
    except ImportError as error:  # It is there, but there is no memory for it, or something else.
        _fail(f"a library cannot be loaded: {error}")
    except (MemoryError, RuntimeError) as error:
        # torch's are RuntimeErrors, and so is that of a thread which gets no memory.
        if not is_out_of_memory(error) and "can't start new thread" not in str(error):
            raise
        _fail(
            "there is not enough memory; a smaller --batch-size needs less, "
            f"and so do fewer --workers ({on_one_line(error) or type(error).__name__})"
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
        raise RagDemoError(
            f"Python finds another torch_utils at {str(found.parent)!r}; rename that folder, or "
            "remove it from PYTHONPATH and the current directory"
        )


def _open_streams() -> None:
    """See to it that there are the three streams, and that they take every character.

    Where one is closed, the next file that is opened would get its number, and what is printed.
    Writing to a closed stdout is an error, as it should be; what goes to stderr is dropped.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    streams: list[TextIO] = []
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        if stream is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        streams.append(stream)
    sys.stdout, sys.stderr = streams


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # Nobody can be told.
        sys.stderr.write(f"rag-demo: error: {on_one_line(message)}\n")
        sys.stderr.flush()
    _leave(2)


def _leave(code: int) -> NoReturn:
    _settle()
    sys.exit(code)


def _settle() -> None:
    """Prepare for the end: what cannot be written is said once, and not by the interpreter.

    Everything is closed, so a Ctrl-C from here on ends the process on the spot: as an exception
    it would come out of whatever the interpreter does at its end, with a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # In another thread none is raised.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if _unwritable(stream) is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _unwritable(stream: TextIO) -> Exception | None:
    """Return why what was printed cannot be written; None if it can."""
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        return error
    return None
