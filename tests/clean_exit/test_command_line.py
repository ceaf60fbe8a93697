"""The command clean-exit: exit codes, options, reports, settings, and mistakes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support.clean_exit import CHECKER, ENTRY_POINTS, ENVIRONMENT, lint_main, main, run_command
from support.other_pythons import other_pythons
from torch_utils import __version__

CLEAN = ["-c", "print('hello')"]
SLOW = ["-c", "import atexit, time; atexit.register(time.sleep, 1)"]
DIRTY = ["-c", "import atexit; atexit.register(lambda: 1 / 0)"]


@pytest.fixture(autouse=True)
def folder_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on this project's own pyproject.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()


def clean_exit(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_command([*CHECKER, *arguments], cwd=cwd)


def test_both_commands_say_their_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands say it, and run nothing."""
    for command in (main, lint_main):
        with pytest.raises(SystemExit) as ended:
            command(["--version"])
        assert ended.value.code == 0
    assert capsys.readouterr().out == (f"clean-exit {__version__}\nclean-exit-lint {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (CLEAN, 0, "clean: the program exited with 0"),
        (DIRTY, 120, "atexit-error"),
        (["--", sys.executable, *DIRTY], 120, "ZeroDivisionError"),
        (["-c", "raise SystemExit(3)"], 3, "exited with 3"),
        (["-c", DIRTY[1] + "; raise SystemExit(3)"], 3, "atexit-error"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "SIGKILL"),
        (["--timeout", "0.5", "--", "sleep", "60"], 124, "hang"),
        (["--error-exitcode", "77", *DIRTY], 77, "atexit-error"),
        (["--error-exitcode", "77", "-c", "raise SystemExit(3)"], 3, ""),
        (["--ignore", "ZeroDivision", *DIRTY], 0, "clean, 1 ignored"),
        (["--ignore", "KeyError", *DIRTY], 120, "atexit-error"),
        (["--repeat", "3", *CLEAN], 0, "clean"),
        (["--max-shutdown", "0.5", *SLOW], 120, "slow-shutdown"),
        (["no-such-command-here"], 127, "was not found"),
        (["/etc/passwd"], 126, "cannot be executed"),
        ([], 125, "there is no command"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, said: str) -> None:
    """The table of the documentation, each with what says why."""
    done = clean_exit(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_forms_of_a_program(tmp_path: Path) -> None:
    """A file, a module and code, with their own arguments, which are not clean-exit's."""
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
        # Time enough for a busy machine to get there.
        pytest.param(["--stop-after", "10"], DIES, marks=pytest.mark.slow),
    ],
)
def test_a_server_is_stopped(when: list[str], on_stop: str) -> None:
    """Ending because of the signal is success, in each of the usual ways."""
    done = clean_exit("--stop-signal", "TERM", *when, "-c", SERVER.format(on_stop=on_stop))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "listening on 8000\n"
    assert "clean" in done.stderr


def test_a_server_that_does_not_stop() -> None:
    """It is ended after the time allowed, and its stack says where it was."""
    program = SERVER.format(on_stop="pass")
    options = ["--stop-signal", "SIGTERM", "--stop-when", "listening", "--timeout", "6"]
    done = clean_exit(*options, "-c", program)
    assert done.returncode == 124
    assert 'File "<string>", line 7' in done.stderr


def test_a_server_with_a_dirty_shutdown() -> None:
    """Code 0 after the signal is not enough."""
    program = SERVER.format(on_stop="sys.exit(0)") + "\n"
    dirty = "import atexit; atexit.register(lambda: 1 / 0)\n" + program
    done = clean_exit("--stop-signal", "15", "--stop-when", "listening", "-c", dirty)
    assert done.returncode == 120


