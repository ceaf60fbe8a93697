"""`check`: its reports about many kinds of programs, and systems that lack something."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from clean_exit import check
from tests.support.clean_exit import run_command
from tests.support.other_pythons import other_pythons


def ids(report: Any) -> list[str]:
    return [finding.id for finding in report.findings]


@pytest.mark.parametrize("flags", [[], ["-X", "faulthandler"]], ids=["probe", "program"])
def test_crash_shows_the_stack(flags: list[str]) -> None:
    """From the program's own faulthandler, or from the probe's."""
    code = "import ctypes\ndef inner(): ctypes.string_at(0)\ninner()"
    report = check([sys.executable, *flags, "-c", code])
    assert (report.returncode, report.exit_code) == (-11, 139)
    (finding,) = report.findings
    assert "in inner" in finding.evidence
    assert (finding.summary, finding.phase, finding.process) == ("killed by SIGSEGV", "main", "")
    assert ("Segmentation fault" in report.stderr) == bool(flags)


def test_message_on_stderr_counts_once() -> None:
    """The record may have the same event."""
    quoted = f"import sys; sys.stderr.write({MESSAGE!r})"
    report = check(["-c", quoted])
    assert [(f.id, f.summary) for f in report.findings] == [("unraisable", "ValueError: x in <f>")]
    assert check(["-c", quoted], ignore=["ValueError: x in <f>"]).clean
    both = "class A:\n    def __del__(self): raise ValueError('y')\nA()\n"
    assert [f.summary[:13] for f in check(["-c", both]).findings] == ["ValueError: y"]
    twice = check(["-c", both + quoted])
    assert [f.summary[:13] for f in twice.findings] == ["ValueError: y", "ValueError: x"]


SLOW = "import atexit, time\ndef flush(): time.sleep(1)\natexit.register(flush)\n"
TIMER = "import faulthandler; faulthandler.dump_traceback_later(1, exit=True); time.sleep(60)\n"


@pytest.mark.parametrize(("timer", "returncode", "shown"), [("", 0, "in flush"), (TIMER, 1, "")])
def test_slow_shutdown_shows_the_stack(timer: str, returncode: int, shown: str) -> None:
    """If the program does not use the timer of faulthandler itself."""
    report = check(["-c", SLOW + f"atexit.register(lambda: exec({timer!r}))"], max_shutdown_s=0.5)
    (finding,) = report.findings
    assert (finding.id, report.returncode) == ("slow-shutdown", returncode)
    assert shown in finding.evidence
    assert report.shutdown_s is not None
    assert report.shutdown_s > 0.5


STOPPED = """
import atexit, os, signal, subprocess, sys, time
wake = f"sleep 2; kill -CONT {os.getpid()}"
def stop():
    subprocess.Popen(["sh", "-c", wake], stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


STOPPED_BEFORE = "stop()\natexit.register(time.sleep, 2)"


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        ("atexit.register(stop)", []),
        pytest.param(STOPPED_BEFORE, ["slow-shutdown"], marks=pytest.mark.slow),
    ],
)
def test_time_in_which_the_program_is_stopped_is_no_shutdown(moment: str, found: list[str]) -> None:
    """Neither does a stop before the shutdown count as a part of it."""
    report = check(["-c", STOPPED + moment], max_shutdown_s=1.5)
    assert ids(report) == found, report
    assert report.duration_s > 2


STARVED = """
import atexit, os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(9)]
def work():
    stop = time.process_time() + 0.4
    while time.process_time() < stop: pass
    for hog in hogs:
        hog.kill()
        hog.wait()
atexit.register(work)
time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the hogs need one processor")
def test_time_in_which_the_program_waits_for_a_processor_is_no_shutdown() -> None:
    for command in (
        ["-c", STARVED],
        ["-c", f"import subprocess as s, sys; s.run([sys.executable, '-c', {STARVED!r}])"],
    ):
        report = check(command, max_shutdown_s=2)
        assert report.clean, report
        assert report.duration_s > 3.5, "the hogs did not take the processor"


def test_error_has_the_phase_in_which_it_happened() -> None:
    program = """
