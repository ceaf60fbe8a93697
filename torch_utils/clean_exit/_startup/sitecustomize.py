"""Load the probe of clean-exit, then the program's own sitecustomize, as if this were not here.

Kept to what every Python understands, for any of them may be started with this folder in front
of its PYTHONPATH.
"""

import os
import sys

import clean_exit_entry

clean_exit_entry.enter(os.path.dirname(os.path.abspath(__file__)))
del sys.modules["sitecustomize"]
# Where the program has none, this raises what site expects in that case, and nothing is left.
import sitecustomize  # noqa: E402, F401 - the program's own