def test_reports(tmp_path: Path) -> None:
    """JSON of a stated schema, JUnit XML, and annotations."""
    files = [tmp_path / "r.json", tmp_path / "r.xml"]
    options = ["--report-json", str(files[0]), "--report-junit", str(files[1]), "--github"]
    done = clean_exit(*options, "--repeat", "2", *DIRTY)
    report = json.loads(files[0].read_text())
    assert report["schema_version"] == 1
    assert report["clean"] is False
    assert len(report["runs"]) == 2
    run = report["runs"][0]
    assert run["exit_code"] == 120
    assert run["returncode"] == 0
    (finding,) = run["findings"]
    assert (finding["id"], finding["phase"]) == ("atexit-error", "atexit")
    assert finding["help"] == "clean-exit --explain atexit-error"
    suite = ElementTree.parse(files[1]).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    assert suite[0][0].get("type") == "atexit-error"
    assert "::error title=clean-exit%3A atexit-error::ZeroDivisionError" in done.stderr


def test_junit_survives_odd_characters(tmp_path: Path) -> None:
    """What XML cannot hold is replaced."""
    path = tmp_path / "r.xml"
    odd = "\\x00\\x1b\\ud800\\uffff\\ufffe <&>"
    code = f"import atexit\ndef f(): raise ValueError('{odd}')\natexit.register(f)"
    assert clean_exit("--report-junit", str(path), "-c", code).returncode == 120
    text = ElementTree.parse(path).getroot()[0][0][0].text or ""
    assert "ValueError" in text
    assert "<&>" in text


def test_settings_are_defaults(tmp_path: Path) -> None:
    """pyproject.toml gives defaults, for folders below too; the command line goes before them."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.clean_exit]\nerror-exitcode = 9\nignore = ["KeyError"]\ntimeout = 30\n'
    )
    below = tmp_path / "below"
    below.mkdir()
    assert clean_exit(*DIRTY, cwd=below).returncode == 9
    assert clean_exit("--error-exitcode", "8", *DIRTY, cwd=below).returncode == 8
    keyed = ["-c", "import atexit; atexit.register(lambda: {}['x'])"]
    assert clean_exit(*keyed, cwd=below).returncode == 0


def test_colours_are_only_used_where_asked_for() -> None:
    """Only where they are asked for, or seen."""
    assert "\033[" in clean_exit("--color", "always", *DIRTY).stderr
    assert "\033[" not in clean_exit(*DIRTY).stderr


def test_long_evidence_is_shortened() -> None:
    """Fifteen lines unless -v asks for all."""
    code = "import atexit\ndef f(n): return f(n - 1) if n else 1 / 0\natexit.register(f, 20)"
    assert "more lines (-v shows them)" in clean_exit("-c", code).stderr
    assert "more lines" not in clean_exit("-v", "-c", code).stderr


def test_many_findings_are_shortened() -> None:
    """Ten in full, and how many more of each kind there are; -v shows them all."""
    code = "import atexit\nfor n in range(13): atexit.register(lambda n=n: {}[n])"
    assert "... 3 more findings: 3 atexit-error (-v shows them)" in clean_exit("-c", code).stderr
    assert "more findings" not in clean_exit("-v", "-c", code).stderr


# Mistakes

# What people write by mistake, and what they are told.
MISTAKES = {
    "--no-such-option true": "see clean-exit --help",
    "--timeout soon true": "not a number",
    "--timeout -1 true": "not more than 0",
    "--ignore '(' true": "not a regular expression",
    "--stop-signal NOPE true": "not a signal",
    "-m": "needs an argument",
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


# Many runs of the command in one process, for what never starts a program, or only `true`.
BATCH = """
import contextlib, importlib, io, json, pathlib, sys
if sys.argv[3:]: sys.modules["tomli"] = None
module, _, name = sys.argv[1].partition(":")
main = getattr(importlib.import_module(module), name)
results = {}
for case, (settings, arguments) in json.loads(sys.argv[2]).items():
    pathlib.Path("pyproject.toml").write_text(settings, encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try: code = main(arguments)
        except SystemExit as ended: code = ended.code
    results[case] = code, said.getvalue()
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


def test_a_mistake_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "lost").write_text("#!/nowhere/python\n")
    (tmp_path / "lost").chmod(0o755)
    cases = {line: ("", shlex.split(line)) for line in MISTAKES}
    for line, (code, said) in run_each(cases, tmp_path).items():
        assert code in (125, 126, 127), line
        assert MISTAKES[line] in said
        assert said.count("\n") == 1, said


