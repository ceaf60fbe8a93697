"""Run the tests with the oldest and the newest packages that pyproject.toml allows, and count.

uv makes an environment for each row of the table. Those with torch take gigabytes, because PyPI's
torch includes CUDA's libraries. ``python -m tests.support.versions oldest newest`` updates these
rows only. ``--keep FOLDER`` keeps the environments.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = "versions"
EXTRAS = "[rag,pdf,model,service]"
WITHOUT_TORCH = ["tests/torch_utils", "tests/clean_exit"]
# For each row: its Python, its extras, uv's options for them, and its tests.
ROWS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "oldest": ("3.11", EXTRAS, ["--resolution", "lowest-direct"], ["tests"]),
    "gpu": ("3.12", EXTRAS, ["torch==2.11.0", "sentence-transformers==6.0.0"], ["tests"]),
    "newest": ("3.14", EXTRAS, [], ["tests"]),
    **{
        f"without-torch-{version}": (version, "", [], WITHOUT_TORCH)
        for version in ("3.11", "3.12", "3.13", "3.14")
    },
}
PACKAGES = ("torch", "numpy", "sentence-transformers", "transformers", "faiss-cpu", "fastapi")


def make_environment(row: str, folder: Path) -> Path:
    """Return the Python of the row's environment; make the environment if it does not exist."""
    from tests.support.other_pythons import other_pythons

    version, extras, options, _ = ROWS[row]
    uv = [sys.executable, "-m", "uv", "--quiet"]
    python = folder / "bin" / "python"
    finished = folder / "finished"
    if not finished.exists():
        base = other_pythons().get(version, version)  # uv downloads a missing Python.
        subprocess.run([*uv, "venv", "--clear", "--python", base, str(folder)], check=True)
        install = [*uv, "pip", "install", "--python", str(python)]
        checkout = ["--editable", f"{ROOT}{extras}"]
        subprocess.run([*install, *checkout, *options], check=True)
        subprocess.run([*install, "--group", f"{ROOT / 'pyproject.toml'}:test"], check=True)
        finished.touch()
    return python


def run_tests(python: Path, paths: list[str], report: Path) -> dict[str, str]:
    """Run the quick tests; return the outcome of each."""
    command = [str(python), "-m", "pytest", "-q", "-n", "4", "--no-loadscope-reorder", *paths]
    command += ["--dist", "loadgroup", "-m", "not slow", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        failed = "failed" if tags & {"failure", "error"} else ""
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        outcomes[name] = failed or ("skipped" if "skipped" in tags else "passed")
    return outcomes


def packages_of(python: Path) -> dict[str, str]:
    """Return the versions of Python and of those PACKAGES that are installed."""
    code = (
        "import json, sys\nfrom importlib.metadata import distributions\n"
        f"found = {{d.name: d.version for d in distributions() if d.name in {PACKAGES!r}}}\n"
        "print(json.dumps({'python': sys.version.split()[0], **found}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(arguments: list[str]) -> int:
    """Update the table; return 1 if a test failed."""
    from benchmarks.results_file import write

    parser = argparse.ArgumentParser(prog="python -m tests.support.versions")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the environments there")
    options = parser.parse_args(arguments)
    chosen = options.rows or [*ROWS]
    if unknown := [row for row in chosen if row not in ROWS]:
        parser.error(f"unknown rows {unknown}; choose from {', '.join(ROWS)}")
    path = ROOT / "benchmarks" / "results" / f"{RESULT}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    rows = {name: row for name, row in rows.items() if name in ROWS}
    for row in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(options.keep or temporary, row).absolute()
            python = make_environment(row, folder)
            outcomes = run_tests(python, ROWS[row][3], folder / "report.xml")
            failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
            counts = Counter(outcomes.values())
            rows[row] = {**packages_of(python), **counts, "names_of_failed": failed}
    write(RESULT, {"rows": rows})
    print(json.dumps(rows, indent=2))
    return int(any(rows[row].get("failed") for row in chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
