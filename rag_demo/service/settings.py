"""Settings of a service: options of the command, variables ``RAG_DEMO_*``, and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import click
from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rag_demo.errors import RagDemoError
from rag_demo.stores.address import as_place
from torch_utils import ModelHost

__all__ = ["Limits", "Settings", "is_loopback", "read_tokens"]


def _duration(value: float | str) -> float | str:
    ModelHost(dict, keep_alive=value).close()
    return value


Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Several = Annotated[tuple[str, ...], NoDecode]
Place = Annotated[Any, AfterValidator(as_place)]
KeepAlive = Annotated[float | str, Field(union_mode="left_to_right"), AfterValidator(_duration)]
Files = Annotated[tuple[Path, ...], NoDecode]
_TOKEN_CHARS = 16
_LISTS = ("token", "token_file", "admin_token", "admin_token_file")


@dataclass(frozen=True)
class Limits:
    """Limits that operators need not change; programs may, by `create_app`.

    Attributes:
        idle_timeout_s: Longer than the minute that proxies keep idle connections open.
        max_texts: OpenAI's limit.
        max_queries: Queries in a request.
        max_query_tokens: Tokens of a query to search.
        max_top_k: Results of a query.
        max_results: Results in a response.
        max_body_bytes: 2,048 texts of 4 KB.
        max_response_bytes: 2,048 vectors of 1,024 numbers in JSON take 40 MB.
        buffer_bytes: Bytes of all bodies and responses that are in memory.
    """

    idle_timeout_s: float = 75
    max_texts: int = 2_048
    max_queries: int = 256
    max_query_tokens: int = 2_048
    max_top_k: int = 1_000
    max_results: int = 10_000
    max_body_bytes: int = 8 << 20
    max_response_bytes: int = 64 << 20
    buffer_bytes: int = 128 << 20


def _option(default: Any, text: str, **more: Any) -> Any:
    return Field(default, description=text, **more)


class Settings(BaseSettings):
    """Settings of a service.

    Each field is an option of ``rag-demo serve`` and a variable: ``batch_tokens`` is
    ``--batch-tokens`` and ``RAG_DEMO_BATCH_TOKENS``. Only tokens have no option, because other
    users of the machine can read command lines.
    """

    model_config = SettingsConfigDict(
        env_prefix="RAG_DEMO_", frozen=True, hide_input_in_errors=True
    )

    index: Place = _option(..., "Folder or postgresql:// URL.")
    model: str | None = _option(None, "Embedding model. [default: that of the index]")
    device: str | None = _option(None, "Device to compute on. [default: the best one]")
    retriever: Literal["torch", "faiss"] = _option("torch", "Library that searches.")
    reranker: str | None = _option(None, "Cross-encoder: a folder or a name.")
    served_model_name: str | None = _option(None, "Name of the model in requests.")
    trust_remote_code: bool = _option(False, "Run code that comes with the models.")
    keep_alive: KeepAlive = _option(-1, "Time until an idle model is unloaded, as 10m; -1: never.")
    isolation: Literal["thread", "process"] = _option(
        "thread", "Run each model in this process, or in its own."
    )
    batch_tokens: Count = _option(32_768, "Tokens that are computed together.")
    max_waiting_tokens: Count = _option(262_144, "Tokens in a queue; more requests get 429.")

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: Port = _option(8000, "Port to listen on; 0 for a free port.")
    token: Several = _option((), "Tokens of clients, separated by commas.", repr=False)
    token_file: Files = _option((), "File with a client's token in each line.")
    admin_token: Several = _option((), "Tokens for /admin and for changes.", repr=False)
    admin_token_file: Files = _option((), "File with an admin token in each line.")
    no_token: bool = _option(False, "Answer every client that reaches --host.")
    writable: bool = _option(False, "Let clients add and delete documents.")

    timeout: Seconds = _option(60, "Seconds to answer a request, with its time in the queue.")
    hang_timeout: Seconds = _option(600, "Seconds until a load or a call counts as hung.")
    grace: Seconds = _option(25, "Seconds to finish requests after a signal to stop.")
    log_format: Literal["text", "json"] = _option("text", "Format of the log.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _option("INFO", "Its level.")

    @field_validator(*_LISTS, mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        return tuple(each.strip() if isinstance(each, str) else each for each in parts)

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
            name = f"{_option_name(str(found['loc'][0]))}: " if found["loc"] else ""
            message = found["msg"].removeprefix("Value error, ")
            if found["type"] == "missing":
                message = "name a folder or a postgresql:// URL; rag-demo index makes one"
            raise RagDemoError(f"{name}{message}") from None


def _option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def options() -> list[click.Option]:
    """Return the options of the command: each field but the tokens."""
    made = []
    for name, field in Settings.model_fields.items():
        annotation: Any = field.annotation
        kind: dict[str, Any] = {"multiple": name in _LISTS}
        if annotation is bool:
            kind = {"is_flag": True, "default": None}
        elif get_origin(annotation) is Literal:
            kind = {"type": click.Choice(annotation.__args__)}
        has_default = field.default not in (None, False, ()) and not field.is_required()
        text = f"{field.description}" + f" [default: {field.default}]" * has_default
        if name not in ("token", "admin_token"):
            made.append(click.Option([_option_name(name)], help=text, **kind))
    return made


def read_tokens(settings: Settings) -> tuple[list[bytes], list[bytes]]:
    """Return the tokens of clients, and those for administration and changes.

    Raises:
        RagDemoError: A file cannot be read, or a token is invalid.
    """
    clients = _read_tokens("RAG_DEMO_TOKEN", settings.token, settings.token_file)
    admin = settings.admin_token, settings.admin_token_file
    return clients, _read_tokens("RAG_DEMO_ADMIN_TOKEN", *admin)


def _read_tokens(variable: str, values: Iterable[str], paths: Iterable[Path]) -> list[bytes]:
    found = [(variable, token) for token in values]
    for path in paths:
        try:
            lines = path.read_text("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise RagDemoError(
                f"the token file '{path}' cannot be read: {error.strerror or error}"
            ) from error
        if not any(map(str.strip, lines)):
            raise RagDemoError(f"the token file '{path}' is empty; write a token into it")
        found += [(f"the file '{path}'", line.strip()) for line in lines if line.strip()]
    for where, token in found:
        if not token.isascii() or not token.isprintable() or " " in token:
            raise RagDemoError(f"a token in {where} is not printable ASCII without spaces")
        if len(token) < _TOKEN_CHARS:
            raise RagDemoError(
                f"a token in {where} has {len(token)} characters; use at least {_TOKEN_CHARS}, "
                "for example from: openssl rand -hex 32"
            )
    return [token.encode() for _, token in found]


def is_loopback(host: str | None) -> bool:
    """Return whether an address or a host name is always the local machine."""
    return (host or "").strip("[]").lower() in ("localhost", "127.0.0.1", "::1")