@pytest.fixture
def restricted() -> Sequence[str]:
    """Put before a command: root too is then held to the permissions of files."""
    if os.geteuid():
        return ()
    if not shutil.which("setpriv"):
        pytest.skip("root may enter everywhere, and there is no setpriv")
    return ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")


def test_a_folder_that_may_not_be_entered(restricted: Sequence[str], tmp_path: Path) -> None:
    """One line for it, though looking at what is in it is refused as well."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    done = run_command([*restricted, *CHECKER, str(closed / "program")])
    closed.chmod(0o700)
    assert done.returncode == 126
    said = f"{closed / 'program'} cannot be executed (Permission denied)"
    assert done.stderr == f"clean-exit: {said}\n"


def test_a_report_in_a_folder_that_may_not_be_written_to(
    restricted: Sequence[str], tmp_path: Path
) -> None:
    """One that is there already may be overwritten."""
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
    assert "may not be written to" in new.stderr


def test_a_report_in_a_folder_that_was_removed() -> None:
    """The program could run there; its report has no place."""
    command = shlex.join([*CHECKER, "--report-json", "a", "true"])
    done = run_command(["sh", "-c", f"mkdir gone; cd gone; rmdir ../gone; {command}"])
    assert (done.returncode, done.stderr.count("\n")) == (125, 1)
    assert "'a' cannot be written: the current folder has been removed" in done.stderr


@pytest.mark.parametrize("asked", [["--help"], ["--explain", "unraisable"]], ids=str)
def test_stdout_that_nobody_reads(asked: list[str]) -> None:
    """A reader that has gone is no error; a disk that is full, or no stdout at all, is one."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*CHECKER, *asked], stdout=writing, stderr=-1, env=ENVIRONMENT, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
    for where in ("> /dev/full", ">&-"):
        done = run_command(["bash", "-c", f"{shlex.join([*CHECKER, *asked])} {where}"])
        assert (done.returncode, done.stderr.count("\n")) == (125, 1)
        assert done.stderr.startswith("clean-exit: stdout cannot be written to: ")


# The table in pyproject.toml

