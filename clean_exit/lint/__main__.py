"""Run ``python -m clean_exit.lint``."""

from __future__ import annotations

import sys

from clean_exit.lint.cli import main

if __name__ == "__main__":
    sys.exit(main())
