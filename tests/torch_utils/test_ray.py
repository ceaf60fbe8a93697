"""Tests of resources in actors of a real Ray."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import IMPORT_PATH

pytestmark = [pytest.mark.slow, pytest.mark.real]

ENDINGS = """
import os, sys
import ray
from tests.support.waiting import is_there, wait_for
from torch_utils import Resource

FOLDER = sys.argv[1]

@ray.remote
class Model(Resource):
    def __init__(self, name):
        self.name = name

    def pid(self):
        self.ensure_open()
        return os.getpid()

    def leave(self):
        ray.actor.exit_actor()

    def _release(self):
        with open(os.path.join(FOLDER, self.name), "a") as file:
            file.write("released\\n")

def lost(method):
    try:
        ray.get(method.remote())
    except ray.exceptions.RayActorError:
        return
    raise AssertionError("it lives on")

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
for name in ("terminated", "left", "dropped", "killed", "shut down"):
    model = Model.remote(name)
    pid = ray.get(model.pid.remote())
    if name == "terminated":
        lost(model.__ray_terminate__)
    elif name == "left":
        lost(model.leave)
    elif name == "killed":
        ray.kill(model)
        # Without a handle it would end by itself, and release the model.
        wait_for(lambda: not is_there(pid))
    if name == "shut down":
        ray.shutdown()
    del model
    wait_for(lambda: not is_there(pid))
"""


def test_actors_release_their_models(tmp_path: Path, clean_exit: Any) -> None:
    """Ray calls __ray_shutdown__ in three actors; the two that it kills are the control."""
    pytest.importorskip("ray", reason="ray is not installed: the extra ray has it")
    (tmp_path / "released").mkdir()
    program = tmp_path / "endings.py"
    program.write_text(ENDINGS)
    environment = {"PYTHONPATH": IMPORT_PATH, "RAY_USAGE_STATS_ENABLED": "0"}
    clean_exit(
        [sys.executable, str(program), str(tmp_path / "released")],
        timeout_s=600,
        max_shutdown_s=120,
        resource_warnings=True,
        ignore=["subprocess|socket|unclosed file|unclosed event loop"],  # ray's own
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    released = {path.name: path.read_text() for path in (tmp_path / "released").iterdir()}
    in_order = ("terminated", "left", "dropped")
    assert released == dict.fromkeys(in_order, "released\n")
