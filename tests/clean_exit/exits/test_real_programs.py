"""Programs that people run, each with the verdict it deserves: how they end is their own affair."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clean_exit import ExitReport, check

pytestmark = [pytest.mark.slow, pytest.mark.real]

PYTHON = sys.executable


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: What people call it, and what is special about it.
        command: Its command line; the first word is a command beside the Python, or anywhere.
        files: What it consists of.
        module: What the Python has to have.
        finding: What has to be found; nothing else may be.
        options: For `check`.
        exit_code: What clean-exit says; by default 120 if there is a finding.
    """

    name: str
    command: tuple[str, ...]
    files: dict[str, str]
    module: str = ""
    finding: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0

    def __str__(self) -> str:
        return self.name

    def run(self, folder: Path) -> ExitReport:
        if self.module and find_spec(self.module) is None:
            pytest.skip(f"{self.module} is not installed")
        places = [sysconfig.get_path("scripts"), os.environ["PATH"]]
        found = shutil.which(self.command[0], path=os.pathsep.join(places))
        if found is None:
            pytest.skip(f"{self.command[0]} is not installed")
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return check(
            [found, *self.command[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            **{"timeout_s": 600.0, "max_shutdown_s": 120.0, **self.options},
        )


# Servers, on loopback, at any free port.

TERM, INT = signal.SIGTERM, signal.SIGINT
AT_EXIT = "\nimport atexit\natexit.register(lambda: 1 / 0)\n"
HELD = "\nclass Held:\n    def __del__(self): raise ValueError('the driver is gone')\n"
ASGI = """
async def app(scope, receive, send):
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
"""
# After TERM uvicorn dies of it as soon as the server has stopped: atexit callbacks do not run.
DIRTY_ASGI = HELD + ASGI + "    Held()\n"
WSGI = """
def app(environ, start_response):
    start_response("200 OK", [])
    return [b"x"]
"""


CELERY_APP = """
from celery import Celery
app = Celery("app", broker="memory://", backend="cache+memory://")
"""
UVICORN = ("uvicorn", "app:app", "--host", "127.0.0.1", "--port", "0")
GUNICORN = ("gunicorn", "app:app", "-b", "127.0.0.1:0", "--graceful-timeout", "10")
# As root it warns, and goes on.
CELERY = ("celery", "-A", "app", "worker", "-c", "2", "-l", "INFO")
READY = {UVICORN: "Application startup complete", GUNICORN: "Booting worker", CELERY: "ready\\."}
WORKERS = ("--workers", "2")
AT_END = "\nheld = Held()\n"


def server(
    name: str, command: tuple[str, ...], *more: str, app: str, found: str = "", by: int = TERM
) -> Program:
    options = {"stop_signal": by, "stop_when": READY[command]}
    return Program(name, (*command, *more), {"app.py": app}, command[0], found, options)


SERVERS = [
    server("uvicorn-int", UVICORN, app=ASGI, by=INT),
    server("uvicorn-workers", UVICORN, *WORKERS, app=ASGI),
    server("uvicorn-dirty", UVICORN, app=ASGI + HELD + AT_END, found="unraisable", by=INT),
    server("uvicorn-dirty-workers", UVICORN, *WORKERS, app=DIRTY_ASGI, found="unraisable"),
    server("gunicorn-workers", GUNICORN, *WORKERS, app=WSGI),
    server("gunicorn-dirty", GUNICORN, app=WSGI + AT_EXIT, found="atexit-error"),
    server("celery-prefork", CELERY, app=CELERY_APP),
    server("celery-dirty", CELERY, "-P", "solo", app=CELERY_APP + AT_EXIT, found="atexit-error"),
]

# Pools of workers.

RAY = """
import ray
for tries_left in reversed(range(5)):
    try:
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000,
                 log_to_driver=False)
        break
    except Exception:  # It gives its own processes 30 s to start, on a busy machine too.
        if not tries_left: raise

@ray.remote
def double(x): return 2 * x
assert ray.get([double.remote(n) for n in range(3)]) == [0, 2, 4]
"""
JOBLIB = """
from joblib import Parallel, delayed

def double(x):
    return 2 * x

if __name__ == "__main__":
    assert Parallel(n_jobs=2)(delayed(double)(n) for n in range(4))[3] == 6
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): return torch.tensor(n)
if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="{method}",
                        persistent_workers=True)
    assert sum(int(batch.sum()) for batch in loader) == 28
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
DESTROY = "dist.destroy_process_group()\n"
TORCHRUN = ("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def script(
    name: str, source: str, module: str, command: tuple[str, ...] = (PYTHON,), found: str = ""
) -> Program:
    return Program(name, (*command, "main.py"), {"main.py": source}, module, found)


POOLS = [
    script("ray-left-to-atexit", RAY, "ray"),
    script("joblib-loky", JOBLIB, "joblib"),
    *(
        script(f"DataLoader-{method}", LOADER.format(method=method), "torch")
        for method in ("fork", "spawn", "forkserver")
        # Abandoned iterators are not among them: torch's handler of SIGCHLD races with the end.
    ),
    script("torchrun-destroyed", GROUP + DESTROY, "torch", TORCHRUN),
    script("torchrun-not-destroyed", GROUP, "torch", TORCHRUN, "process-group-not-destroyed"),
]

# Tools that run other programs, and programs that are not Python.

COVERAGE = ("coverage", "run", "--rcfile=rc", "main.py")
COVERED = {
    "main.py": "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n",
    "other.py": AT_EXIT,
    "rc": "[run]\nparallel = true\npatch = subprocess\n",
}
MAKE = ("make", "-j", "2")
MAKEFILE = f"""
all: one two three
one two:
	{PYTHON} -c 'print("$@")'
three:
	{PYTHON} three.py
	$(MAKE) one
"""
CLEAN_MAKE = {"Makefile": MAKEFILE, "three.py": "print('three')"}
DIRTY_MAKE = {"Makefile": MAKEFILE, "three.py": AT_EXIT}

TOOLS = [
    Program("coverage-dirty-subprocess", COVERAGE, COVERED, "coverage", "atexit-error"),
    Program("make-parallel-clean", MAKE, CLEAN_MAKE),
    Program("make-parallel-dirty", MAKE, DIRTY_MAKE, finding="atexit-error"),
    Program(
        "node-aborts",
        ("node", "main.js"),
        {"main.js": "process.abort()"},
        finding="crash",
        exit_code=134,
    ),
]


RAY = pytest.mark.xdist_group("ray")  # Two clusters on one machine disturb each other.


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=RAY if p.module == "ray" else ()) for p in (*SERVERS, *POOLS, *TOOLS)],
    ids=str,
)
def test_verdict(program: Program, tmp_path: Path) -> None:
    """Its finding, and nothing but that; its exit code."""
    report = program.run(tmp_path)
    said = f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"
    assert {found.id for found in report.findings} == {program.finding} - {""}, said
    assert report.exit_code == (program.exit_code or (120 if program.finding else 0)), said
