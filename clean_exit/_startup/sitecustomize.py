"""Load the probe of clean-exit, then the program's own sitecustomize, if it has one.

Kept to what every Python understands, for any of them may be started with this folder in front
of its PYTHONPATH. The variables stay: the Python programs that this one starts load the probe too.
"""

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
events = os.environ.get("CLEAN_EXIT_EVENTS")
try:
    if events and sys.version_info >= (3, 9):
        import clean_exit_probe

        clean_exit_probe.install(events)
except Exception:  # A Python without what the probe needs: it is not seen from inside.
    pass
sys.path[:] = [entry for entry in sys.path if entry != here]
sys.path_importer_cache.pop(here, None)
del sys.modules["sitecustomize"]
# Where the program has none, this raises what site expects in that case.
import sitecustomize  # noqa: E402, F401 - the program's own
