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
    if events is None:  # The environment is the program's again, but sys.path as at the start.
        _note_interpreter()
        _forget(here)
        return
    original = os.environ.pop("CLEAN_EXIT_PYTHONPATH", None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    probe = None
    if events and sys.version_info >= OLDEST:
        import clean_exit_probe as probe
    _forget(here)
    if probe is not None:
        try:
            probe.install(events, here)
        except Exception:  # A Python without what it needs: it is not seen from inside.
            pass


def _forget(here):
    for name in [name for name in sys.modules if name.startswith("clean_exit_")]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)


def _note_interpreter():
    """Record that this is a second interpreter, whose errors the probe does not see."""
    for number in range(250, 260):  # As the probe numbers its own.
        try:
            path = os.readlink("/proc/self/fd/%d" % number)
            if path.endswith("/events") and "/clean-exit-" in path:
                entry = ("interpreter", os.getpid(), 0.0, "main")
                os.write(number, (repr(entry) + "\n").encode())
                return
        except (OSError, AttributeError):
            pass  # Not open; or not Linux.
