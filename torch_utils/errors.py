"""Every error that this package raises on purpose."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = [
    "CleanupError",
    "ModelInUseError",
    "ModelProcessError",
    "NoRoomError",
    "ReleasedError",
    "ResourceClosedError",
    "SignalError",
    "TorchUtilsError",
    "UnknownModelError",
]


class TorchUtilsError(Exception):
    """The base of this package's errors."""


class ResourceClosedError(TorchUtilsError, RuntimeError):
    """A resource was used after it had been closed."""


class ReleasedError(TorchUtilsError, RuntimeError):
    """A module was used after `release` had taken its weights."""


class ReleasedAttributeError(ReleasedError, AttributeError):
    """The same, where an attribute was read: `hasattr` says no, and `getattr` takes a default."""


class ModelInUseError(TorchUtilsError, RuntimeError):
    """A hosted model is lent, and somebody wants it unloaded; says where it was lent."""


class ModelProcessError(TorchUtilsError, RuntimeError):
    """A model's own process has ended, or what it answered cannot be brought here."""


class NoRoomError(TorchUtilsError):
    """A pool could make no room for a model, in time or ever. Says who holds what."""


class UnknownModelError(TorchUtilsError, KeyError):
    """A pool has no model of this name."""

    def __str__(self) -> str:
        return TorchUtilsError.__str__(self)  # A KeyError's would be the repr of the message.


class SignalError(TorchUtilsError, ValueError):
    """A signal handler cannot be installed here, or not for that signal."""


if sys.version_info >= (3, 11):

    class CleanupError(TorchUtilsError, ExceptionGroup[Exception]):  # noqa: F821
        """Steps of a cleanup failed, and ``strict=True`` asked to hear of it.

        An `ExceptionGroup`: ``except*`` and ``.exceptions`` work as usual.
        """

        def derive(self, excs: Sequence[Exception], /) -> CleanupError:  # type: ignore[override]
            """Keep this type when ``except*`` splits the group."""
            return CleanupError(self.message, excs)

else:  # Python 3.10 has no exception groups: the same two attributes, without ``except*``.

    class CleanupError(TorchUtilsError):
        """Steps of a cleanup failed, and ``strict=True`` asked to hear of it."""

        def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
            super().__init__(message, list(exceptions))
            self.message = message
            self.exceptions = tuple(exceptions)

        def __str__(self) -> str:
            causes = "; ".join(f"{type(error).__name__}: {error}" for error in self.exceptions)
            return f"{self.message}: {causes}"


def shown(error: BaseException) -> str:
    """Return an error's repr, or its type where it has none: a class may raise what it likes."""
    try:
        return repr(error)
    except Exception:
        # It would hide the error that the program should see.
        return f"{type(error).__name__} (its repr() raises)"
