"""Run the real programs on each Python that there is, and write a table of their verdicts.

The checker runs on the same Python. This one has its packages; the others get an environment of
their own for it, with what can be installed there, but torch, which is gigabytes. A folder as the
argument keeps these environments; else they are removed. ``PYTHONS="3.11 3.13"`` updates only
these columns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from support.other_pythons import other_pythons

ROOT = Path(__file__).resolve().parents[2]

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
RESULT = "clean_exit_programs"


def requirements() -> list[str]:
    """Return the dependency group of these programs."""
    import tomllib

    names: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][
        "corpus"
    ]
    return names


def make_environment(python: str, folder: Path) -> str:
    """Make an environment with the packages of the corpus; return its Python."""
    made = folder / "bin" / "python"
    if made.exists():
        return str(made)
    subprocess.run([python, "-m", "venv", folder], check=True)
    install = [str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for name in requirements():
        done = subprocess.run([*install, name], check=False, stderr=subprocess.DEVNULL)
        if done.returncode:
            print(f"without {name}", flush=True)
    return str(made)


def run_here() -> None:
    """Run all of them on this Python, and print of each what was expected and what was said."""
    from acceptance.exits.real_pools import POOLS
    from acceptance.exits.real_programs import is_right, run
    from acceptance.exits.real_servers import SERVERS
    from acceptance.exits.real_tools import TOOLS

    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
    for program in (*SERVERS, *POOLS, *TOOLS):
        expected = show(program.exit_code, program.findings)
        if missing := program.missing():
            verdict, said = "skipped", f"{missing} is not installed"
        else:
            with tempfile.TemporaryDirectory() as folder:
                model = _make_model(folder) if program.group == "sentence-transformers" else None
                report = run(program, Path(folder), model)
            said = show(report.exit_code, {finding.id for finding in report.findings})
            verdict = "right" if is_right(program, report) else "wrong"
            if verdict == "wrong":
                print(report, report.stderr[-3000:], sep="\n", file=sys.stderr)
        print(json.dumps([str(program), expected, verdict, said]), flush=True)


def show(exit_code: int, findings: Collection[str]) -> str:
    """Write what clean-exit says: its exit code, and the findings."""
    return " ".join([str(exit_code), *sorted(findings)])


def _make_model(folder: str) -> Path:
    from support.tiny_model import write_tiny_model

    made: Path = write_tiny_model(Path(folder, "tiny"))
    return made


def run_on(python: str, wanted: str) -> list[tuple[str, str, str, str]]:
    """Run all of them on a Python: of each its name, what was expected, the verdict, what was said.

    The verdict is about the verdict: right, wrong, or skipped.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    rows = []
    command = [python, "-m", "support.real_table", "--here"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, expected, verdict, said = json.loads(line)
            rows.append((name, expected, verdict, said))
            print(f"{wanted:5} {name:40} {verdict}: {said}", flush=True)
    if process.returncode:
        raise SystemExit(f"{python} ended with {process.returncode}")
    return rows


def packages_of(python: str) -> dict[str, str]:
    """Return the versions of the packages of the corpus that a Python has."""
    names = [requirement.split(">")[0] for requirement in requirements()]
    done = subprocess.run(
        [python, "-m", "support.real_table", "--versions", *names], capture_output=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def print_versions(names: list[str]) -> None:
    """Print the versions of packages that are installed here."""
    found = {}
    for name in (*names, "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    print(json.dumps(found))


def main(kept: str | None) -> int:
    """Make the table; return 1 if a verdict in it is wrong."""
    from benchmarks.results_file import write

    chosen = os.environ.get("PYTHONS", " ".join(VERSIONS)).split()
    path = ROOT / "benchmarks" / "results" / f"{RESULT}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    table: dict[str, dict[str, str]] = {
        row.pop("program"): {key: said for key, said in row.items() if key not in chosen}
        for row in before.get("programs", ())
    }
    packages, counts = (
        {key: each for key, each in before.get(name, {}).items() if key not in chosen}
        for name in ("packages", "counts")
    )
    for wanted in chosen:
        python = sys.executable if wanted == OWN else other_pythons().get(wanted)
        if python is None:
            print(f"there is no Python {wanted}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if wanted != OWN:
                python = make_environment(python, Path(kept or folder, wanted))
            packages[wanted] = packages_of(python)
            rows = run_on(python, wanted)
        counts[wanted] = Counter(verdict for _, _, verdict, _ in rows)
        for name, expected, verdict, said in rows:
            table.setdefault(name, {})["expected"] = expected
            table[name][wanted] = f"{verdict}: {said}"
    programs = [
        {"program": name, "expected": row.pop("expected"), **dict(sorted(row.items()))}
        for name, row in table.items()
    ]
    counts = dict(sorted(counts.items()))
    write(RESULT, {"counts": counts, "packages": packages, "programs": programs})
    print(*summarise(counts), sep="\n")
    return int(any(count.get("wrong") for count in counts.values()))


def summarise(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the rows of the table in the documentation."""
    verdicts = ("right", "wrong", "skipped")
    return [
        f"| {wanted} | {' | '.join(str(count.get(verdict, 0)) for verdict in verdicts)} |"
        for wanted, count in counts.items()
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        run_here()
    elif sys.argv[1:2] == ["--versions"]:
        print_versions(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1] if sys.argv[1:] else None))
