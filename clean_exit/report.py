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


@dataclass(frozen=True)
class ExitReport:
    """The report about one run.

    Attributes:
        command: The words of the command.
        returncode: As in `subprocess`: the program's exit code, or minus the signal's number.
        findings: The findings, in the order of the events where it is known.
        ignored: The number of findings that ``ignore`` left out.
        note: A remark that is useful but not a finding; or "".
        stdout: The last megabyte of the program's stdout as text; empty if it was passed through
            without a copy.
        stderr: The last megabyte of the program's stderr.
        duration_s: The time from start to end, in seconds.
        shutdown_s: The time from the joining of threads, or from the stop signal, to the end, in
            seconds; None if it is not known.
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
            **_fields(self, "stdout", "stderr", "findings"),
            "clean": self.clean,
            "exit_code": self.exit_code,
            "stopped_by": None if self.stopped_by is None else signal_name(self.stopped_by),
            "findings": [
                {**_fields(f), "title": FINDINGS[f.id], "evidence": f.evidence, "help": f.help}
                for f in self.findings
            ],
        }

    def __str__(self) -> str:
        """Return a summary line, the note, and the findings with their evidence."""
        lines = [summarise(self)]
        if self.note:
            lines.append(f"  note: {self.note}")
        for finding in self.findings:
            lines += ["", str(finding), f"    see {finding.help}"]
        return "\n".join(lines)


def _fields(record: ExitReport | Finding, *without: str) -> dict[str, Any]:
    """Return the attributes by name, with None for empty strings."""
    return {
        name: None if value == "" else value
        for name, value in vars(record).items()
        if name not in without
    }


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
    took = f"took {report.duration_s:.2f} s"
    if report.shutdown_s is not None:
        took += f", including {report.shutdown_s:.2f} s of shutdown"
    return f"{verdict}; {code} ({took})"
