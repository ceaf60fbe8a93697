"""The command and `check`, used wrongly: one line that says what to do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

# What people write by mistake, and what they are told.
MISTAKES = {
    "nosuch.py": "nosuch.py was not found: there is no such file here, and no such command in PATH",
    "nosuch": "nosuch was not found: there is no such command in PATH",
    "a\\ folder/nosuch": "'a folder/nosuch' was not found",
    "'python -c pass'": "it is one word; try clean-exit -- python -c pass",
    ".": ". is a folder",
    "./lost": "cannot be executed: the interpreter that its first line names was not found",
    "--stop-after 1 true": "--stop-signal needs one of --stop-after and --stop-when",
    "--stop-signal TERM true": "--stop-signal needs one of --stop-after and --stop-when",
    "--report-json nowhere/a.json true": "there is no folder",
    "--report-junit . true": "it is a folder",
    "--error-exitcode 0 true": "0 is not an exit code of a failure (1 to 255)",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(line: str, tmp_path: Path) -> None:
    """Each is told apart, with what to do about it."""
    (tmp_path / "lost").write_text("#!/nowhere/python\n")
    (tmp_path / "lost").chmod(0o755)
    command = [sys.executable, "-m", "torch_utils.clean_exit", *shlex.split(line)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode in (125, 126, 127)
    assert MISTAKES[line] in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_may_not_be_entered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for it, though looking at what is in it is refused as well."""
    from torch_utils.clean_exit import cli

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # Root may enter everywhere.
        patch.setattr(os, "stat", refuse)
        with pytest.raises(PermissionError):  # The control: so a path says it of itself.
            Path("/closed").stat()
        code = cli._cannot_start(["/closed/program"], PermissionError(13, "Permission denied"))
    assert code == 126
    assert "/closed/program cannot be executed (Permission denied)" in capsys.readouterr().err


def test_a_report_over_a_file(tmp_path: Path) -> None:
    """In a folder that may not be written to, one that is there may."""
    from torch_utils.clean_exit.cli import _why_not_writable

    report = tmp_path / "there.json"
    report.touch()
    access = os.access
    with pytest.MonkeyPatch.context() as patch:  # Root may write everywhere.
        patch.setattr(os, "access", lambda path, mode: path == report and access(path, mode))
        assert _why_not_writable(report) == ""
        assert _why_not_writable(tmp_path / "new.json").endswith("may not be written to")


def test_a_folder_that_is_not_there() -> None:
    """It is named, rather than the program."""
    from torch_utils.clean_exit import check

    with pytest.raises(FileNotFoundError, match="/nowhere"):
        check("true", cwd="/nowhere")


# None of these may be waited for; a child that is no program has nothing to say.
NO_PROGRAM = {
    "a null byte in an argument": "['true', 'a\\0b']",
    "a null byte in its name": "['tr\\0ue']",
    "a null byte in a variable": "['true'], env={'A': 'a\\0b'}",
    "a variable's name": "['true'], env={'A=B': '1'}",
    "a null byte in the folder": "['true'], cwd='a\\0b'",
}


@pytest.mark.parametrize("what", NO_PROGRAM)
def test_what_no_kernel_takes(what: str) -> None:
    """It is an error at once, and not a program that never ends."""
    code = "from torch_utils.clean_exit import check\n"
    code += f"try: check({NO_PROGRAM[what]})\nexcept (OSError, ValueError) as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert "Invalid argument" in done.stdout or "null byte" in done.stdout, done


@pytest.mark.parametrize("number", ["TERM", 0, -1, 1000])
def test_what_is_no_signal(number: object) -> None:
    """It is named, instead of a keeper that falls over it or a stop that never comes."""
    from torch_utils.clean_exit import check

    with pytest.raises(ValueError, match=f"not {number!r}"):
        check(["true"], stop_signal=number, stop_after_s=0.1)  # type: ignore[arg-type]


def test_other_values() -> None:
    """One pattern in the place of a list would be one for each letter; no number, no limit."""
    from torch_utils.clean_exit import check

    dirty = ["-c", "import atexit; atexit.register(lambda: 1 / 0)"]
    with pytest.raises(TypeError, match=r"\['vendor'\]"):
        check(dirty, ignore="vendor")
    assert not check(dirty, ignore=["vendor"]).clean
    for limit in ("timeout_s", "max_shutdown_s"):
        with pytest.raises(ValueError, match="more than 0 seconds"):
            check(dirty, **{limit: float("nan")})
