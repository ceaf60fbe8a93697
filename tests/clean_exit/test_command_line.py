"""The command clean-exit: exit codes, options, reports, settings and wrong usage."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clean_exit import CHECKER, ENVIRONMENT, lint_main, main, run_command
from tests.support.waiting import is_there, wait_for
from torch_utils import __version__

CLEAN = ["-c", "print('hello')"]
SLOW = ["-c", "import atexit, time; atexit.register(time.sleep, 1)"]
DIRTY = ["-c", "import atexit; atexit.register(lambda: 1 / 0)"]


@pytest.fixture(autouse=True)
def folder_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests independent of this project's pyproject.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()


def clean_exit(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_command([*CHECKER, *arguments], cwd=cwd)


def test_version_is_printed_by_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (main, lint_main):
        assert command(["--version"]) == 0
    assert capsys.readouterr().out == (f"clean-exit {__version__}\nclean-exit-lint {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (CLEAN, 0, "clean-exit: clean exit; the program's exit code is 0 (took "),
        (DIRTY, 120, "atexit-error"),
        (["-c", DIRTY[1] + "; raise SystemExit(3)"], 3, "atexit-error"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "SIGKILL"),
        (["--timeout", "0.5", "--", "sleep", "60"], 124, "hang"),
        (["--error-exitcode", "77", "--ignore", "KeyError", *DIRTY], 77, "atexit-error"),
        (
            ["--ignore", "ZeroDivision", *DIRTY],
            0,
            "clean exit, 1 ignored; the program's exit code is 0 (took ",
        ),
        (["--max-shutdown", "0.5", *SLOW], 120, "slow-shutdown"),
        (["no-such-command-here"], 127, "was not found"),
        (["/etc/passwd"], 126, "cannot be executed"),
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
        done = clean_exit("-q", *form, "-q", "--timeout", "--", cwd=tmp_path)
        assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


SERVER = """
import signal, sys, time
def stop(number, frame):
    {on_stop}
