"""Request bodies; the OpenAPI description is generated from them."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rag_demo.searching.arguments import MODES
from rag_demo.service.filters import StoreFilter, Where
from rag_demo.service.settings import Limits

_DEFAULTS = Limits()  # For the description; the routes check the limits of the settings.
_MAX_FIELDS = 100  # of a request, with unknown fields


def _integer(value: Any) -> Any:
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
Integer = Annotated[int, BeforeValidator(_integer)]
# fail_fast: an error for each of millions of items would take minutes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, max_length=_DEFAULTS.texts)]
Prompt = Literal["query", "document", "passage", "search_query", "search_document"]
Dimensions = Annotated[
    Integer | None, Field(description="Must be the model's own number of dimensions.")
]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class SearchRequest(_Strict):
    """One query or several: exactly one of ``query`` and ``queries``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "oneOf": [
                {"required": ["query"], "properties": {"query": {"type": "string"}}},
                {"required": ["queries"], "properties": {"queries": {"type": "array"}}},
            ],
            "examples": [
                {"query": "how is memory released?", "top_k": 3},
                {
                    "queries": ["what is a lease?", "what holds the memory?"],
                    "where": {"$or": [{"year": {"$gte": 2020}}, {"lang": "en"}]},
                    "min_score": 0.2,
                },
            ],
        },
    )

    query: str | None = Field(None, json_schema_extra=_QUERY)
    queries: Texts | None = Field(None, min_length=1, json_schema_extra=_QUERIES)
    top_k: Integer = Field(5, ge=1, json_schema_extra={"maximum": _DEFAULTS.top_k})
    min_score: Score | None = Field(None, description="Omit results with a lower score.")
    where: Where | None = None
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="hybrid by default; dense with a min_score."
    )

    @model_validator(mode="before")
    @classmethod
    def _first_fields(cls, value: Any) -> Any:
        return dict(islice(value.items(), _MAX_FIELDS)) if isinstance(value, dict) else value


class EmbeddingsRequest(_Strict):
    """A request of OpenAI's clients; unknown fields are ignored."""

    input: str | Texts | Tokens | TokenLists = Field(
        examples=[["a text", "another"]],
        json_schema_extra={"type": ["string", "array"], **_text(_DEFAULTS.texts, minLength=1)},
    )
    model: str = Field("default", json_schema_extra={"enum": ["default"]})
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Dimensions = None
    input_type: Prompt | None = Field(None, description="query embeds the texts as queries.")
    prompt_name: Prompt | None = Field(None, description="The same as input_type.")


class EmbedRequest(_Strict):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    inputs: str | Texts = Field(examples=["a text"], json_schema_extra=_INPUTS)
    normalize: bool = Field(True, json_schema_extra={"enum": [True]})
    truncate: bool | None = Field(None, description="false refuses texts that are too long.")
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: Prompt | None = None
    dimensions: Dimensions = None


class RankingOptions(_Strict):
    """The score threshold of OpenAI's clients; ``ranker`` is ignored."""

    ranker: str | None = None
    score_threshold: Score | None = Field(None, ge=0, le=1)


class StoreSearchRequest(_Strict):
    """A search of OpenAI's clients in a vector store."""

    query: str | Texts = Field(examples=["a question"], json_schema_extra=_QUERIES)
    max_num_results: Integer = Field(10, ge=1, le=50)
    filters: StoreFilter | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: Literal[False] | None = None


class RerankRequest(_Strict):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    query: str = Field(json_schema_extra=_QUERY)
    texts: Texts = Field(json_schema_extra=_INPUTS)
    raw_scores: Literal[False] | None = None
    return_text: bool = False


class RerankDocument(BaseModel):
    """A document of Cohere's and Jina's clients."""

    text: str


class OpenAIRerankRequest(_Strict):
    """A request of Cohere's and Jina's clients; unknown fields are ignored."""

    query: str = Field(json_schema_extra=_QUERY)
    documents: list[str | RerankDocument] = Field(json_schema_extra=_DOCUMENTS)
    model: str = "default"
    top_n: Annotated[Integer, Field(ge=1)] | None = None
    return_documents: bool = False


class NewDocument(_Strict):
    """A document to add; it replaces a document with the same id."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=512)
    text: str = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


class DocumentsRequest(_Strict):
    """Documents to add."""

    model_config = ConfigDict(extra="forbid")

    documents: list[NewDocument] = Field(json_schema_extra=_DOCUMENTS)
