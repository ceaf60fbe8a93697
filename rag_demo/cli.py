"""``rag-demo``: runs a command; whatever goes wrong is one line on stderr."""

from __future__ import annotations

import sys
from typing import NoReturn

from rag_demo.errors import HOW_TO_INSTALL, RagDemoError
from torch_utils import fast_exit

__all__ = ["main"]


def main() -> NoReturn:
    """Run a command; an error is one line on stderr and exit code 2."""
    fast_exit()  # Everything is closed by then; nothing has to walk the heap once more.
    try:
        # The commands need the extra ``rag``, click first of all: without it this says so.
        from rag_demo.commands import run

        code = run(sys.argv[1:])
    except RagDemoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        _fail(f"{error}; {HOW_TO_INSTALL}")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    sys.exit(code)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"rag-demo: error: {' '.join(message.split())}\n")
    sys.exit(2)
