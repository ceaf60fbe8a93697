"""check: run a program, and combine the observations from inside and outside to a report."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from clean_exit.command import add_probe, parse_command
from clean_exit.findings import Finding, signal_name
from clean_exit.options import compile_pattern
from clean_exit.probe_record import join_tests
from clean_exit.report import UNCLEAN, ExitReport
from clean_exit.run import PATIENCE_S, Limits, Outcome, Run
from clean_exit.signals import ForwardedSignals
from clean_exit.stderr import Message
from clean_exit.supervisor_client import CheckerError

_LISTED = 20  # tests that failed
_COUNTED = ("leaked-semaphore", "leaked-shared-memory", "process-group-not-destroyed")
# By convention, the exit code of a shell and of others whose child has crashed.
_CRASHED = {128 + number: number for number in (4, 6, 7, 8, 11)}


def check(
    command: str | os.PathLike[str] | Sequence[str],
    *,
    timeout_s: float | None = None,
    max_shutdown_s: float = 5.0,
    stop_signal: int | None = None,
    stop_after_s: float | None = None,
    stop_when: str | None = None,
    resource_warnings: bool = False,
    ignore: Sequence[str] = (),
    children: Literal["count", "ignore"] = "count",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: int | IO[Any] | None = None,
    copy_stdout: bool = True,
    echo: bool = False,
) -> ExitReport:
    """Run a program to its end and report whether it exited cleanly.

    Several threads may call this at once. Processes of the program that outlive it are ended
    before this returns or raises, unless that finding is ignored; no other process is. Child
    processes are tracked on Linux only.

    Args:
        command: A list of words, a command line, or the path of a Python file. This Python runs
            Python files, ``-m MODULE`` and ``-c CODE``.
        timeout_s: The time in seconds after which the program has hung: the stacks of its threads
            are recorded and it is ended. None waits forever.
        max_shutdown_s: A shutdown that takes longer, in seconds, is a finding.
        stop_signal: For servers: the signal that ends the program. If the program dies from it,
            that counts as success. Needs ``stop_after_s`` or ``stop_when``.
        stop_after_s: The time in seconds after which the signal is sent.
        stop_when: A regular expression: the signal is sent when a line of the output matches.
            Without ``timeout_s``, the line must come within 60 seconds.
            Python programs then run with PYTHONUNBUFFERED; others must flush their output.
        resource_warnings: Whether to report ResourceWarnings too.
        ignore: Regular expressions. A finding whose text matches one is only counted.
        children: "ignore" only counts findings about child processes, such as crashes that a test
            expects. Processes that outlive the program still count. If the program is not Python,
            the first Python below it is not a child.
        env: The program's environment; by default this process's.
        cwd: The current folder of the program.
        stdin: As for `subprocess`; by default this process's.
        copy_stdout: Whether the report contains the program's stdout. If not, the program writes
            to this process's stdout directly.
        echo: Whether to pass the program's output through as well.

    Returns:
        The report. Its ``exit_code`` is the program's own code (128+n for signal n), or 124 after
        a timeout. If the program's code is 0 but its exit was not clean, it is 120.

    Raises:
        OSError: The program could not be started.
        CheckerError: The checker failed. If the program ran already, it was ended.
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value, or does not go with the others.
    """
    limits = Limits(timeout_s, max_shutdown_s, stop_signal, stop_after_s, stop_when)
    words = parse_command(command, cwd)
    if children not in ("count", "ignore"):
        raise ValueError(f'children must be "count" or "ignore", got {children!r}')
    is_file = stdin is None or isinstance(stdin, int) or hasattr(stdin, "fileno")
    if not is_file or stdin == subprocess.PIPE:  # Nothing would write into a pipe.
        raise ValueError(f"stdin must be a file, DEVNULL or None, got {stdin!r}")
    if isinstance(ignore, (str, bytes)):  # As patterns, its letters would match every finding.
        raise TypeError(f"ignore must be a list, got a string; pass ignore=[{ignore!r}]")
    patterns = [compile_pattern(pattern) for pattern in ignore]

    def is_ignored(finding: Finding) -> bool:
        if finding.child and children == "ignore":
            return True
        return any(pattern.search(str(finding)) for pattern in patterns)

    signals = ForwardedSignals.active  # in the command clean-exit
    with _folder() as folder:
        environment = add_probe(
            os.environ if env is None else env,
            folder,
            max_shutdown_s,
            unbuffered=limits.stop_when is not None,
            resource_warnings=resource_warnings,
        )
        run = Run(
            words,
            environment,
            folder=folder,
            limits=limits,
            cwd=cwd,
            stdin=stdin,
            copy_stdout=copy_stdout,
            echo=echo,
        )
        try:
            if signals is not None:
                signals.attach(run.forward_signal)
            outcome = run.wait()
            orphans = _orphans(outcome)
            run.finish(leave=bool(orphans) and all(map(is_ignored, orphans)))
            findings = _findings(outcome, run, resource_warnings, children)
        except OSError as error:
            raise CheckerError(f"the checker failed while the program ran: {error}") from error
        finally:
            run.supervisor.close()  # It ends what still runs, and removes the folder.
    counted = [finding for finding in findings if not is_ignored(finding)]
    return ExitReport(
        command=tuple(words),
        returncode=outcome.returncode,
        findings=tuple(counted),
        ignored=len(findings) - len(counted),
        note=_note(outcome, run.supervisor.is_blind),
        stdout=run.stdout if copy_stdout else "",
        stderr=run.stderr,
        duration_s=outcome.ended_s - outcome.started_s,
        shutdown_s=outcome.shutdown_s,
        probed=outcome.record.pid is not None,
        stopped_by=limits.stop_signal if outcome.stopped_s is not None else None,
        timed_out=outcome.timed_out,
    )


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Create the folder of a run.

    A program that changes its user can still write to the record, but not list the folder.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="clean-exit-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CheckerError(f"there is no folder for temporary files; set TMPDIR: {error}") from None
    folder = Path(made.name)
    folder.chmod(0o711)
    (folder / "events").touch()
    (folder / "events").chmod(0o622)
    return made


def _note(outcome: Outcome, is_blind: bool) -> str:
    """Return remarks that are useful but not findings, or ""."""
    record, limits = outcome.own_record, outcome.limits
    notes: list[str] = []
    if limits.stop_signal is not None and outcome.stopped_s is None and not outcome.timed_out:
        awaited = "a line matched" if limits.stop_when else f"{limits.stop_after_s:g} s had passed"
        name = signal_name(limits.stop_signal)
        notes.append(f"the program ended before {awaited}; {name} was not sent")
    elif record and record.phase != "teardown" and outcome.returncode >= 0:
        notes.append("its exit handlers did not all run: it ended by os._exit or called exec")
    elif record and record.phase != "teardown" and -outcome.returncode == limits.stop_signal:
        notes.append(
            f"its exit handlers did not all run: {signal_name(limits.stop_signal)} ended it"
        )
    elif record and outcome.returncode == UNCLEAN:
        notes.append("120 is also what Python itself exits with if it cannot flush stdout")
    if is_blind:
        notes.append("the system does not let clean-exit find orphaned processes")
    return "; ".join(notes)


def _findings(outcome: Outcome, run: Run, resource_warnings: bool, children: str) -> list[Finding]:
    record = outcome.record
    test = record.tests.get(record.pid or outcome.pid, "")  # What ran when the program ended.
    # What the checker sent or forwarded is not a crash. SIGPIPE: a reader such as head has
    # closed the pipe.
    expected = {*run.forwarded, int(signal.SIGPIPE)}
    if outcome.stopped_s is not None:
        expected.add(outcome.limits.stop_signal or 0)
    # The stacks of a hang show the slow processes as well.
    found = [f for f in record.findings if not (outcome.timed_out and f.id == "slow-shutdown")]
    errors, ids = Counter(record.errors), Counter(finding.id for finding in found)
    for message in run.text.messages:
        counts = resource_warnings or message.finding.id != "resource-warning"
        if children == "ignore" and record.pid is not None and message.is_recorded:
            counts = False  # If it were about the program, the probe would have recorded it.
        if counts and not _is_recorded(message, errors, ids) and message.finding not in found:
            found.append(message.finding)
    if outcome.timed_out:
        found.append(_hang(outcome))
    elif outcome.returncode >= 0:
        found += _crashes_of_children(outcome, run, found)
    elif -outcome.returncode not in expected:
        evidence = record.crash_stacks or "\n".join(run.text.fatal)
        summary = f"killed by {signal_name(-outcome.returncode)}"
        found.append(Finding("crash", summary, evidence, record.phase, outcome.pid, test=test))
    if any(record.sessions.values()) and outcome.returncode >= 0 and not outcome.timed_out:
        summary = "a test ended the interpreter, so later tests and fixtures did not run"
        found.append(Finding("unfinished-tests", summary, pid=record.pid, test=test))
    if record.failed and outcome.returncode == 0 and not outcome.timed_out:
        first, count = next(iter(record.failed)), len(record.failed)
        summary = f"{first if count == 1 else f'{count} tests'} failed, but the exit code is 0"
        names = [first, first.partition(" (")[0]] * (count == 1)  # A subtest has arguments.
        failed = next((name for name in names if name in record.ran), "")
        listed = "\n".join([*record.failed][:_LISTED])
        found.append(Finding("failed-tests", summary, listed, pid=record.pid, test=failed))
    if (outcome.shutdown_s or 0) > outcome.limits.max_shutdown_s and not outcome.timed_out:
        summary = f"{outcome.shutdown_s:.2f} s; the limit is {outcome.limits.max_shutdown_s:g} s"
        stacks = outcome.stacks or record.slow_stacks
        found.append(Finding("slow-shutdown", summary, stacks, "", record.pid))
    # By now the resource tracker has removed the blocks that it knew.
    names = sorted(record.shared_memory)
    remaining = [one for one in names if os.path.exists(f"/dev/shm/{one.lstrip('/')}")]  # noqa: PTH110  (it raises nothing)
    if remaining:
        summary = f"{len(remaining)} untracked blocks still exist: {', '.join(remaining)}"
        makers = join_tests(record.shared_memory[name] for name in remaining)
        found.append(Finding("leaked-shared-memory", summary, pid=record.pid, test=makers))
    return found + _orphans(outcome)


def _is_recorded(message: Message, errors: Counter[str], ids: Counter[str]) -> bool:
    """Whether the record has the event of a message; each entry matches one message."""
    name, found = message.error.rpartition(".")[2], message.finding.id
    # The summary of what asyncio has logged; no error has the text of another message as its name.
    counts, key = (ids, found) if found in _COUNTED else (errors, name or message.finding.summary)
    if counts[key] <= 0:
        return False
    counts[key] -= 1
    return True


def _crashes_of_children(outcome: Outcome, run: Run, found: list[Finding]) -> list[Finding]:
    """Return crashes of children that only a message or the exit code shows."""
    if any(finding.id == "crash" for finding in found):
        return []
    if run.text.crashes:
        summary = f"a process that it started crashed: {run.text.crashes[0]}"
        evidence = "\n".join(run.text.fatal or run.text.crashes)
        return [Finding("crash", summary, evidence, child=True)]
    if (code := outcome.returncode) in _CRASHED:
        name = signal_name(_CRASHED[code])
        summary = f"{name} ended a process that it started: exit code {code}"
        return [Finding("crash", summary, child=True)]
    return []


def _hang(outcome: Outcome) -> Finding:
    limits = outcome.limits
    when = f"after {limits.timeout_s or PATIENCE_S:g} s"
    if outcome.stopped_s is not None and limits.timeout_s is None:
        when = f"{limits.after_stop_s:g} s after {signal_name(limits.stop_signal or 0)}"
    summary = f"still running {when}; killed"
    if limits.stop_when is not None and outcome.stopped_s is None:
        summary += f". No line of its output matched {limits.stop_when!r}"
    record = outcome.record
    test = record.tests.get(record.pid or outcome.pid, "")
    return Finding("hang", summary, outcome.stacks, record.phase, record.pid, test=test)


def _orphans(outcome: Outcome) -> list[Finding]:
    """Return a finding about the processes that outlived the program, for each of their tests."""
    if not outcome.is_left and (outcome.timed_out or not outcome.holds_output):
        return []
    summary = "still running; killed" if outcome.is_left else "still running"
    if outcome.holds_output:
        summary += ". The program's output was still open"
    by_test: dict[str, list[str]] = {}
    for line, test in zip(outcome.remaining, outcome.tests, strict=True):
        test = test or outcome.record.tests.get(int(line.split()[0]), "")
        by_test.setdefault(test, []).append(line)
    # It is not listed if it kept restarting itself, or belongs to another program.
    return [
        Finding(
            "orphan-process", summary, "\n".join(lines), pid=int(lines[0].split()[0]), test=test
        )
        for test, lines in by_test.items()
    ] or [Finding("orphan-process", summary)]
