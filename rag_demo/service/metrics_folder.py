"""The folder in which several workers keep their metrics: made, kept, and removed by one of them.

A supervisor that is killed leaves it behind; the next one removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["metrics_folder"]

_NAME = re.compile(r"rag-demo-metrics-(\d{1,10})-\w+")


@contextlib.contextmanager
def metrics_folder() -> Iterator[str]:
    """Make one in the folder for temporary files, after those that the killed have left there.

    It is locked as long as it is used, which systemd-tmpfiles respects as well.
    """
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            _remove_if_left(path)
    with tempfile.TemporaryDirectory(prefix=f"rag-demo-metrics-{os.getpid()}-") as folder:
        descriptor = _locked(folder)
        try:
            yield folder
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _remove_if_left(path: Path) -> None:
    """Remove a folder whose name, owner, process and lock say that it is of one that was killed.

    The lock too, for who has another namespace of processes, but the same folder.
    """
    found = _NAME.fullmatch(path.name)
    if found is None or _is_there(int(found[1])):
        return
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            descriptor = _locked(path)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # Somebody else's; or no process has such a number.
        return True
    return True


def _locked(folder: str | Path) -> int | None:
    """Return what holds a lock on it until it is closed; None where there is none to be had."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
