"""Run ``python -m clean_exit``."""

import sys

from clean_exit.cli import main

if __name__ == "__main__":
    sys.exit(main())
