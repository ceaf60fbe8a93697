"""The log on stderr, as text or as lines of JSON."""

from __future__ import annotations

import contextvars
import json
import logging
import logging.config
from typing import Any

from rag_demo.errors import RagDemoError

log = logging.getLogger("rag_demo.service")
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("rag_demo_request_id", default="")
_TIME = "%Y-%m-%dT%H:%M:%S%z"
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
_FIELDS = ("request_id", "client", "method", "route", "status", "ms")


def configure_logging(layout: str, level: str) -> None:
    """Write the log to stderr. Call it in programs, not in libraries.

    Args:
        layout: "text" or "json".
        level: The lowest level that is logged.
    """
    own = {"level": level, "handlers": ["stderr"], "propagate": False}
    quiet = {**own, "level": "ERROR"}  # Clients can cause warnings of uvicorn.
    stderr = {"class": "logging.StreamHandler", "formatter": layout, "filters": ["request"]}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"request": {"()": _RequestFilter}},
            "formatters": {"text": {"format": _TEXT, "datefmt": _TIME}, "json": {"()": _JSON}},
            "handlers": {"stderr": stderr},
            "loggers": {"rag_demo": own, "torch_utils": own, "uvicorn": quiet, "asyncio": quiet},
        }
    )


def log_error(what: str, error: BaseException, **extra: Any) -> None:
    """Log an error: in one line if it is one of this package, which says what to do."""
    is_known = isinstance(error, RagDemoError)
    text = f"{what}: {error if is_known else repr(error)}"
    log.error("%s", text, exc_info=None if is_known else error, extra=extra)


class _RequestFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = getattr(record, "request_id", "") or REQUEST_ID.get()
        return True


class _JSON(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": self.formatTime(record, _TIME),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: record.__dict__[name] for name in _FIELDS if name in record.__dict__},
        }
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, **error})
