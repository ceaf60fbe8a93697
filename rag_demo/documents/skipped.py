"""What was passed over while documents were read, and why; counted, so that it stays small."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

__all__ = ["CANNOT_BE_READ", "EMPTY", "EXCLUDED", "NOT_TEXT", "UNKNOWN_KIND", "Skipped"]

NOT_TEXT = "that is not UTF-8 text"
UNKNOWN_KIND = "of no kind that is read"
EXCLUDED = "left out as asked"
CANNOT_BE_READ = "that cannot be read"
EMPTY = "without text"
_EXPECTED = frozenset({UNKNOWN_KIND, EXCLUDED, EMPTY})
_NAMES = 3  # of files of one reason that is expected
_MORE_NAMES = 20  # of any other: these are named, because somebody may want to mend them
_KINDS = 8  # of suffixes of one reason


class Skipped:
    """What was passed over: a count by reason and suffix, and the first names."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, reason: str, detail: object = "") -> None:
        """Count something that was passed over.

        Args:
            name: Of a file, a folder (it ends with "/") or a line (":" and its number).
            reason: One of few; it fits behind "a file".
            detail: What there is to say of this one.
        """
        place, _, line = name.rpartition(":")
        if name.endswith("/"):
            kind = "folder"
        elif place and line.isdecimal():
            kind = "line"
        else:
            kind = PurePath(name).suffix.lower() or "without suffix"
        self._counts.setdefault(reason, Counter())[kind] += 1
        names = self._names.setdefault(reason, [])
        if len(names) < (_NAMES if reason in _EXPECTED else _MORE_NAMES):
            names.append(f"{name}: {detail}" if detail else name)

    def __len__(self) -> int:
        return sum(counts.total() for counts in self._counts.values())

    def __str__(self) -> str:
        """One line: the reasons, those that are expected last."""
        reasons = sorted(self._counts, key=lambda reason: (reason in _EXPECTED, reason))
        return f"skipped {len(self)}: " + "; ".join(map(self._describe, reasons))

    def _describe(self, reason: str) -> str:
        counts, names = self._counts[reason], self._names[reason]
        most = counts.most_common(_KINDS)
        kinds = [f"{count} {_plural(kind, count)}" for kind, count in most]
        others = counts.total() - sum(count for _, count in most)
        if others:
            kinds.append(f"{others} others")
        more = ", ..." if counts.total() > len(names) else ""
        if counts.total() > 1:
            reason = reason.replace("that is ", "that are ")
        return f"{', '.join(kinds)} {reason} ({', '.join(names)}{more})"


def _plural(kind: str, count: int) -> str:
    return f"{kind}s" if kind in ("folder", "line") and count != 1 else kind