# Each says that the exit code is wrong, which is then complained about.
TABLES = {
    "plain": "[tool.clean_exit]\nerror-exitcode = 0\n",
    "hyphen": "[tool.clean-exit]\nerror-exitcode = 0\n",
    "spaces": "[ tool . clean-exit ]\nerror-exitcode = 0\n",
    "quoted": "['tool'.\"clean-exit\"]\n'error-exitcode' = 0\n",
    "inline": "[tool]\nclean-exit = { error-exitcode = 0 }\n",
    "inline twice": "tool = { x = {}, clean-exit = { error-exitcode = 0 } }\n",
    "dotted": "tool.clean-exit.error-exitcode = 0\n",
    "below tool": "[tool]\nclean_exit.error-exitcode = 0\n",
    "after text": "[project]\ndescription = '''\n[tool.x]\n'''\n"
    "[tool.clean-exit]\nerror-exitcode = 0\n",
}
NO_TABLES = {
    "comment": "# [tool.clean_exit]\n# error-exitcode = 0\n",
    "comment after": "[tool.x] # see [tool.clean_exit]\n",
    "in a string": "[project]\ndescription = '''\n[tool.clean_exit]\nerror-exitcode = 0\n'''\n",
    "a script": "[project.scripts]\nclean-exit = 'x:main'\n[tool.x]\ny = 'clean-exit'\n",
    "a dependency": '[project]\nname = "clean-exit"\ndependencies = ["clean-exit"] # clean_exit\n',
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
def test_every_way_to_write_a_table(tmp_path: Path) -> None:
    for name, (code, said) in run_with(TABLES, tmp_path).items():
        assert code == 125, name
        assert "error-exitcode: 0 is not an exit code of a failure" in said, name


@needs_a_parser
def test_tables_of_others_and_text_like_tables_are_ignored(tmp_path: Path) -> None:
    assert run_with(NO_TABLES, tmp_path) == {name: [0, ""] for name in NO_TABLES}


def test_without_a_parser_a_table_is_an_error(tmp_path: Path) -> None:
    """Python 3.10 without tomli says so; what is not a table still is nothing."""
    python = {f"3.{sys.version_info[1]}": sys.executable, **other_pythons()}.get("3.10")
    if python is None:
        pytest.skip("there is no Python 3.10")
    options = {"python": python, "without_tomli": True}
    for name, (code, said) in run_with(TABLES, tmp_path, **options).items():
        assert (code, "needs tomli" in said) == (125, True), name
    assert run_with(NO_TABLES, tmp_path, **options) == {name: [0, ""] for name in NO_TABLES}


WRONG_VALUES = {
    "repeat = 0": "repeat: 0 is less than 1",
    "repeat = true": "repeat has to be a whole number, not True",
    "error-exitcode = 256": "256 is not an exit code",
    "error-exitcode = 0": "0 is not an exit code of a failure",
    "error-exitcode = 1.5": "has to be a whole number",
    "ignore = [1]": "ignore has to be a list of strings, not [1]",
    "ignore = 'x'": "ignore has to be a list of strings",
    "ignore = ['(']": "is not a regular expression",
    "timeout = 0": "is not more than 0 seconds",
    "timeout = nan": "is not a length of time",
    "max-shutdown = -1": "is not more than 0 seconds",
    "timeout = '3'": "has to be a number of seconds",
    "color = 'blue'": "is not one of auto, always, never",
    "github = 1": "has to be true or false",
    "tiemout = 3": "it may have",
    "error-exitcode = 3\nerror_exitcode = 4": "twice",
    "timeout = ": "is not TOML",
    f"ignore = {'[' * 5000}": "is nested too deeply",
}


WRONG_TABLES = {
    "[tool]\nclean-exit = 3\n": "has to be a table",
    "[[tool.clean-exit]]\ntimeout = 3\n": "has to be a table",
    "[tool.clean-exit]\n[tool.clean_exit]\n": "has both",
    **{f"[tool.clean-exit]\n{text}\n": said for text, said in WRONG_VALUES.items()},
}


@needs_a_parser
def test_a_wrong_setting_gets_one_line(tmp_path: Path) -> None:
    """It names the file, and what is wrong in it."""
    for text, (code, said) in run_with({text: text for text in WRONG_TABLES}, tmp_path).items():
        assert code == 125, text
        assert WRONG_TABLES[text] in said
        assert str(tmp_path / "pyproject.toml") in said
        assert said.count("\n") == 1, said


def test_all_settings(tmp_path: Path) -> None:
    """They do what the options of the same names do."""
    (tmp_path / "pyproject.toml").write_text("""
[tool.clean-exit]
timeout = 300
max-shutdown = 2.5
repeat = 2
resource-warnings = true
ignore = ["KeyError", "qqq|zzz"]
error-exitcode = 9
report-json = "r.json"
report_junit = "r.xml"
github = true
color = "always"
""")
    code = "import atexit; f = open('pyproject.toml'); f = None; atexit.register(lambda: {}['x'])"
    done = clean_exit("-c", code, cwd=tmp_path)
    assert done.returncode == 9
    assert "\033[" in done.stderr
    assert "::error title=" in done.stderr
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [[one["id"] for one in run["findings"]] for run in runs] == [["resource-warning"]] * 2
    assert ElementTree.parse(tmp_path / "r.xml").getroot()[0].get("tests") == "2"
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\ntimeout = 0.5\n")
    assert clean_exit("sleep", "60", cwd=tmp_path).returncode == 124
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\nmax-shutdown = 0.5\n")
    assert "slow-shutdown" in clean_exit(*SLOW, cwd=tmp_path).stderr


def test_odd_pyproject_files(tmp_path: Path) -> None:
    """Bytes that are not UTF-8; a folder by that name; a current folder that is gone."""
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.clean-exit] # \xff\n")
    (tmp_path / "below" / "pyproject.toml").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "below"):
        done = clean_exit("true", cwd=folder)
        assert (done.returncode, done.stderr.count("\n")) == (125, 1)
        assert "not UTF-8" in done.stderr
    script = f"mkdir gone; cd gone; rmdir ../gone; {shlex.join([*CHECKER, '-q', 'true'])}"
    done = run_command(["sh", "-c", script], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
