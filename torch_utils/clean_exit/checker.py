"""check: run a program, and bring together what was seen from inside and from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .attribution import condense, merge
from .command import add_probe, parse_command
from .events import Inside
from .findings import Finding, signal_name
from .report import ExitReport
from .run import Limits, Outcome, Run


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
        TypeError: An argument is of a type that it cannot be.
        ValueError: The arguments contradict each other, or one has a value that it cannot have.
    """
    words = parse_command(command)
    limits = _make_limits(timeout_s, max_shutdown_s, stop_signal, stop_after_s, stop_when)
    if isinstance(ignore, (str, bytes)):  # Its letters, one by one, would match everything.
        raise TypeError(f"ignore takes a list of regular expressions: ignore=[{ignore!r}]")
    patterns = [_compile(pattern) for pattern in ignore]
    environment = dict(os.environ if env is None else env)
    if resource_warnings:
        earlier = environment.get("PYTHONWARNINGS")
        added = "default::ResourceWarning"
        environment["PYTHONWARNINGS"] = f"{earlier},{added}" if earlier else added
    with _folder() as folder:
        started, changed = words, environment
        events = Path(folder or os.devnull, "events")
        if folder is not None:
            events.touch(mode=0o600)
            awaits = limits.stop_when is not None
            started, changed = add_probe(words, environment, events, cwd=cwd, unbuffered=awaits)
        run = Run(
            started,
            changed,
            events=events,
            limits=limits,
            cwd=cwd,
            stdin=stdin,
            copy_stdout=copy_stdout,
            echo=echo,
        )
        outcome = run.finish()
        inside = run.inside()
    findings = _findings(outcome, inside, run, limits, resource_warnings)
    kept = [f for f in findings if not any(pattern.search(str(f)) for pattern in patterns)]
    return ExitReport(
        command=tuple(words),
        returncode=outcome.returncode,
        findings=tuple(condense(kept)),
        ignored=len(findings) - len(kept),
        stdout=run.stdout.text(),
        stderr=run.stderr.text(),
        duration_s=outcome.ended_s - outcome.started_s,
        shutdown_s=_shutdown_s(outcome, inside, run),
        threads_s=_threads_s(outcome, inside, run),
        probed=inside.pid is not None,
        stopped_by=limits.stop_signal if outcome.stopped_s is not None else None,
        timed_out=outcome.timed_out,
    )


def _make_limits(
    timeout_s: float | None,
    max_shutdown_s: float,
    stop_signal: int | None,
    stop_after_s: float | None,
    stop_when: str | None,
) -> Limits:
    _check_seconds("max_shutdown_s", max_shutdown_s)
    if timeout_s is not None:
        _check_seconds("timeout_s", timeout_s)
    if stop_after_s is not None:
        _check_seconds("stop_after_s", stop_after_s, may_be_0=True)
    if stop_signal is not None and stop_signal not in signal.valid_signals():
        raise ValueError(
            f"stop_signal must be a signal's number, such as signal.SIGTERM, not {stop_signal!r}"
        )
    moments = (stop_after_s is not None) + (stop_when is not None)
    if moments != (stop_signal is not None):
        raise ValueError(
            "stop_signal needs one of stop_after_s and stop_when, which say when to send it"
        )
    pattern = None if stop_when is None else _compile(stop_when)
    return Limits(timeout_s, max_shutdown_s, stop_signal, stop_after_s, pattern)


def _check_seconds(name: str, value: float, *, may_be_0: bool = False) -> None:
    try:
        is_right = value >= 0 if may_be_0 else value > 0  # False of a NaN, too.
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None
    if not is_right:
        least = "0 seconds or more" if may_be_0 else "more than 0 seconds"
        raise ValueError(f"{name} must be {least}, not {value!r}")


