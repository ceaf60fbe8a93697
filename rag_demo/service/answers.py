"""What answers look like, for the OpenAPI description; they are made where they are sent."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

__all__ = [
    "OPENAI_REFUSAL",
    "REFUSAL",
    "Batches",
    "EmbeddingsAnswer",
    "Memory",
    "ModelCard",
    "Models",
    "Ready",
    "Reloaded",
    "Results",
    "Serving",
    "StorePage",
    "Unloaded",
    "refusals",
]


class Result(BaseModel):
    """One answer."""

    rank: int
    score: float
    id: str
    text: str
    metadata: dict[str, Any]
    passage: tuple[int, int] | None = Field(
        description="Start and stop, in characters of the text, of what fits best; null: all."
    )


class Results(BaseModel):
    """The answers to a question."""

    results: list[Result]


class Batches(BaseModel):
    """The answers to several, in their order."""

    batches: list[list[Result]]


class ProblemBody(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    code: str = ""
    errors: list[dict[str, str]] = []


class OpenAIError(BaseModel):
    """What was wrong, and with which parameter."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error, as OpenAI's clients know it."""

    error: OpenAIError


_PROBLEM = {"model": ProblemBody, "content": {"application/problem+json": {}}}
REFUSAL: dict[int | str, dict[str, Any]] = {
    "default": {**_PROBLEM, "description": "A problem: `status` and `detail` say which."}
}
"""Of a route that says no more than that it may refuse."""
OPENAI_REFUSAL: dict[int | str, dict[str, Any]] = {
    "default": {"model": OpenAIErrorBody, "description": "An error: `message` says which."}
}


def refusals(**more: str) -> dict[int | str, dict[str, Any]]:
    """Describe how a question may be refused; ``status_404="..."`` for a further way."""
    known = {
        400: "The body is no JSON.",
        401: "The token is missing or wrong.",
        408: "The body did not come in time.",
        413: "More was sent, or asked, than is allowed.",
        421: "The request was for another host.",
        422: "The request is not of this shape.",
        429: "Too much waits; come again after Retry-After.",
        503: "The service stops, or its model or index cannot be used.",
    }
    known.update({int(name.removeprefix("status_")): text for name, text in more.items()})
    return {status: {**_PROBLEM, "description": text} for status, text in known.items()}


class Embedding(BaseModel):
    """A vector, as numbers or as base64 of them."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    """The vectors of texts, in their order."""

    object: str
    data: list[Embedding]
    model: str
    usage: dict[str, int]


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: str
    created: int
    owned_by: str


class Serving(BaseModel):
    """The models that are served."""

    object: str
    data: list[ModelCard]


class Found(BaseModel):
    """A document, and what of it fits."""

    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | float | bool]
    content: list[dict[str, str]]


class StorePage(BaseModel):
    """What a search of a vector store found."""

    object: str
    search_query: list[str]
    data: list[Found]
    has_more: bool
    next_page: str | None


class Ready(BaseModel):
    """The service answers."""

    status: str
    documents: int = 0


class Sample(BaseModel):
    """The memory at one moment."""

    at: float = Field(description="Seconds since 1970.")
    host: int = Field(description="Bytes that are resident.")
    devices: dict[str, int] = Field(description="Bytes that are taken, by device.")
    models: dict[str, str] = Field(description="States, by name.")


class Event(BaseModel):
    """A load, an unload or a reload."""

    at: float
    what: str
    model: str


class Memory(BaseModel):
    """The memory of the last minutes."""

    samples: list[Sample]
    events: list[Event]
    documents: int
    draining: bool


class Model(BaseModel):
    """What is hosted, as ``ollama ps`` is told."""

    name: str
    model: str
    size: int
    expires_at: str
    state: str
    isolation: str
    leases: int
    loads: int
    unloads: int
    failed: bool


class OfAProcess(BaseModel):
    """Who answers: each of several workers has a model and an index of its own."""

    process: int = Field(description="Its number.")
    workers: int = Field(description="How many there are.")


class Models(OfAProcess):
    """All that is hosted in the process that answers."""

    models: list[Model]


class Held(BaseModel):
    """What did not come back."""

    what: str
    nbytes: int
    device: str


class Unloaded(OfAProcess):
    """What came back, in the process that answers."""

    freed_bytes: dict[str, int]
    returned_bytes: dict[str, int]
    still_held: list[Held]
    errors: int
    duration_s: float
    summary: str


class Reloaded(OfAProcess):
    """What is searched now; other workers do the same a moment later."""

    documents: int
    documents_before: int
    duration_s: float
