"""python -m torch_utils.clean_exit_lint."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
