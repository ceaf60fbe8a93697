"""Run the tests with the oldest and the newest packages that pyproject.toml allows, and count.

Each row of the table is a Python with an environment of its own, made by uv: some gigabytes, for
torch comes with CUDA's libraries. A folder as the argument keeps them; else they are removed.
``ROWS="oldest"`` makes this row anew, and leaves the others as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = "versions"
# Of each row its Python, and what it asks of uv for the product's packages.
ROWS = {
    "oldest": ("3.10", ["--resolution", "lowest-direct"]),
    "gpu": ("3.12", ["torch==2.11.0", "sentence-transformers==6.0.0"]),
    "newest": ("3.13", []),
}
SHOWN = ("torch", "numpy", "sentence-transformers", "transformers", "faiss-cpu", "fastapi")


def tools() -> list[str]:
    """Return what the tests themselves need; pytest as in constraints.txt, which says why."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line.split(";") for line in requires("torch-cleanup") or ()]
    names = [name for name, *extra in lines if extra and "'test'" in extra[0]]
    return [*names, *(pin for pin in pins if pin.startswith("pytest=="))]


def make_environment(row: str, folder: Path) -> Path:
    """Make an environment with this checkout in it, unless it is there; return its Python."""
    from support.other_pythons import other_pythons

    version, asked = ROWS[row]
    uv = [sys.executable, "-m", "uv", "--quiet"]
    made = folder / "bin" / "python"
    if not (folder / "made").exists():
        python = other_pythons().get(version, version)  # uv downloads one that is not there.
        subprocess.run([*uv, "venv", "--clear", "--python", python, folder], check=True)
        install = [*uv, "pip", "install", "--python", str(made)]
        checkout = ["--editable", f"{ROOT}[rag,pdf,model,service]"]
        subprocess.run([*install, *checkout, *asked], check=True)
        subprocess.run([*install, *tools()], check=True)
        (folder / "made").touch()
    return made


def run_on(python: Path, report: Path) -> dict[str, object]:
    """Run `make test`'s tests on a Python; count how they went, and name those that failed."""
    from gpu.run import read_xml

    command = [str(python), "-m", "pytest", "-q", "-n", "4", "--no-loadscope-reorder"]
    command += ["--dist", "loadgroup", "-m", "not slow", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")
    tests = read_xml(report)
    return {
        **Counter(test["outcome"] for test in tests.values()),
        "names_of_failed": [name for name, test in tests.items() if test["outcome"] == "failed"],
    }


def packages_of(python: Path) -> dict[str, str]:
    """Return the versions of the packages that the table shows, and that of Python."""
    code = (
        "import json, sys\nfrom importlib.metadata import version\n"
        f"found = {{name: version(name) for name in {SHOWN!r}}}\n"
        "print(json.dumps({'python': sys.version.split()[0], **found}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def summarise(rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the rows of the table in the documentation."""
    columns = ("python", *SHOWN, "passed", "skipped", "failed")
    return [
        f"| {name} | {' | '.join(str(rows[name].get(column, 0)) for column in columns)} |"
        for name in ROWS
        if name in rows
    ]


def main(kept: str | None) -> int:
    """Make the table; return 1 if a test of it has failed."""
    from benchmarks.results_file import write

    chosen = os.environ.get("ROWS", " ".join(ROWS)).split()
    path = ROOT / "benchmarks" / "results" / f"{RESULT}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    for row in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(kept or temporary, row).absolute()
            python = make_environment(row, folder)
            rows[row] = {**packages_of(python), **run_on(python, folder / "report.xml")}
    write(RESULT, {"rows": rows})
    print(*summarise(rows), sep="\n")
    return int(any(rows[row].get("failed") for row in chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if sys.argv[1:] else None))
