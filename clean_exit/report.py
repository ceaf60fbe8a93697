"""The report about one run of a program."""

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
_LONG_S = 1.0  # a wait for threads that the summary mentions


@dataclass(frozen=True)
class ExitReport:
    """The report about one run.

    Attributes:
        command: The words of the command.
        returncode: As in `subprocess`: the program's exit code, or minus the signal's number.
        findings: The findings, in the order of the events where it is known.
        ignored: The number of findings that ``ignore`` left out.
        note: A remark that is useful but not a finding; or "".
        stdout: The program's stdout as text; of more than 2 MB, the first and the last million
            bytes. Empty if it was passed through without a copy.
        stderr: The program's stderr, with the same limits.
        duration_s: The time from start to end, in seconds.
        shutdown_s: The time from the joining of threads, or from the stop signal, to the end, in
            seconds; None if it is not known.
        threads_s: The time that the program waited for its threads after its main module, in
            seconds; None if it is not known or the program was stopped by a signal.
        probed: Whether the probe was loaded, which needs a Python program.
        stopped_by: The stop signal, if it was sent.
        timed_out: Whether the program had to be killed.
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
        """Whether there are no findings. A program with exit code 3 may exit cleanly."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """The exit code of ``clean-exit`` for this run; see `clean_exit.check`."""
        if self.timed_out:
            return TIMED_OUT
        code = 128 - self.returncode if self.returncode < 0 else self.returncode
        if self.was_stopped and self.returncode != 0:
            code = 0
        return UNCLEAN if code == 0 and self.findings else code

    @property
    def was_stopped(self) -> bool:
        """Whether the stop signal ended the program, as a signal or by an exit code."""
        number = self.stopped_by
        return number is not None and self.returncode in (0, -number, 128 + number)

    def to_json(self) -> dict[str, Any]:
        """Return the run as an entry of the JSON report."""
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
                    "child": finding.child,
                    "help": finding.help,
                }
                for finding in self.findings
            ],
        }

    def __str__(self) -> str:
        """Return a summary line and the findings with their evidence."""
        return "\n".join([summarise(self), *map(str, self.findings)])


def summarise(report: ExitReport) -> str:
    """Return the verdict, the program's own exit code and the times in one line."""
    count = len(report.findings)
    verdict = f"{count} finding{'s' if count > 1 else ''}" if count else "clean exit"
    if not report.probed:
        verdict += ", not probed"
    if report.ignored:
        verdict += f", {report.ignored} ignored"
    if report.timed_out:
        code = "the program was killed"
    elif report.was_stopped:
        code = f"the program was stopped by {signal_name(report.stopped_by or 0)}, as requested"
    elif report.returncode < 0:
        code = f"the program was killed by {signal_name(-report.returncode)}"
    else:
        code = f"the program's exit code is {report.returncode}"
        if report.returncode == UNCLEAN and any(map(_is_about_output, report.findings)):
            code += " by Python itself, which could not write its output"
    took = f"took {report.duration_s:.2f} s"
    parts = []
    if report.threads_s is not None and report.threads_s > _LONG_S:
        parts.append(f"{report.threads_s:.2f} s of waiting for threads")
    if report.shutdown_s is not None:
        parts.append(f"{report.shutdown_s:.2f} s of shutdown")
    if parts:
        took += f", including {' and '.join(parts)}"
    return f"{verdict}; {code} ({took})"


def _is_about_output(finding: Finding) -> bool:
    text = str(finding)
    return finding.id == "unraisable" and ("TextIOWrapper" in text or "flushing sys." in text)
