"""The part of SARIF 2.1.0 that is written here, as a schema that allows nothing else.

Written after section 3 of the standard; names and types are the standard's.
"""

from __future__ import annotations

from typing import Any


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


TEXT = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 1}
MESSAGE = _object("text", text={"type": "string", "minLength": 1})
REGION = _object("startLine", startLine=NUMBER, startColumn=NUMBER, endColumn=NUMBER)
PLACE = _object(
    "artifactLocation region",
    artifactLocation=_object("uri", uri={"type": "string", "format": "uri-reference"}),
    region=REGION,
)
LOCATION = _object("physicalLocation", physicalLocation=PLACE)
LEVEL = {"enum": ["none", "note", "warning", "error"]}
RULE = _object(
    "id",
    id=TEXT,
    name=TEXT,
    shortDescription=MESSAGE,
    help=MESSAGE,
)
RESULT = _object(
    "message ruleId locations",
    ruleId=TEXT,
    level=LEVEL,
    message=MESSAGE,
    locations=_array(LOCATION, minItems=1),
)
RUN = _object(
    "tool results",
    tool=_object("driver", driver=_object("name", name=TEXT, rules=_array(RULE, uniqueItems=True))),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=_array(RESULT),
)
SCHEMA = _object(
    "version runs",
    **{"$schema": TEXT},
    version={"const": "2.1.0"},
    runs=_array(RUN, minItems=1),
)
