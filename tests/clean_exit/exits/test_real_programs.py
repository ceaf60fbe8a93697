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
        group: What has to be installed, by the name that people know.
        name: What is special about it.
        command: Its command line; the first word is a command beside the Python, or anywhere.
        files: What it consists of.
        finding: What has to be found; nothing else may be.
        exit_code: What clean-exit says.
        options: For `check`.
        modules: What the Python has to have.
    """

    group: str
    name: str
    command: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    finding: str = ""
    exit_code: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}-{self.name}"

    def missing(self) -> str:
        """Name what is not installed, or nothing."""
        absent = [name for name in self.modules if find_spec(name) is None]
        if find_command(self.command[0]) is None:
            absent.append(f"the command {self.command[0]}")
        return ", ".join(absent)

    def run(self, folder: Path) -> ExitReport:
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return check(
            [find_command(self.command[0]) or "", *self.command[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            **{"timeout_s": 600.0, "max_shutdown_s": 120.0, **self.options},
        )


def find_command(name: str) -> str | None:
    """Find a command, beside the Python first."""
    places = [sysconfig.get_path("scripts"), os.environ["PATH"]]
    return shutil.which(name, path=os.pathsep.join(places))


def dirty(found: str) -> dict[str, Any]:
    """Say what is found in a program that says 0 itself."""
    return {"finding": found, "exit_code": 120}


# Servers, on loopback, at any free port.

TERM: dict[str, Any] = {"stop_signal": signal.SIGTERM}
INT: dict[str, Any] = {"stop_signal": signal.SIGINT}
AT_EXIT = "\nimport atexit\natexit.register(lambda: 1 / 0)\n"
HELD = "\nclass Held:\n    def __del__(self): raise ValueError('the driver is gone')\n"
ASGI = """
from contextlib import asynccontextmanager

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


def uvicorn(name: str, *options: str, app: str = ASGI, **more: Any) -> Program:
    command = ("uvicorn", "app:app", "--host", "127.0.0.1", "--port", "0", *options)
    more["options"] = {**more["options"], "stop_when": "Application startup complete"}
    return Program("uvicorn", name, command, {"app.py": app}, modules=("uvicorn",), **more)


def gunicorn(name: str, *options: str, app: str = WSGI, **more: Any) -> Program:
    command = ("gunicorn", "-b", "127.0.0.1:0", "--graceful-timeout", "10", *options, "app:app")
    more["options"] = {**TERM, "stop_when": "Booting worker"}
    return Program("gunicorn", name, command, {"app.py": app}, modules=("gunicorn",), **more)


CELERY_APP = """
from celery import Celery
app = Celery("app", broker="memory://", backend="cache+memory://")
"""


def celery(name: str, pool: str, app: str = CELERY_APP, **more: Any) -> Program:
    command = ("celery", "-A", "app", "worker", "-P", pool, "-c", "2", "-l", "INFO")
    more["options"] = {**TERM, "stop_when": "ready\\.", "max_shutdown_s": 30}
    # As root it warns, and goes on.
    return Program("celery", name, command, {"app.py": app}, modules=("celery",), **more)


WORKERS = ("--workers", "2")
AT_END = "\nheld = Held()\n"
SERVERS = [
    uvicorn("int", options=INT),
    uvicorn("workers-term", *WORKERS, options=TERM),
    uvicorn("dirty", app=ASGI + HELD + AT_END, options=INT, **dirty("unraisable")),
    uvicorn("dirty-workers", *WORKERS, app=DIRTY_ASGI, options=TERM, **dirty("unraisable")),
    gunicorn("workers-term", "-w", "2"),
    gunicorn("dirty-in-worker", app=WSGI + AT_EXIT, **dirty("atexit-error")),
    celery("prefork-term", "prefork"),
    celery("dirty-atexit", "solo", CELERY_APP + AT_EXIT, **dirty("atexit-error")),
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


def script(group: str, name: str, source: str, module: str = "", **more: Any) -> Program:
    command = more.pop("command", (PYTHON,))
    return Program(
        group, name, (*command, "main.py"), {"main.py": source}, modules=(module or group,), **more
    )


POOLS = [
    script("ray", "left-to-atexit", RAY, options={"max_shutdown_s": 30}),
    script("joblib", "loky", JOBLIB),
    *(
        script("DataLoader", method, LOADER.format(method=method), "torch")
        for method in ("fork", "spawn", "forkserver")
        # Abandoned iterators are not among them: torch's handler of SIGCHLD races with the end.
    ),
    script("torchrun", "destroyed", GROUP + DESTROY, "torch", command=TORCHRUN),
    script("torchrun", "not-destroyed", GROUP, "torch", command=TORCHRUN,
           **dirty("process-group-not-destroyed")),
]  # fmt: skip

# Tools that run other programs, and programs that are not Python.

COVERAGE = ("coverage", "run", "--rcfile=rc", "main.py")
SUBPROCESS = "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n"
RC = "[run]\nparallel = true\npatch = subprocess\n"
MAKE = ("make", "-j", "2")
MAKEFILE = f"""
all: one two three
one two:
	{PYTHON} -c 'print("$@")'
three:
	{PYTHON} three.py
	$(MAKE) one
"""

TOOLS = [
    Program("coverage", "dirty-subprocess", COVERAGE,
            {"main.py": SUBPROCESS, "other.py": AT_EXIT, "rc": RC}, modules=("coverage",),
            **dirty("atexit-error")),
    Program("make", "parallel-clean", MAKE, {"Makefile": MAKEFILE, "three.py": "print('three')"}),
    Program("make", "parallel-dirty", MAKE, {"Makefile": MAKEFILE, "three.py": AT_EXIT},
            **dirty("atexit-error")),
    Program("node", "aborts", ("node", "main.js"), {"main.js": "process.abort()"}, "crash", 134),
]  # fmt: skip

PROGRAMS = [*SERVERS, *POOLS, *TOOLS]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_verdict(program: Program, tmp_path: Path) -> None:
    """Its finding, and nothing but that; its exit code."""
    if missing := program.missing():
        pytest.skip(f"{program.group}: {missing} is not installed")
    report = program.run(tmp_path)
    said = f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"
    assert {found.id for found in report.findings} == {program.finding} - {""}, said
    assert report.exit_code == program.exit_code, said
