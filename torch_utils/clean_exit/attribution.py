"""What counts: the record from inside and the words on stderr brought together.

A message on stderr is dismissed, as a quotation, only if the record proves that it is one.
Otherwise what stderr says counts, but for what the record has already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .events import Inside
from .findings import Finding, signal_name
from .messages import Said
from .stderr_text import StderrText

_IN_FULL = 20  # findings of one kind
_ERRORS = ("unraisable", "atexit-error", "finalizer-error", "thread-error")
_LEAKS = ("leaked-semaphore", "leaked-shared-memory")
# What a shell, and whoever else passes on a child's end, exits with when that crashed.
_CRASHED = {128 + number: number for number in (4, 6, 7, 8, 11)}


def merge(
    inside: Inside,
    text: StderrText,
    *,
    resource_warnings: bool,
    returncode: int = 0,
    had_children: bool | None = None,
) -> list[Finding]:
    """Join both sources: what the probe saw is on stderr as well, as a rule.

    Args:
        inside: The record.
        text: What was recognised on stderr.
        resource_warnings: Whether these were asked for.
        returncode: The program's, as `subprocess` gives it.
        had_children: Whether there was any other process of the program, as seen from outside;
            None if that is not known.
    """
    found = list(inside.findings)
    is_alone = inside.is_alone and not had_children
    known = Counter(inside.errors)
    told = Counter(finding.id for finding in inside.findings)
    for said in text.said:
        if said.finding.id == "resource-warning":
            if resource_warnings:
                found.append(said.finding)
        elif _is_recorded(said, known, told) or (is_alone and _would_be(said, inside)):
            continue
        elif said.finding not in found:
            found.append(said.finding)
    if not is_alone:
        found += _counted(text, known)
    if returncode >= 0 and not (is_alone or had_children is False):
        crashes = _crashes_of_children(inside, text, returncode)
        recorded = [place for place, finding in enumerate(found) if finding.id == "crash"]
        if recorded and crashes:  # What it printed stands with what ended it.
            first = recorded[0]
            found[first] = replace(found[first], evidence=crashes[0].evidence)
        else:
            found += crashes
    return found


def condense(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the first of many errors in full, and count the others by kind and type."""
    kept, more, numbers = [], Counter[tuple[str, str]](), Counter[str]()
    for finding in findings:
        numbers[finding.id] += 1
        if finding.id in _ERRORS and numbers[finding.id] > _IN_FULL:
            more[finding.id, finding.summary.partition(":")[0]] += 1
        else:
            kept.append(finding)
    return kept + [Finding(found, f"{count} more: {name}") for (found, name), count in more.items()]


def _is_recorded(said: Said, known: Counter[str], told: Counter[str]) -> bool:
    """Say whether the record has this message's event; each entry stands for one message."""
    if said.finding.id == "process-group-not-destroyed":
        return told[said.finding.id] > 0
    if said.finding.id in _LEAKS and told[said.finding.id] > 0:
        told[said.finding.id] -= 1
        return True
    name = said.error.rpartition(".")[2]
    if name and known[name] > 0:
        known[name] -= 1
        return True
    return False


def _would_be(said: Said, inside: Inside) -> bool:
    """Say whether the record of a process that was alone would have this message's event."""
    if said.needs:
        # Printed by a module of Python's, of which the record says no more than whether it was
        # there.
        return not any(name.endswith(said.needs) for name in inside.modules)
    return bool(said.error)


def _counted(text: StderrText, known: Counter[str]) -> list[Finding]:
    """Return what was only counted on stderr, and is not in the record either."""
    listed = Counter((said.finding.id, said.error.rpartition(".")[2]) for said in text.said)
    found = []
    for (kind, name), count in text.counts.items():
        more = count - listed[kind, name]
        # The probe's counts may lag behind: they are exact when a phase ends, and double between.
        if kind in _ERRORS and more > 0 and known[name] <= 0:
            found.append(Finding(kind, f"{more} more: {name or 'errors'}"))
    return found


def _crashes_of_children(inside: Inside, text: StderrText, returncode: int) -> list[Finding]:
    evidence = "\n".join(text.fatal)
    if text.crashes:
        summary = f"a process that it started crashed: {text.crashes[0]}"
        return [Finding("crash", summary, evidence or "\n".join(text.crashes))]
    if text.says_aborted and inside.unfinished:  # Scripts say that too, of what they gave up.
        return [Finding("crash", "a process that it started crashed: Aborted")]
    if returncode in _CRASHED:
        name = signal_name(_CRASHED[returncode])
        return [Finding("crash", f"{name} ended a process that it started: exit code {returncode}")]
    return []
