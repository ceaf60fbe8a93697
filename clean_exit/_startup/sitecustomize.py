"""Load the probe of clean-exit, then the program's own sitecustomize if it has one.

Any version of Python may load this file, so it uses old syntax only. The environment variables
stay, so that child processes load the probe too.
"""

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
events = os.environ.get("CLEAN_EXIT_EVENTS")
try:
    if events and sys.version_info >= (3, 9):
        import clean_exit_probe

        seconds, events = events.split(":", 1)
        clean_exit_probe.install(events, float(seconds))
except Exception:  # This Python lacks something that the probe needs.
    pass
sys.path[:] = [entry for entry in sys.path if entry != here]
sys.path_importer_cache.pop(here, None)
del sys.modules["sitecustomize"]
# If the program has none, this raises the ImportError that site expects.
import sitecustomize  # noqa: E402, F401 - the program's own
