"""``python -m torch_utils.clean_exit``."""

import sys

from .cli import main

sys.exit(main())
