"""The version of the distribution, for both commands."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the version, or a note that this package was copied and not installed."""
    try:
        return metadata.version("torch-cleanup")
    except metadata.PackageNotFoundError:
        return "(not installed)"
