"""The command clean-exit: exit codes, options, reports, settings and wrong usage."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.clean_exit import (
    CHECKER,
    ENTRY_POINTS,
    ENVIRONMENT,
    PACKAGE,
    lint_main,
    main,
    run_command,
)
from support.other_pythons import other_pythons
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


SLOW_TEST = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (CLEAN, 0, "clean-exit: clean exit; the program's exit code is 0 (took "),
        (DIRTY, 120, "atexit-error"),
        pytest.param(["--", sys.executable, *DIRTY], 120, "ZeroDivisionError", marks=SLOW_TEST),
        (["-c", "raise SystemExit(3)"], 3, "clean exit; the program's exit code is 3 (took "),
        pytest.param(
            ["-c", DIRTY[1] + "; raise SystemExit(3)"], 3, "atexit-error", marks=SLOW_TEST
        ),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "SIGKILL"),
        (["--timeout", "0.5", "--", "sleep", "60"], 124, "hang"),
        (["--error-exitcode", "77", *DIRTY], 77, "atexit-error"),
        pytest.param(
            ["--error-exitcode", "77", "-c", "raise SystemExit(3)"], 3, "", marks=SLOW_TEST
        ),
        (
            ["--ignore", "ZeroDivision", *DIRTY],
            0,
            "clean exit, 1 ignored; the program's exit code is 0 (took ",
        ),
        pytest.param(["--ignore", "KeyError", *DIRTY], 120, "atexit-error", marks=SLOW_TEST),
        pytest.param(["--repeat", "3", *CLEAN], 0, "clean", marks=SLOW_TEST),
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
        *((WHEN, on_stop) for on_stop in ("sys.exit(0)", "sys.exit(143)", DIES)),
        # Enough time to start on a busy machine.
        pytest.param(["--stop-after", "10"], DIES, marks=pytest.mark.slow),
    ],
)
def test_server_that_ends_by_the_stop_signal_succeeds(when: list[str], on_stop: str) -> None:
    done = clean_exit("--stop-signal", "TERM", *when, "-c", SERVER.format(on_stop=on_stop))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "listening on 8000\n"
    assert "clean" in done.stderr


@pytest.mark.slow
def test_server_that_ignores_the_stop_signal_is_killed_with_its_stack() -> None:
    program = SERVER.format(on_stop="pass")
    options = ["--stop-signal", "SIGTERM", "--stop-when", "listening", "--timeout", "6"]
    done = clean_exit(*options, "-c", program)
    assert done.returncode == 124
    assert 'File "<string>", line 7' in done.stderr


def test_server_with_an_unclean_shutdown_is_reported() -> None:
    program = SERVER.format(on_stop="sys.exit(0)") + "\n"
    dirty = "import atexit; atexit.register(lambda: 1 / 0)\n" + program
    done = clean_exit("--stop-signal", "15", "--stop-when", "listening", "-c", dirty)
    assert done.returncode == 120


def test_json_report_has_each_run(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    clean_exit("--report-json", str(path), "--repeat", "2", *DIRTY)
    report = json.loads(path.read_text())
    assert report["schema_version"] == 1
    assert report["clean"] is False
    assert len(report["runs"]) == 2
    run = report["runs"][0]
    assert run["exit_code"] == 120
    assert run["returncode"] == 0
    (finding,) = run["findings"]
    assert (finding["id"], finding["phase"]) == ("atexit-error", "atexit")
    assert finding["help"] == "clean-exit --explain atexit-error"


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
    done = clean_exit("-q", "--github", "--timeout", "2", "src/dirty.py", cwd=tmp_path)
    assert "::error file=src/dirty.py,line=2,title=clean-exit%3A hang::" in done.stderr


CRASHES = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; os.abort()'])"
DIRTY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, *{DIRTY!r}], stderr=-3)"


@pytest.mark.parametrize("code", [CRASHES, DIRTY_CHILD, CRASHES.replace("'-c'", "'-I', '-c'")])
def test_findings_about_children_can_be_left_out(code: str) -> None:
    """They name the option; findings about the program itself stay."""
    option = "--children=ignore"
    done = clean_exit(option, "-c", code)
    assert done.returncode == 0, done.stderr
    assert clean_exit(option, "-c", f"{DIRTY[1]}; {code}").returncode == 120
    below = ["--", "sh", "-c", shlex.join([sys.executable, *DIRTY]) + "; exit 0"]
    assert clean_exit(option, *below).returncode == 120  # The program is below a wrapper.
    if "-I" not in code:  # Nothing shows such a crash, unless it prints a message.
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


def test_summary_tells_when_python_itself_gave_120() -> None:
    flush = "import sys, time; sys.stdin.readline(); print('x')"
    script = (
        f"{shlex.join([*CHECKER, '-c', flush])} <r | (exec 0<&-; echo >r); echo ${{PIPESTATUS[0]}}"
    )
    done = run_command(
        ["bash", "-c", f"mkfifo r; {script}"],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": ""},
    )
    assert done.stdout == "120\n"
    expected = "1 finding; the program's exit code is 120 by Python itself, which could not write"
    assert expected in done.stderr
    own = clean_exit("-c", "raise SystemExit(120)")
    assert "clean exit; the program's exit code is 120 (took" in own.stderr


def test_system_without_fcntl_gets_one_line() -> None:
    """Such as Windows."""
    code = (
        "import sys; sys.modules['fcntl'] = None; from clean_exit.cli import main; sys.exit(main())"
    )
    done = run_command([sys.executable, "-c", code, "true"])
    assert done.returncode == 125
    assert done.stderr == "clean-exit: clean-exit needs Linux or macOS; on Windows, run it in WSL\n"


def test_report_has_child_processes_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    script = f"{shlex.join([sys.executable, *DIRTY])}; exit 0"
    done = clean_exit("--report-json", str(path), "--", "sh", "-c", script)
    assert done.returncode == 120
    (run,) = json.loads(path.read_text())["runs"]
    (finding,) = run["findings"]
    assert finding["process"] == " ".join([sys.executable, *DIRTY])
    assert f", in process {finding['pid']}: {finding['process']}\n" in done.stderr
    assert (run["note"], "note:" in done.stderr) == (None, False)
    skips = "import atexit, os; atexit.register(lambda: 1 / 0); os._exit(0)"
    done = clean_exit("--report-json", str(path), "-c", skips)
    assert done.returncode == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert run["findings"] == []
    assert run["note"].startswith("its exit handlers did not all run: ")
    assert f"\n  note: {run['note']}\n" in done.stderr


def test_killed_keeper_is_a_checker_error(tmp_path: Path) -> None:
    """The reports of earlier runs are still written, and the program ends."""
    path = tmp_path / "r.json"
    script = "[ -e again ] && { sleep 1; kill -9 $PPID; sleep 2; touch on; }; touch again"
    done = clean_exit("--report-json", str(path), "--repeat", "3", "--", "sh", "-c", script)
    assert done.returncode == 125
    first, second = done.stderr.splitlines()
    assert first.startswith("clean-exit: clean exit, not probed; ")
    time.sleep(3)
    assert not Path("on").exists()
    assert second.startswith("clean-exit: the ")  # supervising process was killed
    assert [run["clean"] for run in json.loads(path.read_text())["runs"]] == [True]


# Imports each module of a package and prints the names.
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [one.name for one in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names: importlib.import_module(name)
print(*names)
"""


