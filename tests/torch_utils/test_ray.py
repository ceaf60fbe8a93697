"""Tests of resources in actors of a real Ray."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import IMPORT_PATH

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.xdist_group("ray")]

ENDINGS = """
import os, sys
import ray
from tests.support.waiting import is_there, wait_for
from torch_utils import Resource
FOLDER = sys.argv[1]

class Weights(Resource):
    def __init__(self, name):
        self.name = name
    def _release(self):
        with open(os.path.join(FOLDER, self.name), "a") as file:
            file.write("released\\n")

@ray.remote
class Model:
    def __init__(self, name):
        self.weights = Weights(name)
    def __ray_shutdown__(self):
        self.weights.close()
    def pid(self):
        return os.getpid()
    def leave(self):
        ray.actor.exit_actor()

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
for name in ("terminated", "left", "dropped", "killed", "shut down"):
    model = Model.remote(name)
    pid = ray.get(model.pid.remote())
    if name == "terminated":
        model.__ray_terminate__.remote()
    elif name == "left":
        model.leave.remote()
    elif name == "killed":
        ray.kill(model)
    elif name == "shut down":
        ray.shutdown()
    if name != "dropped":  # Without a handle each would end by itself, and release the model.
        wait_for(lambda: not is_there(pid))
    del model
    wait_for(lambda: not is_there(pid))
"""


def test_actors_release_their_models(tmp_path: Path, clean_exit: Any) -> None:
    """Ray calls __ray_shutdown__ in three actors; the two that it kills are the control."""
    pytest.importorskip("ray", reason="ray is not installed: the extra ray has it")
    (tmp_path / "released").mkdir()
    (tmp_path / "endings.py").write_text(ENDINGS)
    clean_exit(
        [sys.executable, "endings.py", str(tmp_path / "released")],
        timeout_s=600,
        max_shutdown_s=120,
        resource_warnings=True,
        ignore=["subprocess|socket|unclosed file|unclosed event loop"],  # ray's own
        env={**os.environ, "PYTHONPATH": IMPORT_PATH, "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=tmp_path,
    )
    released = {path.name: path.read_text() for path in (tmp_path / "released").iterdir()}
    assert released == dict.fromkeys(("terminated", "left", "dropped"), "released\n")
