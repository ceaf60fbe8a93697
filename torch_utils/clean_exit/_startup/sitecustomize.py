"""Load the probe of clean-exit, then the program's own sitecustomize, as if this were not here.

Kept to what every Python understands, for any of them may be started with this folder in front
of its PYTHONPATH.
"""

import sys


def _start():
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    events = os.environ.pop("CLEAN_EXIT_EVENTS", None)
    original = os.environ.pop("CLEAN_EXIT_PYTHONPATH", None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    if events and sys.version_info >= (3, 9):
        import clean_exit_probe

        del sys.modules["clean_exit_probe"]
        clean_exit_probe.install(events)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)


_start()
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401 - the program's, if it has one
except ImportError as error:
    if getattr(error, "name", None) != "sitecustomize":
        raise
    # The import system expects something there; the probe takes it away before the program runs.
    sys.modules["sitecustomize"] = _own
