"""What a check found out about one run of a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clean_exit.findings import FINDINGS, Finding, signal_name

SCHEMA_VERSION = 1
UNCLEAN = 120
TIMED_OUT = 124
USAGE = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127
_LONG_S = 1.0  # for threads: what is said of them


@dataclass(frozen=True)
class ExitReport:
    """How a program left.

    Attributes:
        command: What was run.
        returncode: As `subprocess` gives it: the program's own, or minus a signal's number.
        findings: What was not clean, in the order of its happening as far as that is known.
        ignored: How many findings were left out on request.
        note: Something else that is worth knowing, and no finding; or empty.
        stdout, stderr: What the program wrote, as text; of more than 2 MB the first and the
            last million bytes. Empty for a stream that was passed through without a copy.
        duration_s: From its start to its end, in seconds.
        shutdown_s: From the moment when its threads had been joined (or the signal that asked it
            to stop) to its end; None where that moment is not known.
        threads_s: From the end of its main module to that moment, in which it waited for its
            threads; None where one of the two is not known, or it was asked to stop.
        probed: Whether the probe was loaded: the program is Python.
        stopped_by: The signal that was sent to stop it, if that was asked for and happened.
        timed_out: Whether it had to be killed.
    """

    command: tuple[str, ...]
    returncode: int
    findings: tuple[Finding, ...] = ()
    ignored: int = 0
    note: str = ""
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)
    duration_s: float = 0.0
    shutdown_s: float | None = None
    threads_s: float | None = None
    probed: bool = False
    stopped_by: int | None = None
    timed_out: bool = False

    @property
    def clean(self) -> bool:
        """Whether there is no finding. A program may say 3 and leave cleanly."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """What ``clean-exit`` exits with: see `clean_exit.check`."""
        if self.timed_out:
            return TIMED_OUT
        code = 128 - self.returncode if self.returncode < 0 else self.returncode
        if self.was_stopped and self.returncode != 0:
            code = 0
        return UNCLEAN if code == 0 and self.findings else code

    @property
    def was_stopped(self) -> bool:
        """Whether it ended as the stop signal asks for: of it, or with its exit code."""
        number = self.stopped_by
        return number is not None and self.returncode in (0, -number, 128 + number)

    def to_json(self) -> dict[str, Any]:
        """Return what the JSON report contains, one run of it."""
        return {
            "command": list(self.command),
            "clean": self.clean,
            "exit_code": self.exit_code,
            "returncode": self.returncode,
            "duration_s": round(self.duration_s, 4),
            "shutdown_s": None if self.shutdown_s is None else round(self.shutdown_s, 4),
            "threads_s": None if self.threads_s is None else round(self.threads_s, 4),
            "probed": self.probed,
            "timed_out": self.timed_out,
            "stopped_by": None if self.stopped_by is None else signal_name(self.stopped_by),
            "ignored": self.ignored,
            "note": self.note or None,
            "findings": [
                {
                    "id": finding.id,
                    "title": FINDINGS[finding.id],
                    "summary": finding.summary,
                    "evidence": finding.evidence,
                    "phase": finding.phase or None,
                    "pid": finding.pid,
                    "process": finding.process or None,
                    "help": finding.help,
                }
                for finding in self.findings
            ],
        }

    def __str__(self) -> str:
        """Return the findings with their evidence, after one line that sums up."""
        return "\n".join([summarise(self), *map(str, self.findings)])


def summarise(report: ExitReport) -> str:
    """Say in one line how a program left: the verdict, then its own exit code."""
    count = len(report.findings)
    verdict = f"{count} finding{'s' if count > 1 else ''}" if count else "clean exit"
    if report.ignored:
        verdict += f", {report.ignored} ignored"
    if report.timed_out:
        code = "the program was killed"
    elif report.was_stopped:
        code = f"the program was stopped by {signal_name(report.stopped_by or 0)}, as asked"
    elif report.returncode < 0:
        code = f"the program was killed by {signal_name(-report.returncode)}"
    else:
        code = f"the program's exit code is {report.returncode}"
    took = f"took {report.duration_s:.2f} s"
    parts = []
    if report.threads_s is not None and report.threads_s > _LONG_S:
        parts.append(f"{report.threads_s:.2f} s of waiting for threads")
    if report.shutdown_s is not None:
        parts.append(f"{report.shutdown_s:.2f} s of shutdown")
    if parts:
        took += f", including {' and '.join(parts)}"
    return f"{verdict}; {code} ({took})"
