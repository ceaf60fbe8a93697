"""`check`: its reports about many kinds of programs, and systems that lack something."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from clean_exit import CheckerError, check
from tests.support.clean_exit import CHECKER, run_command
from tests.support.other_pythons import other_pythons


def ids(report: Any) -> list[str]:
    return [finding.id for finding in report.findings]


@pytest.mark.parametrize("flags", [[], ["-X", "faulthandler"]], ids=["probe", "program"])
def test_crash_shows_the_stack(flags: list[str]) -> None:
    """From the program's own faulthandler, or from the probe's."""
    code = "import ctypes\ndef inner(): ctypes.string_at(0)\ninner()"
    report = check([sys.executable, *flags, "-c", code])
    assert report.returncode == -11
    assert report.exit_code == 139
    (finding,) = report.findings
    assert "in inner" in finding.evidence
    assert finding.summary == "killed by SIGSEGV"
    assert (finding.phase, finding.process) == ("main", "")
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


SLOW = "import atexit, time\ndef flush(): time.sleep(3)\natexit.register(flush)\n"


def test_slow_shutdown_shows_the_stack() -> None:
    report = check(["-c", SLOW], max_shutdown_s=0.5)
    (finding,) = report.findings
    assert finding.id == "slow-shutdown"
    assert "in flush" in finding.evidence
    assert report.shutdown_s is not None
    assert report.shutdown_s >= 3


STOPPED = """
import atexit, os, signal, subprocess, sys
wake = f"sleep 2; kill -CONT {os.getpid()}"
def stop():
    subprocess.Popen(["sh", "-c", wake], stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
MOMENT
"""


def test_time_in_which_the_program_is_stopped_is_no_shutdown() -> None:
    """Neither does a stop before the shutdown count as a part of it."""
    report = check(["-c", STOPPED.replace("MOMENT", "atexit.register(stop)")], max_shutdown_s=1.5)
    assert report.clean, report
    assert report.duration_s > 2
    slow = "stop()\natexit.register(__import__('time').sleep, 2)"
    report = check(["-c", STOPPED.replace("MOMENT", slow)], max_shutdown_s=1.5)
    assert [finding.id for finding in report.findings] == ["slow-shutdown"]


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


# A filter of system calls (seccomp) that refuses prctl(PR_SET_CHILD_SUBREAPER), as in a sandbox.
REFUSE = """
import ctypes, os, struct, sys
number = {"x86_64": 157, "aarch64": 167}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, 36),
         (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0):
    sys.exit(77)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="has other numbers")
def test_system_that_hides_orphans_is_named() -> None:
    command = [sys.executable, "-c", REFUSE, *CHECKER, "--", "true"]
    done = run_command(command)
    if done.returncode == 77:
        pytest.skip("this system has no seccomp")
    assert "note: the system does not let clean-exit find orphaned processes" in done.stderr
    assert done.returncode == 0
    assert "note" not in run_command([*CHECKER, "--", "true"]).stderr


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


def test_timer_of_the_program_stays() -> None:
    guard = "import faulthandler; faulthandler.dump_traceback_later(3, exit=True)\n"
    code = f"{guard}import atexit, time\natexit.register(time.sleep, 60)"
    report = check(["-c", code], max_shutdown_s=1)
    assert report.returncode == 1
    assert ids(report) == ["slow-shutdown"]


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
    script = f"{sys.executable} -c pass; sleep 1.5; exit 0"
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
        found = [finding.id for finding in report.findings]
        print(json.dumps([report.timed_out, report.returncode, report.exit_code, found]))
"""
MESSAGE = "Exception ignored in: <f>\nTraceback (most recent call last):\nValueError: x\n"
REPORTS: list[tuple[list[str], dict[str, float], list[Any]]] = [
    (["sleep", "300"], {"timeout_s": 1}, [True, -signal.SIGTERM, 124, ["hang"]]),
    (
        ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"],
        {"timeout_s": 3},
        [True, -signal.SIGKILL, 124, ["hang"]],
    ),
    (["sh", "-c", "exit 3"], {}, [False, 3, 3, []]),
    (["sh", "-c", "kill -9 $$"], {}, [False, -9, 137, ["crash"]]),
    (["sh", "-c", f"printf '%s' '{MESSAGE}' >&2"], {}, [False, 0, 120, ["unraisable"]]),
]
LEFT_OVER = ["sh", "-c", "setsid sleep 30 >/dev/null 2>&1 & exit 0"]


@pytest.mark.slow
def test_check_works_on_a_system_without_proc_and_prctl(tmp_path: Path) -> None:
    """Except that left-over processes are not found."""
    program, python = tmp_path / "elsewhere.py", tmp_path / "python"
    program.write_text(ELSEWHERE)
    # The script is the first argument that is not an option.
    python.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
exec {sys.executable} -I -S {program} run "$@"
""")
    python.chmod(0o755)
    cases = [*REPORTS, (LEFT_OVER, {}, [False, 0, 0, []])]
    questions = json.dumps([(command, options) for command, options, _ in cases])
    done = run_command([sys.executable, str(program), str(python), questions])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        printed for *_, printed in cases
    ]


