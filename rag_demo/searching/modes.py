"""The ways to search: by vectors, by words, and by both, fused by their ranks."""

from __future__ import annotations

__all__ = ["MODES"]

MODES = ("dense", "bm25", "hybrid")
