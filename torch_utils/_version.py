"""The version, where the commands find it too: they start without this package's own name."""

from __future__ import annotations

__version__ = "0.1.0"
