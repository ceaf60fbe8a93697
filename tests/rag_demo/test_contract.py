"""The retrievers of this package keep the contract of `contract.py`."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.retriever_kinds import KINDS

CHECKS = runpy.run_path(str(Path(__file__).with_name("contract.py")))["CHECKS"]
QUICK_OF_FAISS = ("exact", "replaces", "beside_changes")
"""The other kinds share the rest with the default one."""


class LocalPlace:
    """A folder, for a kind of `support.retriever_kinds.KINDS`."""

    keeps_nul = True

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.source = (
            "import pathlib, runpy\n"
            f"place = runpy.run_path({__file__!r})['LocalPlace']({kind!r}, "
            f"pathlib.Path({str(folder)!r}))"
        )

    def open(self, model: Any) -> Any:
        retriever = KINDS[self.kind](model)
        if self.folder.exists():
            retriever.load(self.folder)
        return retriever

    def keep(self, retriever: Any) -> None:
        retriever.save(self.folder)


def is_quick(kind: str, name: str) -> bool:
    return kind == "default" or (kind == "faiss" and any(word in name for word in QUICK_OF_FAISS))


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        pytest.param(
            kind,
            check,
            id=f"{check.__name__}, {kind}",
            marks=() if is_quick(kind, check.__name__) else pytest.mark.slow,
        )
        for kind in KINDS
        for check in CHECKS
    ],
)
def test_retriever_keeps_the_contract(kind: str, check: Any, tmp_path: Path) -> None:
    check(LocalPlace(kind, tmp_path / "index"))
