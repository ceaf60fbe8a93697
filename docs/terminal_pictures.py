"""Record pictures of a terminal: ``python -m docs.terminal_pictures``.

They show what clean-exit says of two programs of the README, and a test that fails for its growth.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WIDTH = 88
LEAKY_TEST = """import torch

_CACHE = {}


def table(size):
    return _CACHE.setdefault(size, torch.ones(size, size))


def test_scores():
    assert table(512).sum() == 512 * 512
"""


def main() -> None:
    """Run the programs and write the pictures."""
    record_clean_exit()
    record_growth()


def record_growth() -> None:
    """Record a test that leaves memory behind."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_scores.py").write_text(LEAKY_TEST, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-growth"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = re.sub(r" in [0-9.]+s", "", done.stdout)
    screen = Console(record=True, width=WIDTH)
    screen.print(Text("$ cat test_scores.py", style="bold green"))
    screen.print(Text(LEAKY_TEST.rstrip()))
    screen.print(Text("$ pytest -q --no-growth", style="bold green"))
    screen.print(Text(said.rstrip()))
    save(screen, "no-growth")


def save(screen: Console, name: str) -> None:
    """Write a picture."""
    svg = screen.export_svg(title=name)
    # Rich names a font on a CDN; every browser has a monospaced font of its own.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (DOCS / f"{name}.svg").write_text(svg, encoding="utf-8")


def record_clean_exit() -> None:
    """Record the two programs of the README.

    Raises:
        RuntimeError: There are other findings than the one that the README explains.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    before, after = (program for program in programs if "class Generator" in program)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "before.py").write_text(before, encoding="utf-8")
        Path(folder, "after.py").write_text(after, encoding="utf-8")
        screen = Console(record=True, width=WIDTH)
        for name in ("before.py", "after.py"):
            done = subprocess.run(
                # A busy machine may take long for anything.
                [Path(sys.executable).with_name("clean-exit"), "--max-shutdown", "300", name],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            said = (done.stdout + done.stderr).replace(f"{folder}/", "")
            said = re.sub(r" at 0x\w+| \(took [^)]*\)", "", said)  # They vary.
            found = re.findall(r"see clean-exit --explain ([\w-]+)", said)
            if found != ["unraisable"] * (name == "before.py"):
                raise RuntimeError(f"{name} has the findings {found}")
            screen.print(Text(f"$ clean-exit {name}", style="bold green"))
            screen.print(Text(said.rstrip()))
            screen.print(Text("$ echo $?", style="bold green"))
            screen.print(Text(f"{done.returncode}"))
    save(screen, "clean-exit")


if __name__ == "__main__":
    main()
