"""Filters in requests: their description, and the conversion of OpenAI's filters to ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from rag_demo.errors import shown
from rag_demo.service.problems import Problem, invalid_status
from rag_demo.service.settings import Limits
from rag_demo.store.filters import OPERATORS, parse_filter

__all__ = ["StoreFilter", "Where", "check_limits", "where_of"]

_MAX_FLOAT = 1.7e308
_LOGICAL = ("$and", "$or", "$not")

Scalar = str | int | float | bool | None
Comparable = str | int | float | bool


class Operators(BaseModel):
    """Operators below a key of the metadata."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    eq: Scalar | list[Scalar] = Field(None, alias="$eq")
    ne: Scalar | list[Scalar] = Field(None, alias="$ne")
    gt: Comparable = Field(0, alias="$gt")
    gte: Comparable = Field(0, alias="$gte")
    lt: Comparable = Field(0, alias="$lt")
    lte: Comparable = Field(0, alias="$lte")
    in_: list[Scalar] = Field([], alias="$in")
    nin: list[Scalar] = Field([], alias="$nin")
    contains: Scalar = Field(None, alias="$contains")


class Conditions(BaseModel):
    """Keys of the metadata with values or operators; ``$and``, ``$or``, ``$not`` combine them."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"patternProperties": {r"^\$(?!(and|or|not)$)": False}},
    )
    __pydantic_extra__: dict[str, Scalar | list[Scalar] | Operators]

    and_: list[Conditions] = Field([], alias="$and", json_schema_extra={"minItems": 1})
    or_: list[Conditions] = Field([], alias="$or", json_schema_extra={"minItems": 1})
    not_: Conditions = Field({}, alias="$not", validate_default=False)  # type: ignore[assignment]


def _check(where: Any, _: Any) -> dict[str, Any]:
    """Check a filter by the store's own parser, whose messages say what is wrong."""
    if not isinstance(where, dict):
        raise ValueError("must be a JSON object")
    for key in where:
        if key.startswith("$") and key not in _LOGICAL:
            raise ValueError(
                f"{shown(key)[:40]} is unknown; use a key of the metadata, or one of "
                f"{', '.join(_LOGICAL)}, and below a key a value or {', '.join(OPERATORS)}"
            )
    try:
        parse_filter(where)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return where


Where = Annotated[Conditions, WrapValidator(_check)]
"""A filter of ``/search``: described by `Conditions`, checked by `parse_filter`, and a dict."""


class Equality(BaseModel):
    """A key equals a value."""

    type: Literal["eq", "ne"]
    key: str = Field(pattern=r"^([^$]|$)")
    value: Scalar | list[Scalar]


class Range(BaseModel):
    """A key is greater or less than a value."""

    type: Literal["gt", "gte", "lt", "lte"]
    key: str = Field(pattern=r"^([^$]|$)")
    value: Comparable


class Membership(BaseModel):
    """A key is one of several values, or is none of them."""

    type: Literal["in", "nin"]
    key: str = Field(pattern=r"^([^$]|$)")
    value: list[Scalar]


class Compound(BaseModel):
    """All of several filters, or any of them."""

    type: Literal["and", "or"]
    filters: list[StoreFilter] = Field(min_length=1)


StoreFilter = Annotated[
    Equality | Range | Membership | Compound,
    Field(discriminator="type"),
]
"""A filter of OpenAI's vector stores."""
Compound.model_rebuild()


def where_of(store_filter: Any) -> dict[str, Any]:
    """Convert a filter of OpenAI's vector stores."""
    if isinstance(store_filter, Compound):
        return {f"${store_filter.type}": [where_of(part) for part in store_filter.filters]}
    return {store_filter.key: {f"${store_filter.type}": store_filter.value}}


def check_limits(where: Any, limits: Limits, path: str, param: str) -> None:
    """Refuse a filter that is too deep or too large, or has a number that is not finite.

    Raises:
        Problem: It is.
    """
    left = limits.where_values

    def check(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        problem = ""
        if depth < 0:
            problem = f"it is nested deeper than {limits.where_depth}"
        elif left < 0:
            problem = f"it has more than {limits.where_values:,} values"
        elif isinstance(value, (int, float)) and not abs(value) <= _MAX_FLOAT:
            problem = "a number must be finite and at most 1.7e308"
        if problem:
            raise Problem(invalid_status(path), f"{param}: {problem}", param=param)
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                check(item, depth - 1)

    if where is not None:
        check(where, limits.where_depth)
