"""Count the models that a program makes and releases, process by process, without changing it.

A sitecustomize on its path, which every Python of the program runs, watches `EmbeddingModel`:
each that is made has to be released, by the `_release` that a subclass of `Resource` overrides.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.support.programs import IMPORT_PATH, ROOT

WATCHER = """
import os
from torch_utils import Resource

FOLDER = {folder!r}
watched = Resource.__init_subclass__.__func__


def note(what, self):
    with open(os.path.join(FOLDER, what), "a") as file:
        file.write(f"{{os.getpid()}} {{id(self)}}\\n")


def init_subclass(cls, **kwargs):
    watched(cls, **kwargs)
    if cls.__name__ == "EmbeddingModel":
        make, release = cls.__init__, cls._release

        def __init__(self, *arguments, **options):
            note("made", self)
            make(self, *arguments, **options)

        def _release(self):
            note("released", self)
            release(self)

        cls.__init__, cls._release = __init__, _release


Resource.__init_subclass__ = classmethod(init_subclass)
"""


def environment(tmp_path: Path) -> dict[str, str]:
    """Return what a program is started with, so that its models are counted in a folder."""
    hooks, counts = tmp_path / "hooks", tmp_path / "counts"
    hooks.mkdir()
    counts.mkdir()
    (hooks / "sitecustomize.py").write_text(WATCHER.format(folder=str(counts)))
    path = os.pathsep.join([str(hooks), str(tmp_path), str(ROOT / "examples"), IMPORT_PATH])
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **quiet, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}


def problems(tmp_path: Path, *, models: int = 1) -> list[str]:
    """List the models that were not released exactly once in the process that made them."""
    made, released = (
        Counter(path.read_text().splitlines()) if path.exists() else Counter()
        for path in (tmp_path / "counts" / "made", tmp_path / "counts" / "released")
    )
    # By their ids, which a later object may have too: so by their number.
    found = [
        f"process and id {name}: {count} made, {released[name]} released"
        for name, count in made.items()
        if released[name] != count
    ]
    count = made.total()
    return found if count == models else [*found, f"{count} models were made, not {models}"]
