"""What requests and answers look like; the OpenAPI description is made of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rag_demo.searching.filters import conditions_of
from rag_demo.searching.modes import MODES
from rag_demo.service.settings import Limits

__all__ = [
    "Batches",
    "EmbedRequest",
    "EmbeddingsRequest",
    "ProblemBody",
    "Result",
    "Results",
    "SearchRequest",
    "StoreSearchRequest",
    "check_filter",
]

_MOST = Limits()  # Those of the application are checked where a request is answered.
_LARGEST = 2**63  # What a column of whole numbers holds; larger ones are compared with none.
Score = Annotated[float, Field(allow_inf_nan=False)]


def check_filter(value: Any, depth: int, values: int) -> int:
    """Count what a filter names.

    Raises:
        ValueError: It is nested deeper than ``depth``, names more than ``values``, or a number
            that is none.
    """
    if depth < 0:
        raise ValueError("it is nested too deep")
    count = 1
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            count += check_filter(each, depth - 1, values - count)
    elif isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError("a number must be finite")
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise ValueError("a whole number must fit into 64 bits")
    if count > values:
        raise ValueError("it names too many values")
    return count


class SearchRequest(BaseModel):
    """A question, or several: one of ``query`` and ``queries``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"query": "how is memory given back?", "top_k": 3},
                {
                    "queries": ["what is a lease?", "who holds memory?"],
                    "where": {"year": {"$gte": 2020}},
                    "mode": "dense",
                    "min_score": 0.2,
                },
            ]
        },
    )

    query: str | None = Field(None, description="The question.")
    queries: list[str] | None = Field(None, min_length=1, description="Several questions.")
    top_k: int = Field(5, ge=1, description="How many answers at most to each.")
    min_score: Score | None = Field(None, description="Leave out what scores lower.")
    where: dict[str, Any] | None = Field(
        None, description='Conditions on metadata: {"lang": "en", "year": {"$gte": 2000}}.'
    )
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="By default hybrid; dense if there is a min_score."
    )

    @field_validator("where")
    @classmethod
    def _filter(cls, where: dict[str, Any] | None) -> dict[str, Any] | None:
        if where is not None:
            check_filter(where, _MOST.where_depth, _MOST.where_values)
            try:
                conditions_of(where)
            except TypeError as error:
                raise ValueError(str(error)) from None
        return where


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


class EmbeddingsRequest(BaseModel):
    """What OpenAI's clients send; what is not here is not looked at."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": ["a text", "another"]}]}
    )

    input: str | list[str] | list[int] | list[list[int]]
    model: str = "default"
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class EmbedRequest(BaseModel):
    """What clients of text-embeddings-inference send."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "a text"}]})

    inputs: str | list[str]
    normalize: bool = True
    truncate: bool = True
    prompt_name: str | None = None


class StoreSearchRequest(BaseModel):
    """What OpenAI's clients ask a vector store."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "a question", "max_num_results": 3}]}
    )

    query: str | list[str]
    max_num_results: int = Field(10, ge=1, le=50)
    filters: dict[str, Any] | None = None
    ranking_options: dict[str, Any] | None = None
    rewrite_query: bool | None = None


class ProblemBody(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    code: str | None = None
    errors: list[dict[str, str]] | None = None
