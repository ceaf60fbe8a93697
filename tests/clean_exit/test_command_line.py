"""The command clean-exit: exit codes, options, reports, settings and wrong usage."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clean_exit import CHECKER, exit_code, lint_main, main, run_command
from tests.support.waiting import is_there, wait_for
from torch_utils import __version__

SLOW = ["-c", "import atexit, time; atexit.register(time.sleep, 1)"]
DIRTY = ["-c", "import atexit; atexit.register(lambda: 1 / 0)"]


@pytest.fixture(autouse=True)
def folder_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests independent of this project's pyproject.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()


def clean_exit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([*CHECKER, *arguments])


def test_version_is_printed_by_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (main, lint_main):
        assert command(["--version"]) == 0
    assert capsys.readouterr().out == (f"clean-exit {__version__}\nclean-exit-lint {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["-c", "1"], 0, "clean-exit: clean exit; the program's exit code is 0 (took "),
        (DIRTY, 120, "atexit-error"),
        (["-c", DIRTY[1] + "; raise SystemExit(3)"], 3, "atexit-error"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "SIGKILL"),
        (["--timeout", "0.5", "--", "sh", "-c", "trap '' TERM; sleep 60; sleep 60"], 124, "hang"),
        (["--error-exitcode", "77", "--ignore", "KeyError", *DIRTY], 77, "atexit-error"),
        (["--ignore", "ZeroDivision", *DIRTY], 0, "clean exit, 1 ignored; the program's exit "),
        (["--max-shutdown", "0.5", *SLOW], 120, "slow-shutdown"),
        (["no-such-command-here"], 127, "was not found"),
        ([], 125, "there is no command"),
    ],
)
def test_exit_code_and_reason(arguments: list[str], code: int, printed: str) -> None:
    """The table in the documentation."""
    done = clean_exit(*arguments)
    assert done.returncode == code, done.stderr
    assert printed in done.stderr


def test_file_module_and_code_get_their_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    expected = "['-q', '--timeout', '--']\n"
    for form in (["program.py"], ["-m", "program"], ["--", sys.executable, "program.py"]):
        done = clean_exit("-q", *form, "-q", "--timeout", "--")
        assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


SERVER = """
import atexit, signal, sys, time
def stop(number, frame):
    {}
signal.signal(signal.SIGTERM, stop)
print("listening on 8000", flush=True)
while True: time.sleep(0.05)
"""
DIES = "signal.signal(number, signal.SIG_DFL); signal.raise_signal(number)"
DIRTY_END = "atexit.register(lambda: 1 / 0); sys.exit(0)"
WHEN = ["--stop-signal", "TERM", "--stop-when", r"listening on \d+"]
# Enough time to start on a busy machine.
AFTER = ["--stop-signal", "15", "--stop-after", "10"]


@pytest.mark.parametrize(
    ("options", "on_stop", "code"),
    [(WHEN, DIES, 0), (WHEN, DIRTY_END, 120), pytest.param(AFTER, DIES, 0, marks=pytest.mark.slow)],
    ids=["dies", "dirty", "after some time"],
)
def test_server_that_ends_by_the_stop_signal_succeeds(
    options: list[str], on_stop: str, code: int
) -> None:
    done = clean_exit(*options, "-c", SERVER.format(on_stop))
    assert done.returncode == code, done.stderr
    assert done.stdout.rstrip() == "listening on 8000"  # The newline may come after the match.
    assert ("clean exit" in done.stderr) == (code == 0)
    assert ("did not all run: SIGTERM ended it" in done.stderr) == (on_stop == DIES)


def test_annotations_name_the_innermost_place_in_this_folder(tmp_path: Path) -> None:
    """Also with -q, and for stacks, which begin with the innermost place."""
    (tmp_path / "src").mkdir()
    program = "import atexit, json, os\natexit.register(lambda: json.loads('{'))\n"
    for more, place in (
        ("", "2,title=clean-exit%3A atexit-error::json.decoder.JSONDecodeError"),
        ("os.abort()\n", "3,title=clean-exit%3A crash::"),
    ):
        (tmp_path / "src" / "dirty.py").write_text(program + more)
        done = clean_exit("-q", "--github", "src/dirty.py")
        assert f"::error file=src/dirty.py,line={place}" in done.stderr
        assert done.stderr.count("::error ") == 1


CHILDREN = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "import os; os.abort()"])
subprocess.run([sys.executable, *{DIRTY!r}], stderr=-3)
"""


def test_findings_about_children_can_be_left_out() -> None:
    """They name the option; findings about the program itself stay, also below a wrapper."""
    option = "--children=ignore"
    below = ["--", "sh", "-c", shlex.join([sys.executable, *DIRTY]) + "; exit 0"]
    assert clean_exit(option, "-c", CHILDREN).returncode == 0
    assert clean_exit(option, "-c", DIRTY[1] + CHILDREN).returncode == 120
    assert clean_exit(option, *below).returncode == 120
    done = clean_exit("-c", CHILDREN)
    assert done.returncode == 120
    assert "children=ignore counts the program itself only" in done.stderr


def test_summary_tells_when_no_probe_was_loaded() -> None:
    python = f"{sys.executable} -c 'import atexit; atexit.register(print)'"
    for script in (f"{sys.executable} -I -c 1", f"PYTHONPATH=src {python}", "exit 0"):
        done = clean_exit("--", "sh", "-c", script)
        assert "clean exit, not probed; the program's exit code is 0 (took " in done.stderr
    assert "clean exit; the" in clean_exit("--", "sh", "-c", python).stderr


