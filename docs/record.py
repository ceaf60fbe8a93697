"""Record what clean-exit says of two programs of the README: ``python -m docs.record``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "clean-exit.svg"
WIDTH = 88


def main() -> None:
    """Run both programs and write the picture."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    before, after = (program for program in programs if "class Trainer" in program)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "before.py").write_text(before, encoding="utf-8")
        Path(folder, "after.py").write_text(after, encoding="utf-8")
        screen = Console(record=True, width=WIDTH)
        for name in ("before.py", "after.py"):
            done = subprocess.run(
                [Path(sys.executable).with_name("clean-exit"), name],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            said = (done.stdout + done.stderr).replace(f"{folder}/", "")
            said = re.sub(r" at 0x\w+| \(took [^)]*\)", "", said)  # They vary.
            screen.print(Text(f"$ clean-exit {name}", style="bold green"))
            screen.print(Text(said.rstrip()))
            screen.print(Text("$ echo $?", style="bold green"))
            screen.print(Text(f"{done.returncode}"))
    svg = screen.export_svg(title="clean-exit")
    # Rich names a font on a CDN; every browser has a monospaced font of its own.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
