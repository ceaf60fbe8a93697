"""Write the parts of the documentation that come from elsewhere: ``python -m docs.figures``.

A page has them between two comments, so that it is whole as plain Markdown::

    <!-- table: release_minilm -->
    <!-- end -->

``table: NAME`` is a function of docs/tables.py, ``file: PATH`` an example, ``text: PATH`` another
page with its headings one level lower, and ``help: COMMAND`` what a command prints with ``--help``.
``names: PACKAGE`` is the list of its public names, and ``api: NAME ...`` their reference. The test
of a page in tests/test_docs.py fails if it is not up to date.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.results_file import RESULTS
from docs.api import names_of, reference_of
from docs.tables import TABLES


def help_of(command: str) -> str:
    """Return what ``COMMAND --help`` prints, as a block."""
    module = {"clean-exit": "clean_exit", "clean-exit-lint": "clean_exit.lint"}[command]
    run = [sys.executable, "-m", module, "--help"]
    environment = {"COLUMNS": "96", "LANG": "C.UTF-8", "NO_COLOR": "1"}
    done = subprocess.run(
        run, env=environment, cwd=RESULTS.parents[1], check=True, capture_output=True, text=True
    )
    return f"```text\n{done.stdout.rstrip()}\n```"


def example_report() -> str:
    """Return the report of a program that fails at exit."""
    program = "import atexit; atexit.register(lambda: 1 / 0)"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = ["clean_exit", "-q", "--report-json", str(file), "-c", program]
        subprocess.run(
            [sys.executable, "-m", *command],
            cwd=RESULTS.parents[1],
            check=False,
            capture_output=True,
        )
        report = json.loads(file.read_text(encoding="utf-8"))
    run = report["runs"][0]
    run["command"][0] = "python"  # not the path of this machine's Python
    run |= {"duration_s": 0.05, "shutdown_s": 0.01}
    for finding in run["findings"]:
        finding["pid"] = 12345
    return f"```json\n{json.dumps(report, indent=2)}\n```"


TABLES["example_report"] = example_report


def example(path: Path, link: str) -> str:
    """Return a link to a file, and the file as a block; of a notebook, its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    shown = link.removeprefix("../")
    return f"[{shown}]({link}):\n\n```python\n{text.rstrip()}\n```"


def lowered(path: Path) -> str:
    """Return the text of a page, or of a changelog, with each heading one level lower."""
    text = path.read_text(encoding="utf-8")
    _, _, after = text.partition("<!-- towncrier release notes start -->\n")
    parts = re.split(r"(^```.*?^```$)", (after or text).strip(), flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"^#", "##", part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


KINDS: dict[str, Callable[[str, Path], str]] = {
    "api": lambda names, folder: reference_of(names),
    "file": lambda path, folder: example(folder / path, path),
    "help": lambda command, folder: help_of(command),
    "names": lambda package, folder: names_of(package),
    "table": lambda name, folder: TABLES[name](),
    "text": lambda path, folder: lowered(folder / path),
}


def filled(page: Path) -> str:
    """Return the text of a page with what its comments name."""
    return re.sub(
        rf"<!-- ({'|'.join(KINDS)}): (.+?) -->\n(?:.*?\n)??<!-- end -->",
        lambda match: (
            f"<!-- {match[1]}: {match[2]} -->\n"
            f"{KINDS[match[1]](match[2], page.parent)}\n<!-- end -->"
        ),
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def main() -> None:
    """Write all pages again."""
    docs = Path(__file__).parent
    for page in [docs.parent / "README.md", *sorted(docs.rglob("*.md"))]:
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
