"""A program that an isolated interpreter runs is what it is plainly: streams, and exit code."""

from __future__ import annotations

import py_compile
import re
import sys
import zipfile
from pathlib import Path

import pytest

from clean_exit.test_bystanders import QUIET, run

LOOK = (
    "import sys; print(sys.argv, sys.path[:2], __file__, type(__loader__), __spec__ is None, "
    "sys.orig_argv, sorted(globals()), __doc__)\n"
)
DIRTY = "class A:\n    def __del__(self): raise ValueError('dirty')\na = A()\n"
FAST = "-I look.py a|-Ix skip.py|-I package c|-I error.py|-I -m look b|-I missing.py".split("|")
COMMANDS = """
-I look.py a|-E ./look.py|-I -W error look.py|-IWerror look.py|-S look.py|-I -m look b
-I look.pyc a|-I compiled|-I bad.pyc|-I missing.py|-I empty|-Ix skip.py|-x -E skip.py
-I package/|-I package c|-E ./package/|-I archive.pyz d|-I syntax.py|-I -c print(|-I error.py
-I interrupted.py|-I -m missing|-I -c|-I -m|-I /dev/null
""".strip().replace("\n", "|")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, of every kind that Python runs."""
    folder = tmp_path_factory.mktemp("isolated")
    for name in ("package", "empty"):
        (folder / name).mkdir()
    for name in ("look.py", "package/__main__.py"):
        (folder / name).write_text(LOOK)
    for name in ("look.pyc", "compiled"):
        py_compile.compile(str(folder / "look.py"), str(folder / name), doraise=True)
    (folder / "bad.pyc").write_bytes(b"not compiled by this Python")
    (folder / "skip.py").write_text("not Python, for some shell\nprint('skipped')\n")
    (folder / "syntax.py").write_text("print('a'\n")
    (folder / "error.py").write_text(
        "def f():\n  raise KeyError(1)\ntry:\n  f()\nexcept KeyError as error:\n"
        "  raise ValueError(2) from error\n"
    )
    (folder / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    with zipfile.ZipFile(folder / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        line if line in FAST else pytest.param(line, marks=pytest.mark.slow)
        for line in COMMANDS.split("|")
    ],
)
def test_as_plainly(line: str, folder: Path) -> None:
    """Also where there is nothing to run: the message is Python's own."""
    command = [sys.executable, *line.split(" ")]
    plain, below = (run([*prefix, *command], cwd=folder) for prefix in ([], QUIET))
    plain_out, below_out = (re.sub(" at 0x[0-9a-f]+", "", d.stdout) for d in (plain, below))
    assert below_out == plain_out
    assert below.stderr == plain.stderr
    expected = plain.returncode if plain.returncode >= 0 else 128 - plain.returncode
    assert below.returncode == expected


@pytest.mark.parametrize("options", [["-I"], ["-Ix"]])
def test_it_is_seen_from_inside(options: list[str], tmp_path: Path) -> None:
    """The reason for all this: also when it says nothing on stderr."""
    from torch_utils.clean_exit import check

    program = tmp_path / "dirty.py"
    program.write_text("\n" + DIRTY)
    if options == ["-I"]:
        py_compile.compile(str(program), str(tmp_path / "dirty.pyc"), doraise=True)
        program = tmp_path / "dirty.pyc"
    quiet = f"exec {sys.executable} {' '.join(options)} {program} 2>/dev/null"
    assert check([sys.executable, *options, str(program)]).probed
    report = check([sys.executable, *options, str(program)])
    assert [finding.id for finding in report.findings] == ["unraisable"]
    assert report.findings[0].phase == "teardown"
    assert not check(["sh", "-c", quiet]).probed  # The control: hidden in a shell it is not.
