"""Settings of a service: options of the command, variables ``RAG_DEMO_*``, and arguments."""

from __future__ import annotations

import ipaddress
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rag_demo.errors import RagDemoError
from torch_utils import ModelHost

__all__ = ["Settings", "Tokens", "is_loopback"]

Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Several = Annotated[tuple[str, ...], NoDecode]
Files = Annotated[tuple[Path, ...], NoDecode]
_TOKEN_CHARS = 16
_LISTS = ("token", "token_file", "cors_origin")


class Settings(BaseSettings):
    """Settings of a service.

    Each field is an option of ``rag-demo serve`` and a variable: ``batch_tokens`` is
    ``--batch-tokens`` and ``RAG_DEMO_BATCH_TOKENS``. Only tokens have no option, because other
    users of the machine can read command lines.
    """

    model_config = SettingsConfigDict(
        env_prefix="RAG_DEMO_", frozen=True, hide_input_in_errors=True
    )

    index: Path = Field(description="Folder of the index.")
    model: str | None = Field(None, description="Embedding model. [default: that of the index]")
    device: str | None = Field(None, description="Device to compute on. [default: the best one]")
    retriever: Literal["torch", "faiss"] = Field("torch", description="Library that searches.")
    reranker: str | None = Field(None, description="Cross-encoder: a folder or a name.")
    served_model_name: str | None = Field(None, description="Name of the model in requests.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the models.")
    keep_alive: float | str = Field(
        -1,
        description="How long an idle model stays loaded: 90s, 10m, 0, or -1 for ever.",
        union_mode="left_to_right",
    )
    load_timeout: Seconds = Field(600, description="Seconds until a load counts as hung.")
    hang_timeout: Seconds = Field(
        300, description="Seconds without progress until a call of a model counts as hung."
    )
    isolation: Literal["thread", "process"] = Field(
        "thread", description="Run each model in this process, or in one of its own."
    )
    call_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds for a call of a model; needs --isolation process."
    )
    threads: Count | None = Field(None, description="Threads of torch. [default: the CPU quota]")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="Port to listen on; 0 for a free port.")
    reuse_port: bool = Field(False, description="Let other processes listen on the same port.")
    metrics_host: str = Field("127.0.0.1", description="Address of --metrics-port.")
    metrics_port: Port | None = Field(None, description="Another port for metrics; no token.")
    token: Several = Field((), repr=False, description="Tokens of clients, separated by commas.")
    token_file: Files = Field((), description="File with a client's token in each line.")
    admin_token: SecretStr | None = Field(None, description="Token for /admin and for changes.")
    admin_token_file: Path | None = Field(None, description="File with the admin token.")
    no_token: bool = Field(False, description="Answer every client that reaches --host.")
    cors_origin: Several = Field((), description="Origin of pages that may call, or *.")

    writable: bool = Field(False, description="Let clients add and delete documents.")
    reload_interval: Seconds = Field(
        10, description="Seconds between looks for a new version of the index; 0 for never."
    )

    timeout: Annotated[float, Field(gt=0, le=86_400)] = Field(
        60, description="Seconds to answer a request, with its time in the queue."
    )
    drain: Seconds = Field(0, description="Seconds to accept requests after a signal to stop.")
    grace: Seconds = Field(25, description="Seconds to finish requests after --drain.")
    body_timeout: Seconds = Field(15, description="Seconds to send a body.")
    write_timeout: Seconds = Field(
        30, description="Seconds without reading until a client is cut off."
    )
    idle_timeout: Seconds = Field(75, description="Seconds that an idle connection stays open.")
    max_connections: Count = Field(1000, description="Connections; more get 503.")
    batch_tokens: Count = Field(16_384, description="Tokens that are computed together.")
    max_texts: Count = Field(2_048, description="Texts in a request.")
    max_queries: Count = Field(256, description="Queries in a request.")
    max_query_tokens: Count = Field(2_048, description="Tokens of a query to search.")
    max_top_k: Count = Field(1_000, description="Results of a query.")
    max_results: Count = Field(10_000, description="Results in a response.")
    max_body_bytes: Count = Field(8 << 20, description="Bytes of a body.")
    max_response_bytes: Count = Field(64 << 20, description="Bytes of a response.")
    buffer_bytes: Count = Field(128 << 20, description="Bytes of all bodies and responses.")
    log_format: Literal["text", "json"] = Field("text", description="Format of the log.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Its level."
    )

    @field_validator(*_LISTS, mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(each.strip() if isinstance(each, str) else each for each in parts)

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: float | str) -> float | str:
        ModelHost(dict, keep_alive=value).close()
        return value

    @field_validator("cors_origin")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ValueError(
                    f"must be like https://example.org, without a path, got {origin!r}"
                )
        return origins

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.call_timeout is not None and self.isolation == "thread":
            raise ValueError("--call-timeout needs --isolation process; a thread cannot be ended")
        if self.no_token and (self.token or self.token_file):
            raise ValueError("use either --no-token or tokens, not both")
        return self

    @classmethod
    def read(cls, **options: Any) -> Settings:
        """Return settings made of options and of the environment.

        Raises:
            RagDemoError: A value is invalid. The message names the option.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            found = error.errors(include_input=False)[0]
            name = f"{option_name(str(found['loc'][0]))}: " if found["loc"] else ""
            if found["type"] == "missing":
                raise RagDemoError(f"Missing option '{name[:-2]}'") from None
            message = found["msg"].removeprefix("Value error, ")
            raise RagDemoError(f"{name}{message}") from None


def option_name(field: str) -> str:
    """Return the option of a field."""
    return "--" + field.replace("_", "-")


def options() -> dict[str, tuple[str, bool, bool, tuple[str, ...]]]:
    """Return the help of each option, whether it is a flag or may be repeated, and its choices."""
    found = {}
    for name, field in Settings.model_fields.items():
        if name not in ("token", "admin_token"):
            annotation: Any = field.annotation
            choices = annotation.__args__ if get_origin(annotation) is Literal else ()
            default = field.default if field.default not in (None, False, ()) else None
            is_shown = default is not None and not field.is_required()
            text = f"{field.description}" + (f" [default: {default}]" if is_shown else "")
            found[name] = (text, annotation is bool, name in _LISTS, choices)
    return found


class Tokens:
    """The tokens of clients and of the administrator. `read` reads the files again.

    Args:
        settings: The service's settings.

    Attributes:
        clients: Tokens of clients; empty if no token is needed.
        admin: Tokens for administration and changes; empty without one.
        settings: The service's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.read()

    def read(self) -> None:
        """Read the tokens.

        Raises:
            RagDemoError: A file cannot be read, or a token is invalid. The old tokens stay.
        """
        settings = self.settings
        admin = settings.admin_token.get_secret_value() if settings.admin_token else ""
        clients = [(each, "RAG_DEMO_TOKEN") for each in settings.token]
        admins = [(admin, "RAG_DEMO_ADMIN_TOKEN")] if settings.admin_token is not None else []
        for path in settings.token_file:
            clients += _lines(path)
        if settings.admin_token_file is not None:
            admins += _lines(settings.admin_token_file)
        self.clients, self.admin = _checked(clients), _checked(admins)


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise RagDemoError(
            f"the token file '{path}' cannot be read: {error.strerror or error}"
        ) from error
    found = [(line.strip(), f"the file '{path}'") for line in lines if line.strip()]
    if not found:
        raise RagDemoError(f"the token file '{path}' is empty; write a token into it")
    return found


def _checked(tokens: list[tuple[str, str]]) -> list[bytes]:
    for token, where in tokens:
        if not token.isascii() or not token.isprintable() or " " in token:
            raise RagDemoError(f"a token in {where} is not printable ASCII without spaces")
        if len(token) < _TOKEN_CHARS:
            raise RagDemoError(
                f"a token in {where} has {len(token)} characters; use at least {_TOKEN_CHARS}, "
                "for example from: openssl rand -hex 32"
            )
    return [token.encode() for token, _ in tokens]


def cpu_quota() -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            values = Path(quota_file).read_text().split()
            values += Path(period_file).read_text().split() if period_file else []
            quota, period = map(int, values)
        except (OSError, ValueError):  # There is no such file, or "max": no quota.
            continue
        if quota > 0 and period > 0:
            return max(1, min(cores or 1, math.ceil(quota / period)))
    return cores or 1


def is_loopback(host: str | None) -> bool:
    """Return whether an address or a host name is always the local machine."""
    if host is None:
        return False
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # A listener on :: reports 127.0.0.1 as ::ffff:127.0.0.1. Python 3.13 knows that as loopback.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
