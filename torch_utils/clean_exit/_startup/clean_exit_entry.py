"""The way into a program: load the probe, and leave no trace of how it came.

Kept to what every Python understands, for any of them may be started with this folder in front
of its PYTHONPATH.
"""

import os
import sys

OLDEST = (3, 9)  # that the probe is written for


def enter(here):
    """Install the probe, and make the environment and sys.path what they would be without it."""
    events = os.environ.pop("CLEAN_EXIT_EVENTS", None)
    original = os.environ.pop("CLEAN_EXIT_PYTHONPATH", None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    probe = None
    if events and sys.version_info >= OLDEST:
        import clean_exit_probe as probe
    for name in [name for name in sys.modules if name.startswith("clean_exit_")]:
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    if probe is not None:
        try:
            probe.install(events, here)
        except Exception:  # A Python without what it needs: it is not seen from inside.
            pass
