"""The command and `check`, used wrongly: one line that says what to do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_utils.clean_exit import check

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
    "--report-json '' true": "a report needs the name of a file",
    "--report-json a --report-junit ./a true": "the two reports need a file each",
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
        if sys.version_info >= (3, 11):  # Before, pathlib has a name of its own for it.
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


def test_a_report_in_a_folder_that_was_removed(tmp_path: Path) -> None:
    """The program could run there; its report has no place."""
    command = shlex.join([sys.executable, "-m", "torch_utils.clean_exit", "--report-json", "a"])
    done = subprocess.run(
        ["sh", "-c", f"rmdir {shlex.quote(str(tmp_path))}; {command} true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr.count("\n")) == (125, 1)
    assert "'a' cannot be written: the current folder has been removed" in done.stderr


def test_a_folder_that_is_not_there() -> None:
    """It is named, rather than the program."""
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        check("true", cwd="/nowhere")


# What `check` may be called with by mistake: the options, and what they are told.
WRONG = [
    ({"ignore": "vendor"}, TypeError, "ignore=['vendor']"),
    ({"ignore": [b"vendor"]}, TypeError, "has to be a string"),
    ({"timeout_s": "5"}, TypeError, "timeout_s must be a number of seconds"),
    ({"timeout_s": float("nan")}, ValueError, "timeout_s must be more than 0 seconds"),
    ({"max_shutdown_s": None}, TypeError, "max_shutdown_s must be a number of seconds"),
    ({"stop_signal": 15, "stop_after_s": -1}, ValueError, "stop_after_s must be 0 seconds or"),
    ({"stop_signal": "TERM", "stop_after_s": 1}, ValueError, "such as signal.SIGTERM, not 'TERM'"),
    ({"stop_signal": 999, "stop_after_s": 1}, ValueError, "such as signal.SIGTERM, not 999"),
    ({"stdin": "hello"}, TypeError, "stdin has to be a file"),
    ({"env": {"A=B": "1"}}, ValueError, "the environment cannot have 'A=B'"),
    ({"env": {"A": "\0"}}, ValueError, "the environment cannot have 'A'"),
    ({"command": ["true", "\0"]}, ValueError, "null character"),
    ({"command": None}, TypeError, "a command is a list of words"),
    ({"command": 5}, TypeError, "a command is a list of words"),
]


@pytest.mark.parametrize(("options", "kind", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_of_check(options: Any, kind: type[Exception], said: str) -> None:
    """Each is refused before anything runs; letters of a string would ignore every finding."""
    with pytest.raises(kind) as caught:
        check(**{"command": ["true"], **options})
    assert said in str(caught.value)


def test_a_start_that_fails_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel was never asked for has failed too: nobody waits for such a program."""
    from torch_utils.clean_exit import keeping

    monkeypatch.setattr(keeping, "_refuse_what_cannot_be_passed", lambda *_: None)
    with pytest.raises(OSError, match="Invalid argument"):
        check(["true", "\0"])


@pytest.mark.parametrize("asked", [["--help"], ["--explain", "unraisable"]], ids=str)
def test_stdout_that_nobody_reads(asked: list[str]) -> None:
    """Who has read enough is content; a disk that is full, or no stdout at all, is an error."""
    command = shlex.join([sys.executable, "-m", "torch_utils.clean_exit", *asked])
    said = {}
    for where in ("| true; exit ${PIPESTATUS[0]}", "> /dev/full", ">&-"):
        line = f"later() {{ sleep 0.5; {command}; }}; later {where}"
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=100
        )
        said[where] = (done.returncode, done.stderr)
    assert said.pop("| true; exit ${PIPESTATUS[0]}") == (0, "")
    for code, text in said.values():
        assert (code, text.count("\n")) == (125, 1)
        assert text.startswith("clean-exit: stdout cannot be written to: ")
