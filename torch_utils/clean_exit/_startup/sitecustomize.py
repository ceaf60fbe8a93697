"""Load the probe of clean-exit, then the program's own sitecustomize, as if this were not here.

Kept to what every Python understands, for any of them may be started with this folder in front
of its PYTHONPATH.
"""

import os
import sys

import clean_exit_entry

clean_exit_entry.enter(os.path.dirname(os.path.abspath(__file__)))
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401 - the program's, if it has one
except ImportError as error:
    if getattr(error, "name", None) != "sitecustomize":
        raise
    # The import system expects something there; the probe takes it away before the program runs.
    sys.modules["sitecustomize"] = _own
