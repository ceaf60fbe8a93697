"""Run the test suites of public packages with and without clean-exit.

Pass a folder: each folder in it is the unpacked source of one package, and this Python has what its
tests need. The two ways alternate. The outcomes have to be equal, every finding is listed with its
test, and the processor time of the command, its children included, is compared by medians.

    python -m benchmarks.bench_suites FOLDER [NAME...]
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_file import write

ROUNDS = 5
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
TIMEOUT_S = 900


def run(command: list[str], folder: Path) -> tuple[float, int, str]:
    """Return the processor time in seconds, the exit code, and the last line with the outcomes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    outcomes = re.findall(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)", done.stdout)
    return spent_s, done.returncode, ", ".join(f"{count} {what}" for count, what in outcomes[-6:])


def compare(folder: Path) -> dict[str, Any]:
    """Run one suite both ways."""
    times: dict[bool, list[float]] = {False: [], True: []}
    outcomes: dict[bool, set[tuple[int, str]]] = {False: set(), True: set()}
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        checked = [sys.executable, "-m", "clean_exit", "-q", "--report-json", str(report), "--"]
        run(PYTEST, folder)  # Writes the byte code.
        for _ in range(ROUNDS):
            for is_checked in (False, True):
                spent_s, code, outcome = run([*checked * is_checked, *PYTEST], folder)
                times[is_checked].append(spent_s)
                if is_checked:
                    code = json.loads(report.read_text(encoding="utf-8"))["runs"][0]["returncode"]
                outcomes[is_checked].add((code, outcome))
        found = json.loads(report.read_text(encoding="utf-8"))["runs"][0]["findings"]
    plain_s, checked_s = statistics.median(times[False]), statistics.median(times[True])
    return {
        "suite": folder.name,
        "plain_s": round(plain_s, 2),
        "checked_s": round(checked_s, 2),
        "ratio": round(checked_s / plain_s, 3),
        "outcomes": sorted(outcomes[False]),
        "is_equal": outcomes[False] == outcomes[True],
        "findings": [[one["id"], one["test"], one["summary"]] for one in found],
    }


def main() -> None:
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    wanted = sys.argv[2:]
    rows = [compare(path) for path in folders if not wanted or path.name in wanted]
    write("suites", {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
