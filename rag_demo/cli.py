"""``rag-demo``: runs a command, and prints an error as one line on stderr."""

from __future__ import annotations

import atexit
import gc
import io
import sys
from typing import NoReturn

from rag_demo.errors import RagDemoError, advice
from rag_demo.printable import on_one_line


def main() -> NoReturn:
    """Run a command. An error is one line on stderr and exit code 2; Ctrl-C is exit code 130."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # Names of files may have any bytes.
                stream.reconfigure(errors="backslashreplace")
        # Imported inside the block, where Ctrl-C shows no traceback.
        from torch_utils import is_out_of_memory

        # All files are closed at exit, so a last garbage collection would only take time.
        atexit.register(gc.freeze)
        # Without the extra ``rag`` this raises ModuleNotFoundError for click.
        from rag_demo.commands import run

        sys.exit(run(sys.argv[1:]))
    except (RagDemoError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        _fail(f"{error}; {advice(error)}")
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for lack of memory.
        if not is_out_of_memory(error):
            raise
        _fail(f"there is not enough memory; use a smaller --batch-size ({error})")


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"rag-demo: error: {on_one_line(message)}\n")
    sys.exit(2)