def test_system_without_fcntl_gets_one_line() -> None:
    """Such as Windows."""
    code = "import sys; sys.modules['fcntl'] = None; import clean_exit.cli as c; sys.exit(c.main())"
    done = run_command([sys.executable, "-c", code, "true"])
    assert done.returncode == 125
    assert done.stderr == "clean-exit: clean-exit needs Linux or macOS; on Windows, run it in WSL\n"


def test_json_report_has_the_run_child_processes_and_notes(tmp_path: Path) -> None:
    def report(*command: str) -> tuple[Any, str]:
        done = clean_exit("--report-json", "r.json", *command)
        whole = json.loads(Path("r.json").read_text())
        (run,) = whole["runs"]
        assert (whole["schema_version"], run["exit_code"]) == (1, done.returncode)
        assert whole["clean"] == (done.returncode == 0)
        return run, done.stderr

    run, printed = report("--", "sh", "-c", f"{shlex.join([sys.executable, *DIRTY])}; exit 0")
    (finding,) = run["findings"]
    assert (run["exit_code"], run["returncode"], run["note"]) == (120, 0, None)
    assert (finding["id"], finding["phase"]) == ("atexit-error", "atexit")
    assert finding["help"] == "clean-exit --explain atexit-error"
    assert finding["process"] == " ".join([sys.executable, *DIRTY])
    assert f", in process {finding['pid']}: {finding['process']})\n" in printed
    assert "note:" not in printed
    run, printed = report("-c", f"{DIRTY[1]}; import os; os._exit(0)")
    assert run["findings"] == []
    assert run["note"].startswith("its exit handlers did not all run: ")
    assert f"\n  note: {run['note']}\n" in printed


def test_killed_supervisor_is_a_checker_error() -> None:
    """The program ends."""
    # After a second the supervisor has told which process it started.
    kill = "echo $$; sleep 1; kill -9 $PPID; exec sleep 600 > /dev/null 2>&1"
    done = clean_exit("--", "sh", "-c", kill)
    assert done.returncode == 125
    assert done.stderr.startswith("clean-exit: the supervising process was killed")
    wait_for(lambda: not is_there(int(done.stdout)))


@pytest.mark.slow
def test_closed_pipe_is_no_error_but_a_full_disk_is() -> None:
    command = shlex.join([*CHECKER, "--explain", "unraisable"])
    closed = run_command(["bash", "-c", f"{command} | : ; exit ${{PIPESTATUS[0]}}"])
    assert (closed.returncode, closed.stderr) == (0, "")
    for where in ("> /dev/full", ">&-"):
        failed = run_command(["bash", "-c", f"{command} {where}"])
        assert (failed.returncode, failed.stderr.count("\n")) == (125, 1)
        assert failed.stderr.startswith("clean-exit: stdout cannot be written to: ")


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--no-such-option true", "see clean-exit --help"),
        ("--explain what", "choose from unraisable, atexit-error, finalizer-error"),
        ("--timeout soon true", "argument --timeout: must be more than 0 seconds, got 'soon'"),
        ("--ignore '(' true", "argument --ignore: '(' is not a regular expression"),
        ("--stop-signal NOPE true", "must be a signal name or number such as TERM or 15"),
        ("--error-exitcode 0 true", "must be a whole number from 1 to 255, got '0'"),
        ("--report-json nowhere/a.json true", "the report 'nowhere/a.json' cannot be written: "),
        ("--report-json words.py true", "would overwrite the program words.py"),
        ("./words", "'./words' cannot be executed: Exec format error"),
        (".", "'.' cannot be executed: Permission denied"),
    ],
)
def test_wrong_usage_gets_one_line(
    line: str, printed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("echo A shell would run this.\n")
    (tmp_path / "words").chmod(0o755)
    assert exit_code(main, shlex.split(line)) == (126 if "executed" in printed else 125)
    message = capsys.readouterr().err
    assert (printed in message, message.count("\n")) == (True, 1), message


# The table in pyproject.toml


@pytest.mark.parametrize(
    ("table", "printed"),
    [
        ("timeout = [1, 2]", "timeout must be a number, got [1, 2]"),
        ("timeout = 'soon'", "argument --timeout: must be more than 0 seconds, got 'soon'"),
        ("github = 1", "github must be true or false, got 1"),
        ("error_exitcode = 4", "unknown setting 'error_exitcode' in [tool.clean-exit]"),
        ("timeout = ", "is not valid"),
    ],
)
def test_wrong_setting_gets_one_line_with_the_file(
    table: str, printed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.clean-exit]\n{table}\n")
    assert exit_code(main, ["-q", "true"]) == 125
    message = capsys.readouterr().err
    assert (printed in message, message.count("\n")) == (True, 1), message
    assert str(tmp_path / "pyproject.toml") in message


SETTINGS = """
timeout = 300
max-shutdown = 2.5
resource-warnings = true
ignore = ["KeyError", "qqq|zzz"]
error-exitcode = 9
report-json = "r.json"
children = "count"
github = true
"""


@pytest.mark.slow
def test_every_setting_has_the_effect_of_its_option(tmp_path: Path) -> None:
    def write(table: str) -> None:
        (tmp_path / "pyproject.toml").write_text(f"[tool.clean-exit]\n{table}\n")

    write(SETTINGS)
    code = "import atexit; f = open('pyproject.toml'); f = None; atexit.register(lambda: {}['x'])"
    done = clean_exit("-c", code)
    assert (done.returncode, "::error title=" in done.stderr) == (9, True)
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [one["id"] for one in run["findings"]] == ["resource-warning"]
    assert clean_exit("--error-exitcode", "8", *DIRTY).returncode == 8
    write("timeout = '0.5'")
    assert clean_exit("sleep", "60").returncode == 124
    write("max-shutdown = 0.5")
    assert "slow-shutdown" in clean_exit(*SLOW).stderr