def _compile(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise TypeError(f"a regular expression has to be a string, not {pattern!r}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


@contextlib.contextmanager
def _folder() -> Iterator[str | None]:
    """Make a folder for the time of a run; None where there is no place for one.

    The program is run without a probe then: it may well do without a temporary folder.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="clean-exit-", ignore_cleanup_errors=True)
    except OSError:
        try:
            made = tempfile.TemporaryDirectory(
                prefix="clean-exit-", dir="/dev/shm", ignore_cleanup_errors=True
            )
        except OSError:
            yield None
            return
    with made as folder:
        yield folder


def _shutdown_s(outcome: Outcome, inside: Inside, run: Run) -> float | None:
    began = run.shutdown_began_s(inside)
    return None if began is None else max(0.0, outcome.ended_s - began)


def _threads_s(outcome: Outcome, inside: Inside, run: Run) -> float | None:
    """Say how long its threads went on after its main module; part of its work, like that."""
    if outcome.stopped_s is not None or inside.pid != run.keeper.pid:
        return None
    if inside.main_ended_s is None or inside.atexit_s is None:
        return None
    return max(0.0, inside.atexit_s - inside.main_ended_s)


def _findings(
    outcome: Outcome, inside: Inside, run: Run, limits: Limits, resource_warnings: bool
) -> list[Finding]:
    found = merge(
        inside,
        run.text,
        resource_warnings=resource_warnings,
        returncode=outcome.returncode,
        had_children=True if outcome.is_left else run.keeper.had_children,
    )
    if outcome.timed_out:
        found.append(_hang(outcome, inside, limits))
    elif outcome.returncode < 0 and -outcome.returncode not in _expected(run, outcome, limits):
        found.append(_crash(outcome, inside, run))
    shutdown_s = _shutdown_s(outcome, inside, run)
    if shutdown_s is not None and shutdown_s > limits.max_shutdown_s and not outcome.timed_out:
        found.append(_slow(shutdown_s, outcome, inside, run, limits))
    # The resource tracker, which may not have been told of them, has removed what it knew.
    remaining = [
        n for n in sorted(inside.shared_memory) if Path("/dev/shm", n.lstrip("/")).exists()
    ]
    if remaining:
        summary = f"{len(remaining)} not tracked, and still there: {', '.join(remaining)}"
        found.append(Finding("leaked-shared-memory", summary, pid=inside.pid))
    if outcome.is_left or (outcome.holds_output and not outcome.timed_out):
        found.append(_left_over(outcome))
    for pid, nbytes in outcome.held_gpu_bytes.items():
        summary = f"{nbytes / 1e6:.1f} MB by process {pid}, which outlived the program"
        found.append(Finding("gpu-memory-held", summary, pid=pid))
    return found


def _expected(run: Run, outcome: Outcome, limits: Limits) -> set[int]:
    """Return the signals that this checker sent or passed on: dying of them is no crash."""
    stopped = outcome.stopped_s is not None and limits.stop_signal is not None
    return {*run.forwarded, *([limits.stop_signal] if stopped and limits.stop_signal else [])}


def _hang(outcome: Outcome, inside: Inside, limits: Limits) -> Finding:
    phase = _last_phase(inside)
    if outcome.stopped_s is not None and limits.timeout_s is None:
        summary = f"it did not end after {signal_name(limits.stop_signal or 0)}, and was ended"
    else:
        summary = f"it did not end within {limits.timeout_s:g} s, and was ended"
    return Finding("hang", summary, outcome.stacks, phase, inside.pid)


def _last_phase(inside: Inside) -> str:
    if inside.pid is None:
        return ""
    if inside.teardown_s is not None:
        return "teardown"
    if inside.atexit_s is not None:
        return "atexit"
    return "threads" if inside.main_ended_s is not None else "main"


def _crash(outcome: Outcome, inside: Inside, run: Run) -> Finding:
    name = signal_name(-outcome.returncode)
    evidence = "\n".join(run.text.fatal) or inside.stacks.strip()
    return Finding("crash", f"{name} ended it", evidence, _last_phase(inside), inside.pid)


def _slow(shutdown_s: float, outcome: Outcome, inside: Inside, run: Run, limits: Limits) -> Finding:
    summary = f"{shutdown_s:.2f} s, where {limits.max_shutdown_s:g} s are allowed"
    lines = [f"{what}: {took_s:.2f} s" for what, took_s in _parts(outcome, inside, run, limits)]
    evidence = "\n".join(lines + ([outcome.stacks] if outcome.stacks else []))
    return Finding("slow-shutdown", summary, evidence, "", inside.pid)


def _parts(outcome: Outcome, inside: Inside, run: Run, limits: Limits) -> list[tuple[str, float]]:
    """Divide the time of a shutdown into what was done in it; together they are all of it."""
    stop = signal_name(limits.stop_signal or 0)
    moments: list[tuple[str, float | None]] = [(f"ending after {stop}", outcome.stopped_s)]
    if inside.pid == run.keeper.pid:  # Not those of a Python further down.
        moments += [
            ("joining threads", inside.main_ended_s),
            ("atexit callbacks", inside.atexit_s),
            ("taking the interpreter apart", inside.teardown_s),
        ]
    began = run.shutdown_began_s(inside) or outcome.ended_s
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
            summary = "something that kept starting another in its place ran on and was ended"
        return Finding("left-over-process", summary)
    many = count > 1
    summary = (
        f"{count} processes still ran and were ended" if many else "it still ran and was ended"
    )
    if outcome.holds_output:
        summary += "; the program's output was still open in them"
    evidence = "\n".join(map(str, outcome.left_over))
    return Finding("left-over-process", summary, evidence, pid=outcome.left_over[0].pid)
