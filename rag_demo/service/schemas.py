"""Requests and answers; the OpenAPI description is made of these."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rag_demo.searching.arguments import MODES
from rag_demo.service.filters import StoreFilter, Where
from rag_demo.service.settings import Limits

__all__ = [
    "DocumentsRequest",
    "EmbedRequest",
    "EmbeddingsAnswer",
    "EmbeddingsRequest",
    "ModelCard",
    "ModelList",
    "OpenAIRerankRequest",
    "RankedText",
    "RerankAnswer",
    "RerankRequest",
    "SearchAnswer",
    "SearchRequest",
    "StorePage",
    "StoreSearchRequest",
    "responses",
]

_DEFAULTS = Limits()  # For the description; routes check the limits of the settings.
_MAX_FIELDS = 100  # of a request, unknown ones too


def _whole(value: Any) -> Any:
    """Accept 5.0 for 5, as JSON Schema does."""
    return int(value) if type(value) is float and value.is_integer() else value


def _text(most: int, **constraints: Any) -> dict[str, Any]:
    """Describe the strings and lists of strings that a route accepts."""
    text = {"maxLength": _DEFAULTS.query_chars, **constraints}
    return {**text, "minItems": 1, "maxItems": most, "items": {"type": "string", **text}}


_QUERY: dict[str, Any] = {"pattern": r"\S", "maxLength": _DEFAULTS.query_chars}
_QUERIES = _text(_DEFAULTS.queries, pattern=r"\S")
_INPUTS = _text(_DEFAULTS.texts)
_DOCUMENTS: dict[str, Any] = {"minItems": 1, "maxItems": _DEFAULTS.texts}

Score = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
# fail_fast: an error for each of millions of items would take minutes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, max_length=_DEFAULTS.texts)]
Prompt = Literal["query", "document", "passage", "search_query", "search_document"]


class SearchRequest(BaseModel):
    """A query or several: one of ``query`` and ``queries``."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "oneOf": [
                {"required": ["query"], "properties": {"query": {"type": "string"}}},
                {"required": ["queries"], "properties": {"queries": {"type": "array"}}},
            ],
            "examples": [
                {"query": "how is memory given back?", "top_k": 3},
                {
                    "queries": ["what is a lease?", "who holds memory?"],
                    "where": {"$or": [{"year": {"$gte": 2020}}, {"lang": "en"}]},
                    "mode": "dense",
                    "min_score": 0.2,
                },
            ],
        },
    )

    query: str | None = Field(None, json_schema_extra=_QUERY)
    queries: Texts | None = Field(None, min_length=1, json_schema_extra=_QUERIES)
    top_k: Whole = Field(5, ge=1, json_schema_extra={"maximum": _DEFAULTS.top_k})
    min_score: Score | None = Field(None, description="Leave out what scores lower.")
    where: Where | None = None
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="hybrid by default; dense if there is a min_score."
    )

    @model_validator(mode="before")
    @classmethod
    def _first_fields(cls, value: Any) -> Any:
        return dict(islice(value.items(), _MAX_FIELDS)) if isinstance(value, dict) else value


class EmbeddingsRequest(BaseModel):
    """A request of OpenAI's clients; unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"model": "default", "input": ["a text", "another"]}]},
    )

    input: str | Texts | Tokens | TokenLists = Field(
        json_schema_extra={"type": ["string", "array"], **_text(_DEFAULTS.texts, minLength=1)}
    )
    model: str = Field("default", json_schema_extra={"enum": ["default"]})
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Whole | None = Field(None, description="The model's own number of dimensions.")
    input_type: Prompt | None = Field(None, description="query embeds questions as questions.")
    prompt_name: Prompt | None = Field(None, description="The same as input_type.")


class EmbedRequest(BaseModel):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [{"inputs": "a text"}]})

    inputs: str | Texts = Field(json_schema_extra=_INPUTS)
    normalize: bool = Field(True, json_schema_extra={"enum": [True]})
    truncate: bool | None = Field(None, description="false refuses texts that are too long.")
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: Prompt | None = None
    dimensions: Whole | None = Field(None, description="The model's own number of dimensions.")


class RankingOptions(BaseModel):
    """How OpenAI's clients leave out results; there is one ranker."""

    model_config = ConfigDict(strict=True)

    ranker: str | None = None
    score_threshold: Score | None = Field(None, ge=0, le=1)


class StoreSearchRequest(BaseModel):
    """A search of OpenAI's clients in a vector store."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"query": "a question", "max_num_results": 3}]},
    )

    query: str | Texts = Field(json_schema_extra=_QUERIES)
    max_num_results: Whole = Field(10, ge=1, le=50)
    filters: StoreFilter | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: Literal[False] | None = None


class RerankRequest(BaseModel):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    query: str = Field(json_schema_extra=_QUERY)
    texts: Texts = Field(json_schema_extra=_INPUTS)
    raw_scores: Literal[False] | None = None
    return_text: bool = False


class RerankDocument(BaseModel):
    """A document of Cohere's and Jina's clients."""

    text: str


class OpenAIRerankRequest(BaseModel):
    """A request of Cohere's and Jina's clients; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    query: str = Field(json_schema_extra=_QUERY)
    documents: list[str | RerankDocument] = Field(json_schema_extra=_DOCUMENTS)
    model: str = "default"
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    return_documents: bool = False


class NewDocument(BaseModel):
    """A document to add; one with a known id replaces it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(min_length=1, max_length=512)
    text: str = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


class DocumentsRequest(BaseModel):
    """Documents to add."""

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[NewDocument] = Field(json_schema_extra=_DOCUMENTS)


class Result(BaseModel):
    """A document that was found; ``passage`` is its best part, in characters; null for all."""

    rank: int
    score: float
    id: str
    text: str
    metadata: dict[str, Any]
    passage: tuple[int, int] | None


class SearchAnswer(BaseModel):
    """``results`` for a query, ``batches`` for several."""

    results: list[Result] = []
    batches: list[list[Result]] = []


class Embedding(BaseModel):
    """A vector as numbers, or as base64 of float32."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    """Vectors in the order of the texts."""

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


class ModelList(BaseModel):
    """The models that are served."""

    object: str
    data: list[ModelCard]


class StoreResult(BaseModel):
    """A document that was found."""

    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | float | bool]
    content: list[dict[str, str]]


class StorePage(BaseModel):
    """What a search of a vector store found."""

    object: str
    search_query: list[str]
    data: list[StoreResult]
    has_more: bool
    next_page: str | None


class RankedText(BaseModel):
    """The score of a text, by its place in the request."""

    index: int
    score: float


class RerankAnswer(BaseModel):
    """Scores, best first."""

    id: str
    model: str
    results: list[dict[str, Any]]


class ErrorBody(BaseModel):
    """An error (RFC 9457); below /v1 it is in OpenAI's format, and so on for each API."""

    model_config = ConfigDict(extra="allow")


def responses(answer: Any = dict[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of a route: the one to a valid request, and errors."""
    error = {"model": ErrorBody, "content": {"application/problem+json": {}}}
    keys: list[int | str] = [*statuses, "default"]
    errors = {key: {**error, "description": "An error."} for key in keys}
    return {200: {"model": answer}, **errors}