def test_importing_a_module_runs_nothing(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-c", IMPORT_ALL, PACKAGE, "", "", "", "touch", "ran"], cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {f"{PACKAGE}.keeper", f"{PACKAGE}.__main__"} <= set(done.stdout.split())
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_settings_are_defaults_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.clean-exit]\nerror-exitcode = 9\nignore = ["KeyError"]\ntimeout = 30\n'
    )
    below = tmp_path / "below"
    below.mkdir()
    assert clean_exit(*DIRTY, cwd=below).returncode == 9
    assert clean_exit("--error-exitcode", "8", *DIRTY, cwd=below).returncode == 8
    keyed = ["-c", "import atexit; atexit.register(lambda: {}['x'])"]
    assert clean_exit(*keyed, cwd=below).returncode == 0
    # A value that looks like an option does not disable the settings.
    assert clean_exit("--ignore", "x--explain", *DIRTY, cwd=below).returncode == 9


@pytest.mark.slow
def test_long_evidence_is_shortened_without_v() -> None:
    code = "import atexit\ndef f(n): return f(n - 1) if n else 1 / 0\natexit.register(f, 20)"
    assert "more lines (-v shows them)" in clean_exit("-c", code).stderr
    assert "more lines" not in clean_exit("-v", "-c", code).stderr