import atexit, threading
class A:
    def __del__(self): 1 / 0
A()
threading.Thread(target=lambda: (threading.main_thread().join(), A())).start()
atexit.register(A)
last = A()
"""
    report = check(["-c", program])
    assert [f.phase for f in report.findings] == ["main", "threads", "atexit", "teardown"]


def test_hang_below_a_launcher_shows_the_process_that_hangs() -> None:
    stuck = "import threading, time; stuck = lambda: time.sleep(60); "
    stuck += "threading.Thread(target=stuck).start()"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stuck!r}])"
    report = check([sys.executable, "-c", launcher], timeout_s=5)
    (finding,) = report.findings
    assert finding.evidence.count("most recent call first") == 3
    assert "in <lambda>" in finding.evidence
    assert f"{sys.executable} -c {stuck}: state S" in finding.evidence


def test_work_after_a_child_python_is_not_a_shutdown() -> None:
    script = f"{sys.executable} -c pass; sleep 1.1; exit 0"
    report = check(["sh", "-c", script], max_shutdown_s=1)
    assert report.clean, report
    assert report.shutdown_s is None


# Makes reports without /proc and prctl, also in the supervisor.
ELSEWHERE = """
import builtins, json, os, sys
def take_away():
    sys.modules["ctypes"] = None
    def refuse(usual):
        def opens(path, *more, **options):
            if str(path).startswith(("/proc", "/dev/fd")):
                raise FileNotFoundError(2, "No such file or directory", path)
            return usual(path, *more, **options)
        return opens
    builtins.open, os.listdir, os.open = refuse(open), refuse(os.listdir), refuse(os.open)
    os.scandir = refuse(os.scandir)
take_away()
if sys.argv[1] == "run":
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    exec(compile(open(script).read(), script, "exec"), dict(__file__=script, __name__="__main__"))
else:
    from clean_exit import check
    sys.executable = sys.argv[1]
    for command, options in json.loads(sys.argv[2]):
        report = check(command, **options)
        assert "the system does not let clean-exit find orphaned processes" in report.note
        found = [finding.id for finding in report.findings]
        print(json.dumps([report.timed_out, report.returncode, report.exit_code, found]))
"""
MESSAGE = "Exception ignored in: <f>\nTraceback (most recent call last):\nValueError: x\n"
# Commands, the options of `check` and what its report has.
REPORTS: list[tuple[list[str], dict[str, float], list[Any]]] = [
    (["sleep", "300"], {"timeout_s": 1}, [True, -signal.SIGTERM, 124, ["hang"]]),
    (["sh", "-c", "kill -9 $$"], {}, [False, -9, 137, ["crash"]]),
    (["sh", "-c", f"printf '%s' '{MESSAGE}' >&2"], {}, [False, 0, 120, ["unraisable"]]),
    (["sh", "-c", "setsid sleep 30 >/dev/null 2>&1 & exit 0"], {}, [False, 0, 0, []]),
]


def test_check_works_on_a_system_without_proc_and_prctl(tmp_path: Path) -> None:
    """Except that left-over processes are not found, as the note says."""
    program, python = tmp_path / "elsewhere.py", tmp_path / "python"
    program.write_text(ELSEWHERE)
    # The script is the first argument that is not an option.
    python.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
exec {sys.executable} -I -S {program} run "$@"
""")
    python.chmod(0o755)
    questions = json.dumps([(command, options) for command, options, _ in REPORTS])
    done = run_command([sys.executable, str(program), str(python), questions])
    assert done.returncode == 0, done.stderr
    expected = [printed for *_, printed in REPORTS]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.slow
