"""The exceptions of this package."""

from __future__ import annotations

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_utils._census import LiveEntry


class TorchUtilsError(Exception):
    """Base class of this package's exceptions."""


class ResourceClosedError(TorchUtilsError, RuntimeError):
    """A resource was used after it had been closed."""


class ReleasedError(TorchUtilsError, RuntimeError):
    """An object was used after its release. The message names the line of the release."""


class ReleasedAttributeError(ReleasedError, AttributeError):
    """An attribute of a released object was read.

    `hasattr` returns False, and `getattr` returns its default.
    """


class ModelInUseError(TorchUtilsError, RuntimeError):
    """A model cannot be unloaded while it is lent. The message names each lease."""


class ModelProcessError(TorchUtilsError, RuntimeError):
    """The process of a model has ended, or its result cannot be unpickled here."""


class NoRoomError(TorchUtilsError):
    """A pool has no room for a model, now or ever. The message names what holds the memory."""


class UnknownModelError(TorchUtilsError, KeyError):
    """A pool has no model of this name."""

    def __str__(self) -> str:
        return TorchUtilsError.__str__(self)  # A KeyError's would be the repr of the message.


class SignalError(TorchUtilsError, ValueError):
    """A signal handler cannot be installed in this thread or for this signal."""


class MemoryGrowthError(TorchUtilsError, AssertionError):
    """A block or a test left more memory behind than it found.

    Attributes:
        entries: What is new, the largest first, as `LiveEntry` objects.
    """

    def __init__(self, message: str, entries: Sequence[LiveEntry] = ()) -> None:
        super().__init__(message)
        self.entries: tuple[LiveEntry, ...] = tuple(entries)


class CleanupError(TorchUtilsError, ExceptionGroup[Exception]):
    """Steps of a cleanup failed; raised only with ``strict=True``.

    It is an `ExceptionGroup`, so ``except*`` and ``.exceptions`` work.
    """

    def derive(self, excs: Sequence[Exception], /) -> CleanupError:  # type: ignore[override]
        """Return a group of this type for ``except*``."""
        return CleanupError(self.message, excs)


def repr_of(error: BaseException) -> str:
    """Return the repr of an exception, or its type if its repr raises."""
    try:
        return repr(error)
    except Exception:  # Its __repr__ may raise anything, which would hide the exception itself.
        return f"{type(error).__name__} (its repr() raises)"