@pytest.mark.slow
def test_many_findings_are_shortened_without_v() -> None:
    code = "import atexit\nfor n in range(13): atexit.register(lambda n=n: {}[n])"
    assert "... 3 more findings: 3 atexit-error (-v shows them)" in clean_exit("-c", code).stderr
    assert "more findings" not in clean_exit("-v", "-c", code).stderr


# Wrong command lines and a part of the message.
MISTAKES = {
    "--no-such-option true": "see clean-exit --help",
    "--timeout soon true": "argument --timeout: must be a number of seconds, got 'soon'",
    "--timeout -1 true": "argument --timeout: must be a number of seconds, got '-1'",
    "--timeout 0 true": "argument --timeout: must be more than 0 seconds",
    "--repeat 0 true": "argument --repeat: must be a whole number of at least 1, got '0'",
    "--ignore '' true": "argument --ignore: a regular expression must not be empty",
    "--ignore '(' true": "argument --ignore: '(' is not a regular expression",
    "--stop-signal NOPE true": "must be a signal name or number such as TERM or 15, got 'NOPE'",
    "-m": "needs an argument",
    "nosuch.py": "nosuch.py was not found: there is no such file here, and no such command in PATH",
    "nosuch": "nosuch was not found: there is no such command in PATH",
    "a\\ folder/nosuch": "'a folder/nosuch' was not found",
    "./words": "./words cannot be executed (Exec format error)",
    "'python -c pass'": "it is one word; try clean-exit -- python -c pass",
    ".": ". is a folder",
    "./lost": "cannot be executed: the interpreter that its first line names was not found",
    "--stop-after 1 true": "--stop-after needs --stop-signal",
    "--stop-signal TERM true": "--stop-signal needs --stop-after or --stop-when",
    "--report-json nowhere/a.json true": "the report 'nowhere/a.json' cannot be written: ",
    "--error-exitcode 0 true": "must be a whole number from 1 to 255, got '0'",
    "--report-json '' true": "argument --report-json: must not be empty",
    "--report-json words.py true": "would overwrite the program words.py",
    "--stop-after 1 --stop-when x --stop-signal TERM true": "--stop-after or --stop-when, not both",
}


# Runs the command many times in one process, for cases that start at most `true`.
BATCH = """
import contextlib, importlib, io, json, pathlib, sys
if sys.argv[3:]: sys.modules["tomli"] = None
module, _, name = sys.argv[1].partition(":")
main = getattr(importlib.import_module(module), name)
results = {}
for case, (settings, arguments) in json.loads(sys.argv[2]).items():
    pathlib.Path("pyproject.toml").write_text(settings, encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try: code = main(arguments)
        except SystemExit as ended: code = ended.code
    results[case] = code, printed.getvalue()
print(json.dumps(results))
"""


def run_each(
    cases: Mapping[str, tuple[str, Sequence[str]]],
    folder: Path,
    python: str = sys.executable,
    without_tomli: bool = False,
) -> dict[str, tuple[int, str]]:
    """Run the command with each case's settings and arguments; return exit codes and stderr."""
    arguments = [ENTRY_POINTS["console_scripts", "clean-exit"], json.dumps(cases)]
    options = ["without tomli"] if without_tomli else []
    done = run_command([python, "-c", BATCH, *arguments, *options], cwd=folder)
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[int, str]] = json.loads(done.stdout)
    assert results.keys() == cases.keys()
    return results


