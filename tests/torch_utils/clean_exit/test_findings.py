"""What the report says, and findings that no program can show here."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hazards.pythons import other_pythons
from torch_utils.clean_exit import FINDINGS, Finding, check
from torch_utils.clean_exit.gpu import memory_of_processes

CATALOGUE = Path(__file__).parents[3] / "docs" / "catalogue.md"


class NVML(types.ModuleType):
    """A stand-in for pynvml: one GPU, on which every process of this machine holds 1 MB."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self._driver = driver

    def nvmlInit(self) -> None:
        if not self._driver:
            raise self.NVMLError

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in pids]


def test_gpu_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what outlived the program, and by no other process."""
    monkeypatch.setitem(sys.modules, "pynvml", NVML())
    report = check(["sh", "-c", "sleep 60 &"])
    assert [finding.id for finding in report.findings] == ["left-over-process", "gpu-memory-held"]
    assert report.findings[0].pid == report.findings[1].pid
    assert "1.0 MB by process" in report.findings[1].summary
    assert check(["sh", "-c", "sleep 0.1 & wait"]).clean


@pytest.mark.parametrize("module", [None, NVML(driver=False)])
def test_without_nvml(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    """Neither pynvml nor a driver is needed."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert memory_of_processes() == {}


def test_hang_shows_every_thread() -> None:
    """Where each of them is, and that nothing is left of it afterwards."""
    program = """
import subprocess, threading, time
def wait_for_queue(): time.sleep(60)
threading.Thread(target=wait_for_queue).start()
subprocess.Popen(["sleep", "63.5"])
def main(): time.sleep(60)
main()
"""
    report = check(["-c", program], timeout_s=6)
    assert report.timed_out
    (finding,) = report.findings
    assert "in wait_for_queue" in finding.evidence
    assert "in main" in finding.evidence
    table = subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert "63.5" not in table


def test_crash_shows_the_stack() -> None:
    """Where the program's own faulthandler writes it."""
    report = check(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-c",
            "import ctypes\ndef inner(): ctypes.string_at(0)\ninner()",
        ]
    )
    assert report.returncode == -11
    assert report.exit_code == 139
    assert "in inner" in report.findings[0].evidence
    assert report.findings[0].summary == "SIGSEGV ended it"


def test_slow_shutdown_shows_where() -> None:
    """The time of each phase, and the stack when it had taken too long."""
    program = "import atexit, time\ndef flush(): time.sleep(1.5)\natexit.register(flush)"
    report = check(["-c", program], max_shutdown_s=0.5)
    took = re.search(r"atexit callbacks: ([\d.]+)", report.findings[0].evidence)
    assert took is not None
    assert "in flush" in report.findings[0].evidence
    assert report.shutdown_s is not None
    assert 1.4 < float(took[1]) <= report.shutdown_s + 0.1  # Both are rounded.


@pytest.mark.slow
def test_real_process_group() -> None:
    """With torch's own: the default backend for the CPU says nothing when it is forgotten."""
    program = """
import tempfile, torch.distributed as dist
store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
"""
    # On a busy machine torch takes many seconds to go away.
    dirty = check(["-c", program], max_shutdown_s=600)
    assert [finding.id for finding in dirty.findings] == ["process-group-not-destroyed"]
    assert check(["-c", program + "dist.destroy_process_group()"], max_shutdown_s=600).clean


def test_not_python() -> None:
    """A shell, with and without a fault."""
    assert check(["sh", "-c", "echo hello; exit 0"]).stdout == "hello\n"
    report = check(["sh", "-c", "kill -SEGV $$"])
    assert (report.probed, report.returncode) == (False, -11)
    assert report.shutdown_s is None


def test_inside_of_another() -> None:
    """A checker under a checker: each sees its own."""
    inner = [sys.executable, "-m", "torch_utils.clean_exit", "-q", "--", "sh", "-c", "sleep 60 &"]
    report = check(inner)
    assert (report.clean, report.returncode) == (True, 120)


def test_bad_arguments() -> None:
    """One clear error, before anything is started."""
    for wrong, said in (
        ({"command": []}, "no command"),
        ({"command": "true", "timeout_s": 0}, "more than 0"),
        ({"command": "true", "stop_signal": 15}, "one of stop_after_s and stop_when"),
        ({"command": "true", "stop_after_s": 1}, "one of stop_after_s and stop_when"),
        ({"command": "true", "ignore": ["("]}, "not a regular expression"),
    ):
        with pytest.raises(ValueError, match=said):
            check(**wrong)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        check(["no-such-command-here"])
    with pytest.raises(ValueError, match="there is no finding"):
        Finding("no-such-finding", "")


def test_catalogue_explains_every_finding() -> None:
    """Each report's link leads to a section, and there is none for what does not exist."""
    headings = [line[3:] for line in CATALOGUE.read_text().splitlines() if line.startswith("## ")]
    assert [name for name in headings if name in FINDINGS] == list(FINDINGS)


@pytest.mark.slow
def test_oldest_python_runs_the_checker() -> None:
    """It needs the standard library only, of each Python from 3.10 on."""
    for python in other_pythons().values():
        command = [python, "-m", "torch_utils.clean_exit", "-q", python, "-c", "print(1)"]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)