def test_error_without_a_temporary_folder_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(CheckerError, match=r"set TMPDIR: .*/nowhere/"):
        check(["true"])


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
    ({"ignore": [b"vendor"]}, TypeError, "must be a string, got b'vendor'"),
    ({"ignore": [""]}, ValueError, "must not be empty"),
    ({"timeout_s": "5"}, TypeError, "timeout_s must be a number of seconds"),
    ({"timeout_s": float("nan")}, ValueError, "timeout_s must be more than 0 seconds"),
    ({"stop_signal": "TERM", "stop_after_s": 1}, ValueError, "signal.SIGTERM, got 'TERM'"),
    ({"stop_signal": 15, "stop_after_s": 1, "stop_when": "x"}, ValueError, "stop_signal needs eit"),
    ({"stop_when": "x"}, ValueError, "stop_signal needs either stop_after_s or stop_when"),
    ({"stdin": "hello"}, ValueError, "stdin must be a file, DEVNULL or None, got 'hello'"),
    ({"env": {"A=B": "1"}}, ValueError, "illegal environment variable name"),
    ({"command": ["true", "\0"]}, ValueError, "embedded null byte"),
    ({"command": []}, ValueError, "no command"),
    ({"cwd": "/nowhere"}, FileNotFoundError, "/nowhere"),
    ({"command": ["true", "x" * 1_000_000]}, OSError, "Argument list too long"),
    ({"command": 5}, TypeError, "must be a list of words, a string or a path, got 5"),
]


@pytest.mark.parametrize(("options", "kind", "printed"), WRONG, ids=lambda value: str(value)[:40])
def test_check_refuses_wrong_arguments_before_it_runs_anything(
    options: Any, kind: type[Exception], printed: str
) -> None:
    with pytest.raises(kind) as caught:
        check(**{"command": ["true"], **options})
    assert printed in str(caught.value)


MANY = """
class A:
    def __del__(self): raise ValueError("the driver is gone")
for number in range(2000): A()
"""
INHERITED = """
import os, sys, types
distributed = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: is_on
distributed.get_backend = lambda: "gloo"
sys.modules["torch.distributed"] = distributed
is_on = {before}
if os.fork() == 0:
    is_on = True
    sys.exit()
os.wait()
is_on = False
"""
CHILD = """
import os
class A:
    def __del__(self): raise ValueError("dirty")
print(os.getpid(), flush=True)
A()
"""
FORK = f"import os\nif os.fork():\n    os.wait()\nelse:\n    exec({CHILD!r})"
SUBPROCESS = "import subprocess, sys; subprocess.run(sys.argv[1:])"
COMMAND = [sys.executable, "-c", CHILD]


@pytest.mark.parametrize(
    ("parent", "expected"),
    [(SUBPROCESS, " ".join(" ".join(COMMAND).split())), (FORK, "a forked process")],
    ids=["subprocess", "fork"],
)
def test_error_in_a_child_has_its_id_and_command_line(parent: str, expected: str) -> None:
    report = check(["-c", parent, *COMMAND])
    (finding,) = report.findings
    assert (finding.id, finding.pid) == ("unraisable", int(report.stdout)), report
    assert finding.summary.startswith("ValueError: dirty in ")
    assert expected in " ".join(finding.process.split())
    assert f"in process {finding.pid}: {finding.process}" in str(finding)


CRASHES = """
import subprocess, sys
code = "import os; os.kill(os.getpid(), %s)" % sys.argv[1]
print(subprocess.run([sys.executable, "-c", code]).returncode)
"""


def test_crashed_python_child_is_reported_with_its_stack() -> None:
    """A child that its parent terminates is not."""
    for number, found in (("11", ["crash"]), ("15", [])):
        report = check(["-c", CRASHES, number])
        assert report.returncode == 0
        assert report.stdout == f"-{number}\n"
        assert [finding.id for finding in report.findings] == found, report
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


def test_equal_errors_are_counted() -> None:
    report = check(["-c", MANY])
    assert {finding.id for finding in report.findings} == {"unraisable"}
    assert len(report.findings) == 20
    other = "\nclass B:\n    def __del__(self): raise KeyError\nB()"
    report = check(["-c", MANY + other], ignore=["the driver is gone"])
    assert [finding.summary for finding in report.findings] == ["KeyError in B.__del__()"]


def test_long_command_line_keeps_the_record() -> None:
    code = "import atexit, sys; sys.unraisablehook = print; atexit.register(lambda: 1 / 0)"
    report = check(["-c", code, *["argument"] * 10_000])
    assert report.probed
    assert [finding.id for finding in report.findings] == ["atexit-error"]
    assert "in <lambda>()" in report.findings[0].summary


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
    assert [finding.id for finding in report.findings] == ["crash"]
    assert path.read_bytes() == b""


def test_forked_child_is_not_blamed_for_its_parents_process_group() -> None:
    assert check(["-c", INHERITED.format(before=True)]).clean
    report = check(["-c", INHERITED.format(before=False)])
    assert [finding.id for finding in report.findings] == ["process-group-not-destroyed"]


def test_program_from_a_pipe_is_run_and_checked() -> None:
    dirty = "class A:\n    def __del__(self): 1 / 0\na = A()\nprint('ran')"
    command = ["bash", "-c", f'exec {sys.executable} <(cat <<"END"\n{dirty}\nEND\n)']
    report = check(command, timeout_s=600)
    assert report.stdout == "ran\n", str(report)
    assert [finding.id for finding in report.findings] == ["unraisable"], str(report)
