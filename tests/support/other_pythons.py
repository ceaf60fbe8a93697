"""Find the other Pythons of this machine, from 3.11 on."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)


@functools.lru_cache
def other_pythons() -> dict[str, str]:
    """Return the path of one interpreter for each other minor version, by its name."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    # By the names of their folders, such as 3.11.7, those that cannot be wanted are not started.
    candidates = {
        str(path): ".".join(path.parts[-3].split(".")[:2])
        for path in sorted(pyenv.glob("3.1[1-9]*/bin/python"))
    }
    for n in range(OLDEST[1], 20):
        candidates |= {path: f"3.{n}" for path in [shutil.which(f"python3.{n}")] if path}
    this = f"3.{sys.version_info.minor}"
    found: dict[str, str] = {}
    for path, promised in candidates.items():
        if promised == this or promised in found:
            continue  # A shim, which is slow to start.
        done = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            continue  # A shim for a version that is not selected here.
        version = tuple(map(int, done.stdout.split()))
        if version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(".".join(map(str, version)), path)
    return found