def test_wrong_usage_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "lost").write_text("#!/nowhere/python\n")
    (tmp_path / "words").write_text("echo A shell would run this.\n")
    for name in ("lost", "words"):
        (tmp_path / name).chmod(0o755)
    cases = {line: ("", shlex.split(line)) for line in MISTAKES}
    for line, (code, printed) in run_each(cases, tmp_path).items():
        assert code in (125, 126, 127), line
        assert MISTAKES[line] in printed
        assert printed.count("\n") == 1, printed


@pytest.fixture
def restricted() -> Sequence[str]:
    """Return a prefix for commands that makes root respect the permissions of files."""
    if os.geteuid():
        return ()
    if not shutil.which("setpriv"):
        pytest.skip("root ignores permissions, and there is no setpriv")
    return ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")


def test_program_in_a_folder_without_permission_gets_one_line(
    restricted: Sequence[str], tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    done = run_command([*restricted, *CHECKER, str(closed / "program")])
    closed.chmod(0o700)
    assert done.returncode == 126
    printed = f"{closed / 'program'} cannot be executed (Permission denied)"
    assert done.stderr == f"clean-exit: {printed}\n"


@pytest.mark.slow
def test_report_in_a_read_only_folder_overwrites_but_does_not_create(
    restricted: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "there.json").touch()
    tmp_path.chmod(0o500)
    command = [*restricted, *CHECKER, "-q", "--report-json"]
    there, new = (
        run_command([*command, name, "true"], cwd=tmp_path) for name in ("there.json", "new.json")
    )
    tmp_path.chmod(0o700)
    assert (there.returncode, there.stderr) == (0, "")
    assert json.loads((tmp_path / "there.json").read_text())["clean"]
    assert (new.returncode, new.stderr.count("\n")) == (125, 1)
    assert "the report 'new.json' cannot be written: Permission denied" in new.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--help"], ["--explain", "unraisable"]], ids=str)
def test_closed_pipe_is_no_error_but_a_full_disk_is(options: list[str]) -> None:
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


# The table in pyproject.toml

TABLE = "[tool.clean-exit] argument"
# Each has an invalid exit code, so that the error shows that the table was read.
TABLES = {
    "plain": "[tool.clean-exit]\nerror-exitcode = 0\n",
    "inline twice": "tool = { x = {}, clean-exit = { error-exitcode = 0 } }\n",
    "dotted": "tool.clean-exit.error-exitcode = 0\n",
    "after text": "[project]\ndescription = '''\n[tool.x]\n'''\n"
    "[tool.clean-exit]\nerror-exitcode = 0\n",
}
NO_TABLES = {
    "in a string": "[project]\ndescription = '''\n[tool.clean-exit]\nerror-exitcode = 0\n'''\n",
    "a script": "[project.scripts]\nclean-exit = 'x:main'\n[tool.x]\ny = 'clean-exit'\n",
    "another tool": "[tool.x.clean-exit]\ny = 3\n[clean-exit]\n",
    "broken elsewhere": "[tool.x\ny = \n",
}


def run_with(texts: Mapping[str, str], folder: Path, **options: Any) -> dict[str, tuple[int, str]]:
    cases = {name: (text, ["-q", "true"]) for name, text in texts.items()}
    return run_each(cases, folder, **options)


needs_a_parser = pytest.mark.skipif(
    not (find_spec("tomllib") or find_spec("tomli")), reason="there is no parser of TOML"
)


@needs_a_parser
def test_settings_are_read_from_every_form_of_the_table(tmp_path: Path) -> None:
    for name, (code, printed) in run_with(TABLES, tmp_path).items():
        assert code == 125, name
        assert f"{TABLE} --error-exitcode: must be a whole number from 1 to 255" in printed, name


@pytest.mark.slow
@needs_a_parser
def test_other_tables_and_text_like_tables_are_ignored(tmp_path: Path) -> None:
    assert run_with(NO_TABLES, tmp_path) == {name: [0, ""] for name in NO_TABLES}


@pytest.mark.slow
def test_settings_on_python_3_10_need_tomli(tmp_path: Path) -> None:
    """Files without the table need no parser."""
    python = {f"3.{sys.version_info[1]}": sys.executable, **other_pythons()}.get("3.10")
    if python is None:
        pytest.skip("there is no Python 3.10")
    options = {"python": python, "without_tomli": True}
    for name, (code, printed) in run_with(TABLES, tmp_path, **options).items():
        assert (code, "needs tomli" in printed) == (125, True), name
    others = {"others": "[tool.x]\ny = 3\n", "broken": NO_TABLES["broken elsewhere"], "empty": ""}
    assert run_with(others, tmp_path, **options) == {name: [0, ""] for name in others}


WRONG_VALUES = {
    "repeat = 0": f"{TABLE} --repeat: must be a whole number of at least 1, got '0'",
    "repeat = true": "[tool.clean-exit] repeat has the wrong type: True",
    "timeout = [1, 2]": "[tool.clean-exit] timeout has the wrong type: [1, 2]",
    "ignore = {a = 1}": "[tool.clean-exit] ignore has the wrong type: {'a': 1}",
    "error-exitcode = 256": f"{TABLE} --error-exitcode: must be a whole number from 1 to 255",
    "error-exitcode = 0": f"{TABLE} --error-exitcode: must be a whole number from 1 to 255",
    "error-exitcode = 1.5": f"{TABLE} --error-exitcode: must be a whole number from 1 to 255",
    "ignore = ['(']": f"{TABLE} --ignore: '(' is not a regular expression",
    "timeout = 0": f"{TABLE} --timeout: must be more than 0 seconds",
    "timeout = nan": f"{TABLE} --timeout: must be a number of seconds, got 'nan'",
    "timeout = 'soon'": f"{TABLE} --timeout: must be a number of seconds, got 'soon'",
    "max-shutdown = -1": f"{TABLE} --max-shutdown: must be a number of seconds, got '-1'",
    "github = 1": "[tool.clean-exit] github has the wrong type: 1",
    "tiemout = 3": "unknown setting 'tiemout' in [tool.clean-exit]",
    "error_exitcode = 4": "unknown setting 'error_exitcode' in [tool.clean-exit]",
    "ignore = [1]": "[tool.clean-exit] ignore has the wrong type: [1]",
    "timeout = ": "is not valid",
    f"ignore = {'[' * 5000}": "is not valid",
}


WRONG_TABLES = {
    "[tool]\nclean-exit = 3\n": "tool.clean-exit must be a table, got 3",
    "[[tool.clean-exit]]\ntimeout = 3\n": "tool.clean-exit must be a table",
    **{f"[tool.clean-exit]\n{text}\n": printed for text, printed in WRONG_VALUES.items()},
}


@needs_a_parser
def test_wrong_setting_gets_one_line_with_the_file(tmp_path: Path) -> None:
    for text, (code, printed) in run_with({text: text for text in WRONG_TABLES}, tmp_path).items():
        assert code == 125, text
        assert WRONG_TABLES[text] in printed
        assert str(tmp_path / "pyproject.toml") in printed
        assert printed.count("\n") == 1, printed


@pytest.mark.slow
def test_every_setting_has_the_effect_of_its_option(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""
[tool.clean-exit]
timeout = 300
max-shutdown = 2.5
repeat = 2
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
    assert [[one["id"] for one in run["findings"]] for run in runs] == [["resource-warning"]] * 2
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\ntimeout = '0.5'\n")
    assert clean_exit("sleep", "60", cwd=tmp_path).returncode == 124
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\nmax-shutdown = 0.5\n")
    assert "slow-shutdown" in clean_exit(*SLOW, cwd=tmp_path).stderr


@pytest.mark.slow
def test_unusual_pyproject_files_do_not_fail(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, a folder of that name, and a removed current folder."""
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.clean-exit] # \xff\n")
    (tmp_path / "below" / "pyproject.toml").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "below"):
        done = clean_exit("true", cwd=folder)
        assert (done.returncode, done.stderr.count("\n")) == (125, 1)
        assert f"{tmp_path / 'pyproject.toml'} is not valid: 'utf-8' codec" in done.stderr
    script = f"mkdir gone; cd gone; rmdir ../gone; {shlex.join([*CHECKER, '-q', 'true'])}"
    done = run_command(["sh", "-c", script], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
