"""What the record of a program proves, and what it does not: then what stderr says counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_utils.clean_exit import check

DIRTY = "class A:\n    def __del__(self): raise ValueError('dirty')\na = A()\n"
QUOTES = """import sys
sys.stderr.write('''Exception ignored in: <function A.__del__ at 0x7f>
Traceback (most recent call last):
  File "a.py", line 3, in __del__
ValueError: dirty
''')
"""
SPAWN = "os.posix_spawn(sys.executable, [sys.executable, '-I', 'dirty.py'], os.environ)\n"
# Each of them lets another program, or interpreter, speak that the record knows nothing of.
OTHERS = {
    "a child that nobody waits for": "import os, sys, time\n" + SPAWN + "time.sleep(1)\n",
    "a child that goes on": "import os, sys\n" + SPAWN,
    "a child whose end is ignored in C": (
        "import ctypes, os, sys, time\nctypes.CDLL(None).signal(17, ctypes.c_void_p(1))\n"
        + SPAWN
        + "time.sleep(1)\n"
    ),
    "another program, out of a destructor": (
        "import os, sys\nclass B:\n    def __del__(self, e=os.execv, p=sys.executable):\n"
        "        e(p, [p, '-I', 'dirty.py'])\nb = B()\n"
    ),
    "an interpreter that is hidden": (
        "import sys\ntry: import _interpreters as i\nexcept ImportError:\n"
        "    import _xxsubinterpreters as i\n"
        "number = i.create()\n"
        "(getattr(i, 'exec', None) or i.run_string)(number, open('dirty.py').read())\n"
        "i.destroy(number)\ndel sys.modules[i.__name__]\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_heard(name: str, tmp_path: Path) -> None:
    """A dirty program that speaks through another's stderr."""
    (tmp_path / "dirty.py").write_text(DIRTY)
    report = check(["-c", OTHERS[name]], cwd=tmp_path)
    assert report.returncode == 0
    assert {finding.id for finding in report.findings} == {"unraisable"}, report


def test_a_quotation_is_none() -> None:
    """The control: the same words, of a program that was alone."""
    assert check(["-c", QUOTES]).clean
    assert not check(["-c", QUOTES + "import os\nos.system('true')\n"]).clean


def test_an_interpreter_leaves_the_environment_alone() -> None:
    """A second one loads the same sitecustomize, when there is nothing to put back any more."""
    create = OTHERS["an interpreter that is hidden"].partition("(getattr")[0]
    code = create + "import os\nprint(os.environ.get('PYTHONPATH'))\n"
    code = "import ctypes\n" + code + "g = ctypes.CDLL(None).getenv\n"
    code += "g.restype = ctypes.c_char_p\nprint(g(b'PYTHONPATH'))\n"
    report = check(["-c", code], env={"PYTHONPATH": "/somewhere"})
    assert report.stdout == "/somewhere\nb'/somewhere'\n", report


CRASHES = """
import multiprocessing, os, subprocess, sys
def work(): os.kill(os.getpid(), int(sys.argv[2]))
if __name__ == "__main__":
    if sys.argv[1] == "subprocess":
        code = "import os; os.kill(os.getpid(), %s)" % sys.argv[2]
        child = subprocess.Popen([sys.executable, "-c", code])
        child.wait()
        print(child.returncode, vars(child)["returncode"])
    else:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
        child.start()
        child.join()
        print(child.exitcode)
"""


@pytest.mark.parametrize(
    "how",
    [
        "subprocess",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("fork", "spawn", "forkserver")),
    ],
)
def test_children_that_crash(how: str, tmp_path: Path) -> None:
    """Said of those whose end Python's own modules tell; not of those that were ended."""
    program = tmp_path / "crashes.py"
    program.write_text(CRASHES)
    for number, found in (("11", ["crash"]), ("15", [])):
        report = check([sys.executable, str(program), how, number])
        assert report.returncode == 0
        assert report.stdout.split()[0] == f"-{number}"
        assert [finding.id for finding in report.findings] == found, report


def test_children_started_without_a_fork() -> None:
    """Python 3.13 starts them by posix_spawn; they are seen from inside all the same."""
    code = (
        "import os, sys\nos.waitpid(os.posix_spawn(sys.executable, [sys.executable, '-c', "
        f"{DIRTY!r}], os.environ, file_actions=[(os.POSIX_SPAWN_CLOSE, 2)]), 0)\n"
    )
    assert [finding.id for finding in check(["-c", code]).findings] == ["unraisable"]
    isolated = code.replace("'-c'", "'-I', '-c'")  # The control: by its stderr alone.
    assert check(["-c", isolated]).clean


@pytest.mark.parametrize("when", ["{}", "import atexit; atexit.register(lambda: {})"])
def test_without_a_hook(when: str, tmp_path: Path) -> None:
    """A program that deletes the hook gets Python's own messages, and nobody is told of them."""
    delete = when.format("delattr(sys, 'unraisablehook')")
    (tmp_path / "program.py").write_text(f"import sys\n{delete}\n{DIRTY}")
    report = check([str(tmp_path / "program.py")])
    assert [finding.id for finding in report.findings] == ["unraisable"], report.stderr
    assert "clean_exit" not in report.stderr  # No error of the probe's own.
