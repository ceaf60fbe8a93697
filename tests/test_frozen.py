"""The acceptance material is what `tests/acceptance/frozen.sha256` lists."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from support.programs import ROOT

FOLDER = ROOT / "tests" / "acceptance"
LIST = FOLDER / "frozen.sha256"


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", ".txt", ".json")
    }


def listed(text: str) -> dict[str, str]:
    """Return what a list of `sha256sum` says."""
    return {path: digest for digest, path in (line.split("  ", 1) for line in text.splitlines())}


def test_acceptance_material_is_unchanged() -> None:
    found, frozen = checksums(FOLDER), listed(LIST.read_text(encoding="utf-8"))
    assert len(frozen) > 20
    changed = {path for path in found.keys() | frozen.keys() if found.get(path) != frozen.get(path)}
    assert not changed, (
        f"frozen files have changed: {sorted(changed)}; if a decision changes what must hold, run "
        "`make freeze` (see tests/acceptance/README.md), or else undo the change"
    )


if __name__ == "__main__":  # make freeze
    sums = checksums(FOLDER)
    LIST.write_text("".join(f"{digest}  {path}\n" for path, digest in sums.items()))
    sys.stdout.write(f"{len(sums)} files are listed in {LIST.relative_to(ROOT)}\n")
