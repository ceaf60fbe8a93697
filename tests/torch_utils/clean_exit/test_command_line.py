"""The command clean-exit: exit codes, options, streams, signals and reports."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torch_utils import __version__
from torch_utils.clean_exit import cli
from torch_utils.clean_exit_lint import cli as lint_cli

COMMAND = [sys.executable, "-m", "torch_utils.clean_exit"]
CLEAN = ["-c", "print('hello')"]
SLOW = ["-c", "import atexit, time; atexit.register(time.sleep, 1)"]
DIRTY = ["-c", "import atexit; atexit.register(lambda: 1 / 0)"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands say it, and run nothing."""
    for main in (cli.main, lint_cli.main):
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        assert ended.value.code == 0
    assert capsys.readouterr().out == (f"clean-exit {__version__}\nclean-exit-lint {__version__}\n")


def clean_exit(
    *arguments: str, cwd: Path | None = None, stdin: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, cwd=cwd, input=stdin, check=False, timeout=600
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode("latin-1"), done.stderr.decode()
    )


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
        (["--no-such-option", "true"], 125, "see clean-exit --help"),
        (["--timeout", "soon", "true"], 125, "not a number"),
        (["--timeout", "-1", "true"], 125, "not more than 0"),
        (["--ignore", "(", "true"], 125, "not a regular expression"),
        (["--stop-signal", "NOPE", "true"], 125, "not a signal"),
        (["--stop-signal", "TERM", "true"], 125, "--stop-after and --stop-when"),
        (["--report-json", "/no/such/folder/x.json", "true"], 125, "cannot be written"),
        (["-m"], 125, "needs an argument"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, said: str) -> None:
    """The table of the documentation, each with one line that says why."""
    done = clean_exit(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    if code in (125, 126, 127):
        assert done.stderr.count("\n") == 1


def test_forms_of_a_program(tmp_path: Path) -> None:
    """A file, a module and code, with their own arguments, which are not clean-exit's."""
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    expected = "['-q', '--timeout', '--']\n"
    for form in (["program.py"], ["-m", "program"], ["--", sys.executable, "program.py"]):
        done = clean_exit("-q", *form, "-q", "--timeout", "--", cwd=tmp_path)
        assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


def test_streams_are_untouched() -> None:
    """Binary output arrives as it was, and stdin is the program's."""
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    data = os.urandom(100_000)
    done = clean_exit("-q", "-c", code, stdin=data)
    assert done.stdout.encode("latin-1") == data
    code = "import sys; sys.stderr.buffer.write(bytes(range(256))); print('out')"
    raw = subprocess.run([*COMMAND, "-q", "-c", code], capture_output=True, check=True)
    assert (raw.stdout, raw.stderr) == (b"out\n", bytes(range(256)))


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2])
def test_a_gigabyte(file: int) -> None:
    """As fast as it comes, in bounded memory, and every byte of it."""
    code = f"import os\nblock = b'x' * (1 << 20)\nfor _ in range(512): os.write({file}, block)\n"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); "
    checker = limit + "from torch_utils.clean_exit.cli import main; raise SystemExit(main())"
    digest = hashlib.md5(usedforsecurity=False)
    with subprocess.Popen(
        [sys.executable, "-c", checker, "-q", "-c", code],
        stdout=subprocess.PIPE if file == 1 else None,
        stderr=subprocess.PIPE if file == 2 else None,
    ) as process:
        stream = process.stdout if file == 1 else process.stderr
        assert stream is not None
        count = 0
        while data := stream.read(1 << 20):
            count += len(data)
            digest.update(data)
    assert process.returncode == 0
    assert count == 512 << 20
    assert digest.digest() == hashlib.md5(b"x" * count, usedforsecurity=False).digest()


def test_output_is_live() -> None:
    """A line of stderr comes when it is written, not when the program ends."""
    code = "import sys, time; print('first', file=sys.stderr, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*COMMAND, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        assert process.stderr.readline() == "first\n"
        process.stdin.close()
        assert "clean: the program exited with 0" in process.stderr.read()


SERVER = """
import signal, sys, time
def stop(number, frame):
    {on_stop}
signal.signal(signal.SIGTERM, stop)
print("listening on 8000", flush=True)
while True: time.sleep(0.05)
"""
DIES = "signal.signal(number, signal.SIG_DFL); signal.raise_signal(number)"


@pytest.mark.parametrize("on_stop", ["sys.exit(0)", "sys.exit(143)", DIES])
@pytest.mark.parametrize(
    "when",
    [
        ["--stop-when", r"listening on \d+"],
        # Time enough for a busy machine to get there.
        pytest.param(["--stop-after", "10"], marks=pytest.mark.slow),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_checker(number: signal.Signals) -> None:
    """They reach the program, and the report comes nevertheless."""
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [*COMMAND, sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert "clean-exit: " in said
    assert "crash" not in said


def test_orphans_without_an_environment() -> None:
    """A daemon that has lost its parent and its environment is found all the same."""
    script = "(setsid env -i sleep 61.5 >/dev/null 2>&1 &)"
    done = clean_exit("--", "sh", "-c", script)
    assert done.returncode == 120
    assert "sleep 61.5" in done.stderr
    for _ in range(300):  # The kernel takes its time to end it, where the machine is busy.
        table = subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
        if "61.5" not in table:
            break
        time.sleep(0.1)
    assert "61.5" not in table


def test_only_its_own_processes_are_ended() -> None:
    """What somebody else has started lives on."""
    with subprocess.Popen(["sleep", "60"]) as other:
        done = clean_exit("--", "sh", "-c", "sleep 62.5 &")
        assert done.returncode == 120
        assert other.poll() is None
        other.kill()


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


def test_settings(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("tiemout = 3", "it may have"),
        ("timeout = 'x'", "has to be a number of seconds"),
        ("timeout = ", "pyproject.toml is not TOML: "),
        ("github = 1", "has to be true or false"),
    ],
)
def test_bad_settings(table: str, said: str, tmp_path: Path) -> None:
    """One line that names the file and what is wrong."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.clean_exit]\n{table}\n")
    done = clean_exit("true", cwd=tmp_path)
    assert done.returncode == 125
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_colours() -> None:
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
