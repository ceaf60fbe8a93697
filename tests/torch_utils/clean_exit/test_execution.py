"""Programs that a Python becomes by exec, in a child or in its own place, are seen from inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hazards.pythons import other_pythons
from torch_utils.clean_exit import check

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
# In each of them stderr is not the checker's: a terminal's, nobody's, or closed.
WAYS = {
    "pty.spawn": "import pty; pty.spawn([sys.executable, __file__, 'again'])",
    "pty.fork": """
import pty
pid, terminal = pty.fork()
if pid == 0:
    os.execve(sys.executable, [sys.executable, __file__, 'again'], {})
try:
    while os.read(terminal, 1024):
        pass
except OSError:
    pass
os.waitpid(pid, 0)
""",
    "os.spawnl": "os.close(2); os.spawnl(os.P_WAIT, sys.executable, 'python', __file__, 'again')",
    "os.execlp": """
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.environ['PATH'] = os.path.dirname(sys.executable)
os.execlp(os.path.basename(sys.executable), 'python', __file__, 'again')
""",
}
PROGRAM = """
import os, sys
if len(sys.argv) == 1:
{start}
    sys.exit()
class A:
    def __del__(self): {body}
last = A()
"""
ERRORS = """
import os, sys, traceback
def attempt(function, *args, **options):
    try:
        function(*args, **options)
    except Exception:
        traceback.print_exc()
python = sys.executable
attempt(os.execvp, "nowhere", ["x"])
attempt(os.execv, "/nowhere/python3", ["x"])
attempt(os.execv, python, ["x"], {})
attempt(os.execv, python, "text")
attempt(os.execv, python, ["null\\0"])
attempt(os.execve, python, ["x"])
attempt(os.execve, python, ["x"], {"a=": "b"})
attempt(os.execve, env={1: 2}, path=python, argv=["x"])
class Runner:
    run = os.execv
attempt(Runner().run, "/nowhere", ["x"])
print(os.execve in os.supports_fd, os.execv.__name__, os.execve.__doc__, file=sys.stderr)
show = "import os, sys; print(sorted(os.environ.items()), sys.path, sys.argv)"
os.execve(python, ["python", "-c", show, "a"], {"PYTHONPATH": "b:", "A": "1"})
"""


def run(python: str, how: str, body: str, folder: Path) -> set[str]:
    path = folder / "program.py"
    start = "".join(f"    {line}\n" for line in WAYS[how].strip().splitlines())
    path.write_text(PROGRAM.format(start=start, body=body))
    report = check([python, str(path)], stdin=subprocess.DEVNULL, timeout_s=120)
    assert report.returncode == 0, report.stderr
    return {finding.id for finding in report.findings}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("version", VERSIONS)
def test_verdict(version: str, how: str, tmp_path: Path) -> None:
    """What such a program leaves behind is found; its clean twin is clean."""
    assert run(PYTHONS[version], how, "1 / 0", tmp_path) == {"unraisable"}
    assert run(PYTHONS[version], how, "pass", tmp_path) == set()


@pytest.mark.parametrize("version", VERSIONS)
def test_as_ever(version: str, tmp_path: Path) -> None:
    """Errors, to the letter of their tracebacks, and what the new program sees are the same."""
    path = tmp_path / "program.py"
    path.write_text(ERRORS)
    command = [PYTHONS[version], str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    report = check(command, stdin=subprocess.DEVNULL)
    assert (report.stdout, report.stderr) == (done.stdout, done.stderr)
    assert report.clean


def test_out_of_reach(tmp_path: Path) -> None:
    """Where the probe cannot be read (another user's), nothing is put into the environment."""
    # As such a place looks to whoever may read everything: it is not there.
    library = tmp_path / "lib"
    library.mkdir()
    copy = library / "torch_utils"
    source = Path(sys.modules["torch_utils"].__path__[0])
    subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
    program = (
        f"import os, shutil, subprocess, sys; shutil.rmtree({str(library)!r})\n"
        "code = 'import os; print(sorted(n for n in os.environ if \"CLEAN_EXIT\" in n))'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
        "os.execv(sys.executable, [sys.executable, '-c', code])"
    )
    command = [sys.executable, "-m", "torch_utils.clean_exit", "-q", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr
