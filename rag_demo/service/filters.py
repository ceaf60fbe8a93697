"""Filters in requests: their description, their limits, and what they may compare."""

from __future__ import annotations

import ntpath
import posixpath
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from rag_demo.service.problems import Problem, invalid_status
from rag_demo.service.settings import Limits
from rag_demo.stores.filters import Where as AnyFilter
from rag_demo.stores.filters import parse_filter, predicate

_MAX_FLOAT = 1.7e308
_PATH_KEYS = frozenset({"path", "source", "file"})

Scalar = str | int | float | bool | None
Comparable = str | int | float | bool
Key = Annotated[str, Field(pattern=r"^([^$]|$)")]


class Operators(BaseModel):
    """Operators for one key of the metadata."""

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
        extra="allow", json_schema_extra={"patternProperties": {r"^\$(?!(and|or|not)$)": False}}
    )
    __pydantic_extra__: dict[str, Scalar | list[Scalar] | Operators]

    and_: list[Conditions] = Field([], alias="$and", json_schema_extra={"minItems": 1})
    or_: list[Conditions] = Field([], alias="$or", json_schema_extra={"minItems": 1})
    not_: Conditions = Field({}, alias="$not", validate_default=False)  # type: ignore[assignment]


def _check(where: Any, _: Any) -> dict[str, Any]:
    """Check a filter with the store's parser and pass on its message."""
    if not isinstance(where, dict):
        raise ValueError("must be a JSON object")
    try:
        parse_filter(where)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return where


Where = Annotated[Conditions, WrapValidator(_check)]
"""A filter of ``/search``: a dict, described by `Conditions` and checked by `parse_filter`."""


class Equality(BaseModel):
    """The value of a key equals a value, or differs from it."""

    type: Literal["eq", "ne"]
    key: Key
    value: Scalar | list[Scalar]


class Range(BaseModel):
    """The value of a key is greater or less than a value."""

    type: Literal["gt", "gte", "lt", "lte"]
    key: Key
    value: Comparable


class Membership(BaseModel):
    """The value of a key is in a list of values, or is not in it."""

    type: Literal["in", "nin"]
    key: Key
    value: list[Scalar]


class Compound(BaseModel):
    """All or any of several filters match."""

    type: Literal["and", "or"]
    filters: list[StoreFilter] = Field(min_length=1)


StoreFilter = Annotated[Equality | Range | Membership | Compound, Field(discriminator="type")]
"""A filter of OpenAI's vector stores."""
Compound.model_rebuild()


def convert_filter(store_filter: Any) -> dict[str, Any]:
    """Convert a filter of OpenAI's vector stores to one of ``/search``."""
    if isinstance(store_filter, Compound):
        return {f"${store_filter.type}": [convert_filter(part) for part in store_filter.filters]}
    return {store_filter.key: {f"${store_filter.type}": store_filter.value}}


def check_limits(where: Any, limits: Limits, path: str, param: str) -> None:
    """Check the depth, the size and the numbers of a filter.

    Raises:
        Problem: The filter is too deep or too large, or a number in it is not finite.
    """
    left = limits.where_values

    def check(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        problem = ""
        if depth < 0:
            problem = f"nested deeper than {limits.where_depth} levels"
        elif left < 0:
            problem = f"more than {limits.where_values:,} values"
        elif isinstance(value, (int, float)) and not abs(value) <= _MAX_FLOAT:
            problem = "a number must be finite and at most 1.7e308"
        if problem:
            raise Problem(invalid_status(path), f"{param}: {problem}", param=param)
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                check(item, depth - 1)

    if where is not None:
        check(where, limits.where_depth)


def public_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with absolute paths cut to the file's name."""
    public = dict(metadata)
    for key in _PATH_KEYS.intersection(public):
        value = public[key]
        if isinstance(value, str) and (posixpath.isabs(value) or ntpath.splitdrive(value)[0]):
            public[key] = ntpath.basename(value)
    return public


def public_filter(where: Mapping[str, Any]) -> AnyFilter:
    """Return a filter that compares public metadata.

    A filter on the whole path would let a client guess folders of the server step by step.
    """
    text = repr(where)
    if not any(repr(key) in text for key in _PATH_KEYS):
        return where
    matches = predicate(where)
    return lambda metadata: matches(public_metadata(metadata))
