"""The service against its own OpenAPI description."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import ask, make_index, search

FUZZ_S = 45
TOKEN = "of-the-admin-of-the-admin"
SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 413, 415, 422, 429]
[[operations]]
# A description cannot contain the number of dimensions of a model.
include-name = "POST /v1/embeddings"
checks.positive_data_acceptance.expected-statuses = [200, 400, 413, 429]
[[operations]]
# It describes filters in words.
include-name = ["POST /search", "POST /documents/delete"]
checks.positive_data_acceptance.expected-statuses = [200, 413, 422, 429]
[[operations]]
include-name = "PUT /documents"  # It cannot say that ids must differ.
checks.positive_data_acceptance.expected-statuses = [200, 413, 422, 429]
[[operations]]
include-name = "POST /embed"
checks.positive_data_acceptance.expected-statuses = [200, 413, 422, 429]
"""


@pytest.mark.slow
def test_service_passes_schemathesis(tmp_path: Path) -> None:
    index = make_index(tmp_path / "index")
    from tests.support.browsing import serving_on_a_port

    pytest.importorskip(
        "schemathesis", reason="needs schemathesis: the dependency group service-test"
    )
    (tmp_path / "settings.toml").write_text(SETTINGS)
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"]
    options = ["-H", f"Authorization: Bearer {TOKEN}", "--max-time", str(FUZZ_S)]
    limits: Any = {"token": ("of-a-client-of-a-client",), "admin_token": TOKEN, "writable": True}
    with serving_on_a_port(index, **limits) as url:
        done = subprocess.run(
            [*program, "run", f"{url}/openapi.json", "--checks", "all", "--no-color", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    output = re.sub(r"(\S{200})\S+", r"\1...", done.stdout + done.stderr)
    assert "Traceback" not in output
    assert str(index) not in output
    assert done.returncode == 0, output[-8000:]


@pytest.fixture(scope="module")
def described(index: Path) -> Any:
    (answer,) = ask(index, ("GET", "/openapi.json", {}))
    return answer.json()


def test_examples_of_the_description_are_accepted(index: Path, described: Any) -> None:
    fields = described["components"]["schemas"]["SearchRequest"]["properties"]
    (query,) = fields["query"]["examples"]
    (where,) = fields["where"]["anyOf"][0]["examples"]
    accepted, refused = ask(
        index, search({"query": query, "where": where}), search({"query": query, "queries": ["b"]})
    )
    assert (accepted.status_code, refused.status_code) == (200, 422)


def test_description_is_valid(described: Any) -> None:
    """Every default fits its own schema, and routes name the token that they need."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: the extra test")
    found = []

    def look(schema: Any) -> None:
        if isinstance(schema, dict) and isinstance(schema.get("default"), (list, dict, str, int)):
            found.append(schema)
        for each in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(each, (dict, list)):
                look(each)

    look(described["components"]["schemas"])
    assert len(found) > 5
    for schema in found:
        whole = {**schema, "components": described["components"]}
        jsonschema.Draft202012Validator(whole).validate(schema["default"])
    (scheme,) = described["components"]["securitySchemes"]
    for path, methods in described["paths"].items():
        is_open = path in ("/livez", "/readyz", "/health")
        for operation in methods.values():
            assert operation.get("security", []) == ([] if is_open else [{scheme: []}]), path


def test_settings_are_documented() -> None:
    """The table in docs/service.md is made of the settings."""
    from tests.support.programs import ROOT
    from tests.support.serving import settings_table

    assert settings_table() in (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