signal.signal(signal.SIGTERM, stop)
print("listening on 8000", flush=True)
while True: time.sleep(0.05)
"""
DIES = "signal.signal(number, signal.SIG_DFL); signal.raise_signal(number)"


WHEN = ["--stop-when", r"listening on \d+"]


@pytest.mark.parametrize(
    ("when", "on_stop"),
    [
        (WHEN, DIES),
        pytest.param(WHEN, "sys.exit(0)", marks=pytest.mark.slow),
        # Enough time to start on a busy machine.
        pytest.param(["--stop-after", "10"], DIES, marks=pytest.mark.slow),
    ],
)
def test_server_that_ends_by_the_stop_signal_succeeds(when: list[str], on_stop: str) -> None:
    done = clean_exit("--stop-signal", "TERM", *when, "-c", SERVER.format(on_stop=on_stop))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == "listening on 8000"  # The newline may come after the match.
    assert "clean" in done.stderr
    assert ("did not all run: SIGTERM ended it" in done.stderr) == (on_stop == DIES)
    dirty = f"{DIRTY[1]}\n{SERVER.format(on_stop='sys.exit(0)')}"
    done = clean_exit("--stop-signal", "15", *when, "-c", dirty)
    assert done.returncode == 120


def test_annotations_name_the_innermost_place_in_this_folder(tmp_path: Path) -> None:
    """Also with -q, and for stacks, which begin with the innermost place."""
    (tmp_path / "src").mkdir()
    program = "import atexit, json, time\natexit.register(lambda: json.loads('{'))\n"
    (tmp_path / "src" / "dirty.py").write_text(program)
    done = clean_exit("-q", "--github", "src/dirty.py", cwd=tmp_path)
    start = "::error file=src/dirty.py,line=2,title=clean-exit%3A atexit-error::JSONDecodeError"
    assert done.stderr.count("\n::error ") == 1
    assert start.replace("JSON", "json.decoder.JSON") in done.stderr
    (tmp_path / "src" / "dirty.py").write_text(
        "import subprocess\nsubprocess.run(['sleep', '60'])\n"
    )
    done = clean_exit("-q", "--github", "--timeout", "5", "src/dirty.py", cwd=tmp_path)
    assert "::error file=src/dirty.py,line=2,title=clean-exit%3A hang::" in done.stderr


CRASHES = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; os.abort()'])"
DIRTY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, *{DIRTY!r}], stderr=-3)"


def test_findings_about_children_can_be_left_out() -> None:
    """They name the option; findings about the program itself stay."""
    code = f"{CRASHES}; {DIRTY_CHILD}"
    option = "--children=ignore"
    done = clean_exit(option, "-c", code)
    assert done.returncode == 0, done.stderr
    assert clean_exit(option, "-c", f"{DIRTY[1]}; {code}").returncode == 120
    below = ["--", "sh", "-c", shlex.join([sys.executable, *DIRTY]) + "; exit 0"]
    assert clean_exit(option, *below).returncode == 120  # The program is below a wrapper.
    done = clean_exit("-c", code)
    assert done.returncode == 120
    assert "children=ignore counts the program itself only" in done.stderr


def test_summary_tells_when_no_probe_was_loaded() -> None:
    silent = "import atexit; atexit.register(print)"
    python = shlex.join([sys.executable, "-c", silent])
    isolated = shlex.join([sys.executable, "-I", "-c", silent])
    for script in (isolated, f"PYTHONPATH=src {python}", "exit 0"):
        done = clean_exit("--", "sh", "-c", script)
        assert "clean exit, not probed; the program's exit code is 0 (took " in done.stderr
    for command in (["-c", silent], ["--", "sh", "-c", python]):
        assert ", not probed" not in clean_exit(*command).stderr


def test_system_without_fcntl_gets_one_line() -> None:
    """Such as Windows."""
    code = (
        "import sys; sys.modules['fcntl'] = None; from clean_exit.cli import main; sys.exit(main())"
    )
    done = run_command([sys.executable, "-c", code, "true"])
    assert done.returncode == 125
    assert done.stderr == "clean-exit: clean-exit needs Linux or macOS; on Windows, run it in WSL\n"


def test_json_report_has_the_run_child_processes_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    script = f"{shlex.join([sys.executable, *DIRTY])}; exit 0"
    done = clean_exit("--report-json", str(path), "--", "sh", "-c", script)
    assert done.returncode == 120
    report = json.loads(path.read_text())
    assert (report["schema_version"], report["clean"]) == (1, False)
    (run,) = report["runs"]
    assert (run["exit_code"], run["returncode"]) == (120, 0)
    (finding,) = run["findings"]
    assert (finding["id"], finding["phase"]) == ("atexit-error", "atexit")
    assert finding["help"] == "clean-exit --explain atexit-error"
    assert finding["process"] == " ".join([sys.executable, *DIRTY])
    assert f", in process {finding['pid']}: {finding['process']})\n" in done.stderr
    assert (run["note"], "note:" in done.stderr) == (None, False)
    skips = "import atexit, os; atexit.register(lambda: 1 / 0); os._exit(0)"
    done = clean_exit("--report-json", str(path), "-c", skips)
    assert done.returncode == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert run["findings"] == []
    assert run["note"].startswith("its exit handlers did not all run: ")
    assert f"\n  note: {run['note']}\n" in done.stderr


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
    options = ["--explain", "unraisable"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*CHECKER, *options], stdout=writing, stderr=-1, env=ENVIRONMENT, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
    for where in ("> /dev/full", ">&-"):
        failed = run_command(["bash", "-c", f"{shlex.join([*CHECKER, *options])} {where}"])
        assert (failed.returncode, failed.stderr.count("\n")) == (125, 1)
        assert failed.stderr.startswith("clean-exit: stdout cannot be written to: ")


Usage = Callable[..., tuple[int, str]]


@pytest.fixture
def usage(capsys: pytest.CaptureFixture[str]) -> Usage:
    """Run the command in this process, and return its exit code and stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(arguments)
        except SystemExit as ended:  # From argparse.
            code = int(ended.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("--no-such-option true", "see clean-exit --help"),
        ("--timeout soon true", "argument --timeout: must be more than 0 seconds, got 'soon'"),
        ("--ignore '(' true", "argument --ignore: '(' is not a regular expression"),
        ("--stop-signal NOPE true", "must be a signal name or number such as TERM or 15"),
        ("--stop-signal TERM true", "stop_signal needs either stop_after_s or stop_when"),
        ("--error-exitcode 0 true", "must be a whole number from 1 to 255, got '0'"),
        ("--report-json nowhere/a.json true", "the report 'nowhere/a.json' cannot be written: "),
        ("--report-json words.py true", "would overwrite the program words.py"),
        ("nosuch.py", "'nosuch.py' was not found"),
        ("./words", "'./words' cannot be executed: Exec format error"),
        (".", "'.' cannot be executed: Permission denied"),
    ],
)
def test_wrong_usage_gets_one_line(line: str, printed: str, usage: Usage, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("echo A shell would run this.\n")
    (tmp_path / "words").chmod(0o755)
    code, message = usage(*shlex.split(line))
    assert code in (125, 126, 127)
    assert printed in message
    assert message.count("\n") == 1, message


# The table in pyproject.toml


@pytest.mark.parametrize(
    ("table", "printed"),
    [
        ("timeout = [1, 2]", "timeout must be a number, got [1, 2]"),
        ("timeout = 'soon'", "argument --timeout: must be more than 0 seconds, got 'soon'"),
        ("ignore = [1]", "ignore must be a list of strings, got [1]"),
        ("github = 1", "github must be true or false, got 1"),
        ("error_exitcode = 4", "unknown setting 'error_exitcode' in [tool.clean-exit]"),
        ("timeout = ", "is not valid"),
    ],
)
def test_wrong_setting_gets_one_line_with_the_file(
    table: str, printed: str, usage: Usage, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.clean-exit]\n{table}\n")
    code, message = usage("-q", "true")
    assert code == 125
    assert printed in message
    assert str(tmp_path / "pyproject.toml") in message
    assert message.count("\n") == 1, message


@pytest.mark.slow
def test_every_setting_has_the_effect_of_its_option(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""
[tool.clean-exit]
timeout = 300
max-shutdown = 2.5
resource-warnings = true
ignore = ["KeyError", "qqq|zzz"]
error-exitcode = 9
report-json = "r.json"
children = "count"
github = true
""")
    code = "import atexit; f = open('pyproject.toml'); f = None; atexit.register(lambda: {}['x'])"
    done = clean_exit("-c", code, cwd=tmp_path)
    assert done.returncode == 9
    assert "::error title=" in done.stderr
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [[one["id"] for one in run["findings"]] for run in runs] == [["resource-warning"]]
    assert clean_exit("--error-exitcode", "8", *DIRTY, cwd=tmp_path).returncode == 8
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\ntimeout = '0.5'\n")
    assert clean_exit("sleep", "60", cwd=tmp_path).returncode == 124
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\nmax-shutdown = 0.5\n")
    assert "slow-shutdown" in clean_exit(*SLOW, cwd=tmp_path).stderr
