"""Fixtures of the tests about who holds memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_utils._releasing import references

HERE = str(Path(__file__).resolve().parent)


@pytest.fixture
def only_own_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search begin at the tests' own functions, and not at the heap of pytest as well."""

    class OwnFrames(references.Frames):
        def __init__(self, without_package: str) -> None:
            super().__init__(without_package)
            self._frames = [f for f in self._frames if f.f_code.co_filename.startswith(HERE)]

    monkeypatch.setattr(references, "Frames", OwnFrames)