@pytest.mark.parametrize("python", other_pythons().values())
def test_checker_runs_on_every_python(python: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.clean-exit]\ntimeout = 100\n")
    command = [python, "-m", "clean_exit", "-q", python, "-c", "print(1)"]
    done = run_command(command, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


# Options, the exception and a part of its message.
WRONG = [
    ({"ignore": "vendor"}, TypeError, "ignore=['vendor']"),
    ({"ignore": [""]}, ValueError, "must not be empty"),
    ({"timeout_s": "5"}, TypeError, "timeout_s must be a number of seconds"),
    ({"stop_signal": "TERM", "stop_after_s": 1}, ValueError, "signal.SIGTERM, got 'TERM'"),
    ({"stop_signal": 15, "stop_after_s": 1, "stop_when": "x"}, ValueError, "stop_signal needs eit"),
    ({"stdin": "hello"}, ValueError, "stdin must be a file, DEVNULL or None, got 'hello'"),
    ({"cwd": "/nowhere"}, FileNotFoundError, "/nowhere"),
    ({"command": 5}, TypeError, "must be a list of words, a string or a path, got 5"),
]


@pytest.mark.parametrize(("options", "kind", "printed"), WRONG, ids=lambda value: str(value)[:40])
def test_check_refuses_wrong_arguments_before_it_runs_anything(
    options: Any, kind: type[Exception], printed: str
) -> None:
    with pytest.raises(kind) as caught:
        check(**{"command": ["true"], **options})
    assert printed in str(caught.value)


FORKED = """
import os
class A:
    def __del__(self): raise ValueError("dirty")
if os.fork(): os.wait()
else:
    print(os.getpid(), flush=True)
    A()
"""


def test_error_in_a_forked_child_has_its_id() -> None:
    report = check(["-c", FORKED])
    (finding,) = report.findings
    assert (finding.id, finding.pid) == ("unraisable", int(report.stdout)), report
    assert finding.summary.startswith("ValueError: dirty in ")
    assert f"in process {finding.pid}: a forked process" in str(finding)


CRASHES = """
import subprocess, sys
code = "import os; os.kill(os.getpid(), %s)" % sys.argv[1]
print(subprocess.run([sys.executable, "-c", code]).returncode)
"""


@pytest.mark.parametrize(("number", "found"), [(11, ["crash"]), (15, [])])
def test_crashed_python_child_is_reported_with_its_stack(number: int, found: list[str]) -> None:
    """A child that its parent terminates is not."""
    report = check(["-c", CRASHES, str(number)])
    assert (report.returncode, report.stdout, ids(report)) == (0, f"-{number}\n", found), report
    for finding in report.findings:
        assert finding.summary == "a process that it started crashed: Segmentation fault"
        assert (finding.pid is not None, finding.process != "") == (True, True)
        assert "most recent call first" in finding.evidence


OTHER_LOGGING = """
import sys, threading, time, types
sys.modules["logging"] = types.ModuleType("logging")
threading.Thread(target=lambda: (time.sleep(0.2), print("saved"))).start()
"""


def test_program_with_a_logging_of_its_own_ends_as_without_the_probe() -> None:
    report = check(["-c", OTHER_LOGGING])
    assert (report.stdout, report.findings) == ("saved\n", ())


def test_the_first_twenty_equal_errors_are_listed() -> None:
    """A long command line leaves room for them."""
    one = "class {0}:\n    def __del__(self): raise {0}Error('the driver is gone')\n"
    many = one.format("Value") + "for number in range(2000): Value()\n"
    command = ["-c", f"{many}{one.format('Key')}\nKey()", *["argument"] * 10_000]
    report = check(command)
    assert ids(report) == ["unraisable"] * 21
    assert report.findings[-1].summary.startswith("KeyError: ")
    assert ids(check(command, ignore=["^.*ValueError: the driver is gone"])) == ["unraisable"]


CRASH_WITH_MANY_FILES = """
import ctypes, os, sys
os.closerange(3, 10_000)
files = [os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY) for _ in range(400)]
if os.fork():
    os.wait()
else:
    os.abort()
"""


def test_crash_after_files_were_closed_writes_into_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    report = check(["-c", CRASH_WITH_MANY_FILES, str(path)])
    assert ids(report) == ["crash"]
    assert path.read_bytes() == b""
