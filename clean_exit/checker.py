"""check: run a program, and bring together what was seen from inside and from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clean_exit.command import add_probe, parse_command
from clean_exit.findings import Finding, signal_name
from clean_exit.keeping import CheckerError
from clean_exit.record import crash_stacks
from clean_exit.report import ExitReport
from clean_exit.run import Limits, Outcome, Run, compile_pattern
from clean_exit.signals import ForwardedSignals
from clean_exit.stderr import Said

_IN_FULL = 20  # findings of one kind
_ERRORS = ("unraisable", "atexit-error", "finalizer-error", "thread-error")
_COUNTED = ("leaked-semaphore", "leaked-shared-memory", "process-group-not-destroyed")
# What a shell, and others that pass on a child's end, exit with when that crashed.
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
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: int | IO[Any] | None = None,
    copy_stdout: bool = True,
    echo: bool = False,
    _signals: ForwardedSignals | None = None,  # of the command, which stands in its place
) -> ExitReport:
    """Run a program to its end and say whether it left cleanly.

    Safe from several threads at once. Whatever of the program outlives it is ended before this
    returns, or raises; nothing else ever is. Needs Linux for all that concerns processes other
    than the program itself.

    Args:
        command: A command line; or a path to a Python file, which this Python runs; or
            ``-m MODULE`` or ``-c CODE`` as the first words.
        timeout_s: After so many seconds it has hung: the stacks of its threads are recorded,
            and it is ended. None waits for ever.
        max_shutdown_s: A shutdown that takes longer is a finding.
        stop_signal: For servers: the signal that makes the program end. Dying of it then counts
            as success. It is sent after ``stop_after_s`` seconds, or when a line of its output
            matches ``stop_when``.
        stop_after_s: See there.
        stop_when: A regular expression, see there. Python programs are told not to hold back
            their output then (PYTHONUNBUFFERED); others have to flush it.
        resource_warnings: Report ResourceWarnings too.
        ignore: Regular expressions; a finding whose text one of them matches is only counted.
        env: The program's environment, by default this process's.
        cwd: The folder that it starts in.
        stdin: As for `subprocess`, by default this process's.
        copy_stdout: Whether the report has the program's stdout. If not, the program writes to
            this process's stdout itself.
        echo: Pass the program's output through as it comes, as well.

    Returns:
        The report; its ``exit_code`` is 0 for a clean exit, the program's own code otherwise
        (128+n for signal n), 120 if the program said 0 but did not leave cleanly, and 124 after
        a timeout.

    Raises:
        OSError: The program could not be started.
        CheckerError: The checker itself failed while the program ran, and ended it.
        TypeError: An argument is of a type that it cannot be.
        ValueError: The arguments contradict each other, or one has a value that it cannot have.
    """
    limits = Limits(timeout_s, max_shutdown_s, stop_signal, stop_after_s, stop_when)
    words = parse_command(command, cwd)
    if stdin == subprocess.PIPE:
        raise ValueError("stdin must be a file, DEVNULL or None: nobody writes into a pipe")
    if isinstance(ignore, (str, bytes)):  # Its letters, one by one, would match everything.
        raise TypeError(f"ignore takes a list of regular expressions: ignore=[{ignore!r}]")
    patterns = [compile_pattern(pattern) for pattern in ignore]
    environment = dict(os.environ if env is None else env)
    if resource_warnings:
        earlier = environment.get("PYTHONWARNINGS")
        added = "default::ResourceWarning"
        environment["PYTHONWARNINGS"] = f"{earlier},{added}" if earlier else added
    with _folder() as folder:
        if folder is not None:
            unbuffered = limits.stop_when is not None
            environment = add_probe(environment, folder, unbuffered=unbuffered)
        run = Run(
            words,
            environment,
            folder=folder,
            limits=limits,
            cwd=cwd,
            stdin=stdin,
            copy_stdout=copy_stdout,
            echo=echo,
            mask=None if _signals is None else _signals.mask,
            inherit=_signals is not None,
        )
        try:
            if _signals is not None:
                _signals.attach(run.receive_signal)
            outcome = run.finish()
            found = _findings(outcome, run, folder, resource_warnings)
        except OSError as error:
            raise CheckerError(f"the checker failed while the program ran: {error}") from error
        finally:
            run.close()
    kept = [f for f in found if not any(pattern.search(str(f)) for pattern in patterns)]
    return ExitReport(
        command=tuple(words),
        returncode=outcome.returncode,
        findings=tuple(_condense(kept)),
        ignored=len(found) - len(kept),
        note=_note(outcome),
        stdout=run.stdout.text(),
        stderr=run.stderr.text(),
        duration_s=outcome.ended_s - outcome.started_s,
        shutdown_s=outcome.shutdown_s,
        threads_s=outcome.threads_s,
        probed=outcome.record.pid is not None,
        stopped_by=limits.stop_signal if outcome.stopped_s is not None else None,
        timed_out=outcome.timed_out,
    )


@contextlib.contextmanager
def _folder() -> Iterator[str | None]:
    """Make a folder for the time of a run; None where there is no place for one.

    The program is run without a probe then: it may well do without a temporary folder. Programs
    that become another user's may go on to write into the record, whose name only they know.
    """
    for place in (None, "/dev/shm"):
        try:
            made = tempfile.TemporaryDirectory(
                prefix="clean-exit-", dir=place, ignore_cleanup_errors=True
            )
            folder = Path(made.name)
            folder.chmod(0o711)
            (folder / "events").touch()
            (folder / "events").chmod(0o622)
        except OSError:
            continue
        with made as name:
            yield name
        return
    yield None


def _note(outcome: Outcome) -> str:
    """Say what is worth knowing and no finding."""
    record, limits = outcome.own_record, outcome.limits
    if limits.stop_signal is not None and outcome.stopped_s is None and not outcome.timed_out:
        waited = "a line that matches" if limits.stop_when is not None else "that moment"
        return f"it ended by itself before {waited}: {signal_name(limits.stop_signal)} was not sent"
    if record and record.teardown_s is None and outcome.returncode >= 0:
        return "its exit handlers did not all run: it ended by os._exit, or became another program"
    return ""


def _findings(
    outcome: Outcome, run: Run, folder: str | None, resource_warnings: bool
) -> list[Finding]:
    record = outcome.record
    found = list(record.findings)
    known, told = Counter(record.errors), Counter(finding.id for finding in found)
    for said in run.text.said:
        is_asked = resource_warnings or said.finding.id != "resource-warning"
        if is_asked and not _is_recorded(said, known, told) and said.finding not in found:
            found.append(said.finding)
    if outcome.timed_out:
        found.append(_hang(outcome))
    elif outcome.returncode >= 0:
        found += _crashes_of_children(outcome, run, found)
    elif -outcome.returncode not in _expected(outcome, run):
        evidence = crash_stacks(folder, outcome.pid) or "\n".join(run.text.fatal)
        summary = f"killed by {signal_name(-outcome.returncode)}"
        found.append(Finding("crash", summary, evidence, record.phase, outcome.pid))
    if (outcome.shutdown_s or 0) > outcome.limits.max_shutdown_s and not outcome.timed_out:
        found.append(_slow(outcome))
    # The resource tracker, which may not have been told of them, has removed what it knew.
    names = sorted(record.shared_memory)
    remaining = [name for name in names if Path("/dev/shm", name.lstrip("/")).exists()]
    if remaining:
        summary = f"{len(remaining)} not tracked, and still there: {', '.join(remaining)}"
        found.append(Finding("leaked-shared-memory", summary, pid=record.pid))
    if outcome.is_left or (outcome.holds_output and not outcome.timed_out):
        found.append(_left_over(outcome))
    for pid, nbytes in outcome.held_gpu_bytes.items():
        summary = f"{nbytes / 1e6:.1f} MB by process {pid}, which outlived the program"
        found.append(Finding("gpu-memory-held", summary, pid=pid))
    return found


def _is_recorded(said: Said, known: Counter[str], told: Counter[str]) -> bool:
    """Say whether the record has this message's event; each entry stands for one message."""
    name = said.error.rpartition(".")[2]
    counts, key = (told, said.finding.id) if said.finding.id in _COUNTED else (known, name)
    if not key or counts[key] <= 0:
        return False
    counts[key] -= 1
    return True


