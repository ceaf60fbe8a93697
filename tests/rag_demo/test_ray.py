"""Embedding in actors of a real Ray: endings, kills, a lost node, errors of one line."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_demo import FaissRetriever
from tests.support.programs import IMPORT_PATH, run
from tests.support.rag_command import IMPORT_MAIN, fail, search, succeed, write_lines
from tests.support.small_collections import Hashed
from tests.support.waiting import is_there, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.xdist_group("ray")]
pytest.importorskip("ray", reason="ray is not installed: see CONTRIBUTING.md")

ENDLESS, ON_NODES = 10**6, 6_000
"""Numbers of texts of a run that is disturbed after its first progress."""
PROGRAM = Path(__file__).parents[1] / "support" / "ray_program.py"


class Run:
    """The program of `support.ray_program`, and what its actors wrote."""

    def __init__(self, folder: Path, count: int, *, address: str = "", kind: str = "") -> None:
        self.out, self.records = folder / "index", folder / "records"
        self.records.mkdir(exist_ok=True)
        command = [sys.executable, str(PROGRAM), str(self.out), address, str(count), kind]
        environment = {"PYTHONPATH": IMPORT_PATH, "RECORDS": str(self.records)}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "WAIT_S": "0.02"},
            start_new_session=True,
        )
        if count >= ON_NODES:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()  # Its first progress.
            assert line.strip().isdigit(), self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stdout, stderr

    def releases(self) -> list[str]:
        return sorted(path.read_text() for path in self.records.iterdir())

    def pids(self) -> list[int]:
        return [int(path.name) for path in self.records.iterdir()]

    def ids(self) -> set[str]:
        with FaissRetriever(Hashed()) as retriever:
            retriever.load(self.out)
            return set(retriever.ids())


def folders_of_ray() -> set[Path]:
    return {*Path("/tmp").glob("rag-demo-ray-*"), *Path("/dev/shm").glob("*ray*")}


@pytest.mark.parametrize("how", ["end", "error", "SIGTERM", "SIGINT"])
def test_models_are_released_once_however_the_run_ends(how: str, tmp_path: Path) -> None:
    before = folders_of_ray()
    endless = how.startswith("SIG")
    run = Run(tmp_path, ENDLESS if endless else 400, kind="error" if how == "error" else "")
    if endless:
        os.kill(run.process.pid, getattr(signal, how))
    code, _, stderr = run.end()
    assert run.releases() == ["released\n"] * 2, stderr
    assert not [pid for pid in run.pids() if is_there(pid)]
    assert folders_of_ray() <= before
    if endless:
        assert code == (143 if how == "SIGTERM" else -signal.SIGINT), stderr
        assert "SIGABRT" not in stderr
    elif how == "end":
        assert (code, stderr) == (0, ""), stderr
        assert run.ids() == {f"d{n}" for n in range(400)}
    else:
        assert code == 1
        assert "this text cannot be embedded" in stderr.splitlines()[-1]


def test_killed_driver_leaves_no_actor_and_the_next_run_continues(tmp_path: Path) -> None:
    run = Run(tmp_path, ENDLESS)
    pids = run.pids()
    assert [pid for pid in pids if is_there(pid)]
    run.process.kill()
    run.end()
    wait_for(lambda: not [pid for pid in pids if is_there(pid)])
    indexed = len(run.ids())
    assert indexed
    again = Run(tmp_path, indexed + 40)
    code, stdout, stderr = again.end()
    assert code == 0, stderr
    assert f"done 40 {indexed}" in stdout


def test_loss_of_all_actors_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, ENDLESS)
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)
    code, _, stderr = run.end()
    assert code == 1
    assert "all actors are lost; run the same command again" in stderr.splitlines()[-1]
    assert run.ids()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of one node, which hands this environment to its actors."""
    from ray.cluster_utils import Cluster

    for name, value in (("RECORDS", tmp_path / "records"), ("WAIT_S", 0.3)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    yield found
    found.shutdown()


def test_texts_of_a_lost_node_go_to_the_others(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    run = Run(tmp_path, ON_NODES, address=cluster.address)
    cluster.remove_node(node, allow_graceful=False)
    code, stdout, stderr = run.end()
    assert code == 0, stderr
    assert f"done {ON_NODES} 0" in stdout
    assert stderr.count("\n") <= 2, stderr  # Ray's own report has 45 lines.
    assert run.ids() == {f"d{n}" for n in range(ON_NODES)}
    assert run.releases() == ["", "released\n"]  # One was killed with its node.


def test_command_embeds_on_ray_and_starts_nothing_in_vain(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    lines = write_lines(tmp_path / "lines.jsonl", [{"text": f"text {n}"} for n in range(50)])
    options = ("--model", tiny_model)
    succeed("index", lines, "--out", tmp_path / "here", *options, "--no-cache")
    on_ray = ("index", lines, "--out", tmp_path / "ray", *options)
    result = run(f"{IMPORT_MAIN}; main()", *map(str, on_ray), "--actors", "1")
    assert result.returncode == 0 and "indexed 50 texts" in result.stdout, str(result)
    answers = []
    for name in ("here", "ray"):
        (found,) = search(tmp_path / name, "text 7", "--mode", "dense", "--top-k", "50")
        answers.append([(each["id"], round(each["score"], 4)) for each in found["results"]])
    assert answers[0] == answers[1]
    unchanged = succeed(*on_ray, "--address", "127.0.0.1:1")  # No cluster is needed.
    assert "50 of them unchanged" in unchanged
    shutil.rmtree(tmp_path / "ray")
    assert "pass a smaller --actors" in fail(*on_ray, "--actors", "1000")
    assert "Ray cannot be used" in fail(*on_ray, "--address", "127.0.0.1:1")
