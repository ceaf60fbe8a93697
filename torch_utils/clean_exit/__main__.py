"""``python -m torch_utils.clean_exit``."""

import sys

from torch_utils.clean_exit.cli import main

sys.exit(main())
