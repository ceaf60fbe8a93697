"""The folder of several workers' metrics: nothing stays behind, and nothing of others goes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from service_program import service

from programs import TIMEOUT_S
from rag_demo.service.metrics_folder import metrics_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no workers there")
KILLED = """
import os, signal, sys, tempfile
from rag_demo.service.metrics_folder import metrics_folder

tempfile.tempdir = sys.argv[1]
with metrics_folder() as folder:
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_what_the_killed_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while they run, and nothing that is not theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    with program:
        left = Path(program.stdout.readline().strip())
        (left / "counter_1.db").touch()
        with metrics_folder() as own:
            assert {Path(own), left} == set(tmp_path.iterdir())
        program.kill()
        program.wait(TIMEOUT_S)
    gone = f"rag-demo-metrics-{program.pid}-"
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    (tmp_path / f"{gone}link").symlink_to(elsewhere)
    (tmp_path / f"{gone}file").touch()
    (tmp_path / f"{gone}other.d").mkdir()
    (tmp_path / f"rag-demo-metrics-{os.getpid()}-me").mkdir()
    others = set(tmp_path.iterdir()) - {left}
    with metrics_folder() as own:
        assert set(tmp_path.iterdir()) == {Path(own), *others}
    assert set(tmp_path.iterdir()) == others
    assert (elsewhere / "kept").is_dir()


def test_a_folder_in_use_elsewhere_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that this one cannot see: its lock says so."""
    import rag_demo.service.metrics_folder as module

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with metrics_folder() as used:
        monkeypatch.setattr(module, "_is_there", lambda pid: False)
        with metrics_folder():
            assert Path(used).is_dir()
    (tmp_path / f"rag-demo-metrics-{os.getpid()}-left").mkdir()
    with metrics_folder() as own:  # The control.
        assert list(tmp_path.iterdir()) == [Path(own)]


@pytest.mark.parametrize("is_whole", [True, False])
def test_metrics_that_were_removed(index: Path, tmp_path: Path, is_whole: bool) -> None:
    """Are said to be; whatever else is asked is answered."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with service(index, env=environment) as served:
        assert served.search("lease")[0] == 200
        status, text = served.ask("/metrics")
        assert status == 200
        assert "rag_demo_requests_total" in text
        shutil.rmtree(folder)
        if not is_whole:
            folder.mkdir()
        status, text = served.ask("/metrics")
        assert status == 503
        assert "start the service again" in text
        assert str(tmp_path) not in text
        assert served.search("lends")[0] == 200
        assert served.ask("/admin/models/model/unload", {})[0] in (200, 404)
        assert served.ask("/admin/models/index/unload", {})[0] == 200
        assert served.search("lends")[0] == 200
        assert served.stop() == 143
