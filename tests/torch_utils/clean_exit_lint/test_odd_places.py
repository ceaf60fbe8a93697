"""Odd files, names and outputs: each gets a line, and none of them ends the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from programs import IMPORT_PATH
from torch_utils.clean_exit_lint import check, cli, python_files

DIRTY = "class A:\n    def __del__(self):\n        import os\n"
COMMAND = [sys.executable, "-m", "torch_utils.clean_exit_lint"]
ENV = {**os.environ, "PYTHONPATH": IMPORT_PATH}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a dirty file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dirty.py").write_text(DIRTY)
    return tmp_path


def found() -> list[str]:
    """Return the files of the current folder in which something is found."""
    return [finding.path for finding in check(python_files(["."])).findings]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_what_is_no_file(folder: Path) -> None:
    """A pipe, which nobody writes to, is passed by; folders and links that end in .py are not."""
    os.mkfifo("pipe.py")
    (folder / "folder.py").mkdir()
    (folder / "folder.py" / "inner.py").write_text(DIRTY)
    Path("itself.py").symlink_to("itself.py")
    Path("loop").symlink_to(".")
    assert found() == ["dirty.py", "folder.py/inner.py"]
    assert "symbolic links" in str(check(python_files(["."])).notes[0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes any bytes as a name")
def test_odd_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are no UTF-8, and a line's end: in all formats, and in a baseline."""
    heir = b"from dirty import A\nclass B(A):\n    def __del__(self):\n        import json\n"
    Path(os.fsdecode(b"\xff.py")).write_bytes(heir)
    (folder / "two\nlines.py").write_text(DIRTY)
    assert len(found()) == 3
    for form in cli.FORMATS:
        assert cli.main(["--format", form, "."]) == 1
        said = capsys.readouterr().out
        if form in {"json", "sarif"}:
            json.loads(said)
        else:
            assert not [line for line in said.splitlines() if line.startswith("lines.py")]
    assert cli.main(["--write-baseline", "known.json", "."]) == 0
    assert cli.main(["--baseline", "known.json", "."]) == 0


def test_long_ladders_of_classes(folder: Path) -> None:
    """The order of bases takes a time that does not explode: this once took minutes."""
    steps = [f"class A{at}(A{at - 1}):\n    pass\n" for at in range(1, 900)]
    last = "class Z(A899):\n    def __del__(self):\n        self.close()\n"
    first = "class A0:\n    def close(self):\n        import os\n"
    (folder / "dirty.py").write_text(first + "".join(steps) + last)
    assert found() == ["dirty.py"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["dirty.py"], ["--explain", "import"]])
def test_a_full_disk(folder: Path, arguments: list[str]) -> None:
    """Is said in a line, and nothing more."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENV,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "clean-exit-lint: stdout: No space left on device\n"


def test_no_stdout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is said in a line."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["dirty.py"]) == 2
    assert capsys.readouterr().err == "clean-exit-lint: stdout is closed\n"


def test_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends it as a shell expects, without a traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check", interrupted)
    assert cli.main(["dirty.py"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([""], "a PATH is empty"), (["--baseline", "damaged.json", "."], "was not written by")],
)
def test_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """A path of no letters; a baseline with a count that is no number."""
    row = {"path": "a", "rule": "b", "code": "c", "count": "many"}
    (folder / "damaged.json").write_text(json.dumps({"version": 1, "findings": [row]}))
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