def _condense(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the first of many errors in full, and count the others by kind and type."""
    kept, more, numbers = [], Counter[tuple[str, str]](), Counter[str]()
    for finding in findings:
        numbers[finding.id] += 1
        if finding.id in _ERRORS and numbers[finding.id] > _IN_FULL:
            more[finding.id, finding.summary.partition(":")[0]] += 1
        else:
            kept.append(finding)
    return kept + [Finding(found, f"{count} more: {name}") for (found, name), count in more.items()]


def _crashes_of_children(outcome: Outcome, run: Run, found: list[Finding]) -> list[Finding]:
    """Tell crashes of children by what they, or a shell, printed, and by the exit code."""
    if any(finding.id == "crash" for finding in found):
        return []
    if run.text.crashes:
        summary = f"a process that it started crashed: {run.text.crashes[0]}"
        return [Finding("crash", summary, "\n".join(run.text.fatal or run.text.crashes))]
    if outcome.returncode in _CRASHED:
        name = signal_name(_CRASHED[outcome.returncode])
        code = outcome.returncode
        return [Finding("crash", f"{name} ended a process that it started: exit code {code}")]
    return []


def _expected(outcome: Outcome, run: Run) -> set[int]:
    """Return the signals that this checker sent or passed on: dying of them is no crash."""
    sent = outcome.limits.stop_signal if outcome.stopped_s is not None else None
    # SIGPIPE: a reader such as head has enough.
    return {*run.forwarded, int(signal.SIGPIPE), *([] if sent is None else [sent])}


def _hang(outcome: Outcome) -> Finding:
    limits = outcome.limits
    waited = (
        f"after {limits.timeout_s:g} s"
        if limits.timeout_s is not None
        else (f"long after {signal_name(limits.stop_signal or 0)}")
    )
    summary = f"still running {waited}; killed"
    if limits.stop_when is not None and outcome.stopped_s is None:
        summary += f". No line of its output matched {limits.stop_when!r}"
    return Finding("hang", summary, outcome.stacks, outcome.record.phase, outcome.record.pid)


def _slow(outcome: Outcome) -> Finding:
    summary = f"{outcome.shutdown_s:.2f} s; the limit is {outcome.limits.max_shutdown_s:g} s"
    lines = [f"{what}: {took_s:.2f} s" for what, took_s in _parts(outcome)]
    evidence = "\n".join(lines + ([outcome.stacks] if outcome.stacks else []))
    return Finding("slow-shutdown", summary, evidence, "", outcome.record.pid)


def _parts(outcome: Outcome) -> list[tuple[str, float]]:
    """Divide the time of a shutdown into what was done in it; together they are all of it."""
    stop = signal_name(outcome.limits.stop_signal or 0)
    moments: list[tuple[str, float | None]] = [(f"ending after {stop}", outcome.stopped_s)]
    if record := outcome.own_record:
        moments += [
            ("joining threads", record.main_ended_s),
            ("atexit callbacks", record.atexit_s),
            ("taking the interpreter apart", record.teardown_s),
        ]
    began = outcome.shutdown_began_s or outcome.ended_s
    # What had begun before goes on at the beginning.
    known = [(what, max(at, began)) for what, at in moments if at is not None]
    ends = [*(at for _, at in known[1:]), outcome.ended_s]
    parts = [(what, end - at) for (what, at), end in zip(known, ends, strict=True)]
    return [(what, took_s) for what, took_s in parts if took_s > 0]


def _left_over(outcome: Outcome) -> Finding:
    count = len(outcome.left_over)
    if not count:
        summary = "something that could not be found still holds the program's output open"
        if outcome.is_left:
            summary = "something that kept starting another in its place was still running; killed"
        return Finding("left-over-process", summary)
    summary = (
        f"{count} processes were still running; killed" if count > 1 else ("still running; killed")
    )
    if outcome.holds_output:
        summary += ". The program's output was still open"
    pid = int(outcome.left_over[0].split()[0])
    return Finding("left-over-process", summary, "\n".join(outcome.left_over), pid=pid)
