"""The probe: the program does not notice it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hazards.pythons import other_pythons
from torch_utils.clean_exit import check
from torch_utils.clean_exit.command import add_probe

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
LOOK = """
import os, sys
names = ("argv", "path", "flags", "warnoptions", "orig_argv", "prefix", "executable", "path_hooks")
for name in names:
    print(name, getattr(sys, name))
print(sorted(os.environ))
print(os.environ.get("PYTHONPATH"), sorted(sys.path_importer_cache))
print(sorted(vars()), __name__, __spec__, __file__ if "__file__" in vars() else None)
print("sitecustomize" in sys.modules, "usercustomize" in sys.modules)
print(sorted(n for n in range(3, 200) if os.path.exists(f"/proc/self/fd/{n}")))
print([n for n in sys.modules if "clean_exit" in n], sys.excepthook is sys.__excepthook__)
"""


def see(command: list[str], env: dict[str, str], tmp_path: Path) -> str:
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return without_addresses(done.stdout)


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("path", [None, "", "somewhere:"])
@pytest.mark.parametrize("how", ["file", "-c", "-m", "-P-ish"])
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_looks_different(version: str, how: str, path: str | None, tmp_path: Path) -> None:
    """Arguments, paths, flags, files, modules and variables are what they are without it."""
    (tmp_path / "look.py").write_text(LOOK)
    target = {"file": ["look.py", "a"], "-c": ["-c", LOOK, "a"], "-m": ["-m", "look", "a"]}
    options = ["-W", "ignore", "-X", "utf8"] if how == "-P-ish" else []
    command = [PYTHONS[version], *options, *target.get(how, ["look.py"])]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    expected = see(command, env, tmp_path)
    report = check(command, env=env, cwd=tmp_path)
    assert report.probed
    assert without_addresses(report.stdout) == expected


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"], ["-I", "-S"], ["-IBc"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_isolated(version: str, flags: list[str], tmp_path: Path) -> None:
    """Where the environment or site is ignored, the program is launched in the same way."""
    # Two things do tell: the interpreter's own command line, and a folder that was looked into.
    look = LOOK.replace('"orig_argv", ', "").replace(", sorted(sys.path_importer_cache)", "")
    (tmp_path / "look.py").write_text(look)
    target = [look] if flags[-1].endswith("c") else ["look.py", "a"]
    command = [PYTHONS[version], *flags, *target]
    report = check(command, cwd=tmp_path)
    assert report.probed
    assert without_addresses(report.stdout) == see(command, dict(os.environ), tmp_path)


@pytest.mark.parametrize("flags", [[], ["-I"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_uncaught_error(version: str, flags: list[str], tmp_path: Path) -> None:
    """The traceback is the program's own, to the letter, and so is the exit code."""
    program = tmp_path / "fails.py"
    program.write_text("def f():\n    return {}['key']\n\nf()\n")
    command = [PYTHONS[version], *flags, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = check(command)
    assert (report.stderr, report.returncode) == (done.stderr, 1)
    assert report.clean


def test_own_sitecustomize(tmp_path: Path) -> None:
    """The program's is imported, once, from where it is."""
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    report = check(["-c", "import sitecustomize; print(sitecustomize.__file__)"], env=env)
    path = tmp_path / "sitecustomize.py"
    assert report.stdout == f"mine {path}\n{path}\n"
    assert report.probed


def test_own_sitecustomize_that_fails(tmp_path: Path) -> None:
    """What Python says about it is what it says without the probe."""
    (tmp_path / "sitecustomize.py").write_text("import module_that_is_not_there\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "print(1)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    report = check(command, env=env)
    assert (report.stdout, report.returncode) == (done.stdout, done.returncode)
    assert report.stderr == done.stderr


def test_virtual_environment(tmp_path: Path) -> None:
    """A virtual environment stays one."""
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    report = check([python, "-c", "import sys; print(sys.prefix, sys.flags.no_site)"])
    assert report.stdout == f"{tmp_path / 'env'} 0\n"
    assert report.probed


def test_through_a_shell() -> None:
    """The first Python that a wrapper starts has the probe."""
    command = f"{sys.executable} -c 'import atexit; atexit.register(lambda: 1/0)'; exit 0"
    report = check(["sh", "-c", command])
    assert [finding.id for finding in report.findings] == ["atexit-error"]
    assert report.findings[0].phase == "atexit"


def test_phases() -> None:
    """Each error is in the phase in which it happened."""
    program = """
import atexit, threading
class A:
    def __del__(self): 1 / 0
A()
threading.Thread(target=lambda: (threading.main_thread().join(), A())).start()
atexit.register(A)
last = A()
"""
    report = check(["-c", program])
    assert [f.phase for f in report.findings] == ["main", "threads", "atexit", "teardown"]


def test_cost(tmp_path: Path) -> None:
    """It loads six modules and what they need; `make bench-clean-exit` says what that takes."""
    (tmp_path / "events").touch()
    list_modules = "import sys; print(*sys.modules)"
    modules = "atexit, faulthandler, threading, time, _posixsubprocess, _posixshmem"
    needed = [sys.executable, "-c", f"import {modules}; {list_modules}"]
    bare = [sys.executable, "-c", list_modules]
    probed, env = add_probe(bare, os.environ, tmp_path / "events")
    loaded = [
        set(subprocess.check_output(command, env=chosen, text=True).split())
        for command, chosen in ((bare, dict(os.environ)), (probed, env), (needed, dict(os.environ)))
    ]
    assert loaded[0] < loaded[1] <= loaded[2]
