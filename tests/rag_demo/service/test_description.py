"""The service against its own OpenAPI description, by schemathesis."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Embedder, make_index, serving

from rag_demo.service.openai_routes import where_of
from rag_demo.service.problems import Problem
from rag_demo.service.schemas import SearchRequest, StoreSearchRequest
from rag_demo.service.settings import Limits

FUZZ_S = 45
SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 413, 415, 422, 429]
[[operations]]
# The number of dimensions that is right is the model's, which no description knows.
include-name = "POST /v1/embeddings"
checks.positive_data_acceptance.expected-statuses = [200, 400, 413, 429]
[[operations]]
include-name = "POST /embed"
checks.positive_data_acceptance.expected-statuses = [200, 413, 422, 429]
"""


def fuzz(tmp_path: Path, index: Path, load_model: Any, *options: str) -> tuple[int, str]:
    """Let schemathesis ask a service whatever its description allows, and what it does not."""
    from browsing import serving_on_a_port

    pytest.importorskip("schemathesis", reason="needs schemathesis: the extra service-test")
    (tmp_path / "settings.toml").write_text(SETTINGS)
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"]
    with serving_on_a_port(index, load_model) as url:
        done = subprocess.run(
            [*program, "run", f"{url}/openapi.json", "--checks", "all", "--no-color", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    output = re.sub(r"(\S{200})\S+", r"\1...", done.stdout + done.stderr)
    assert "Traceback" not in output
    assert str(index) not in output
    return done.returncode, output[-8000:]


@pytest.mark.slow
def test_fuzzed_by_its_own_description(tmp_path: Path, index: Path) -> None:
    """No error of the server, no answer of another shape, and bad input is refused."""
    code, output = fuzz(tmp_path, index, Embedder, "--max-time", str(FUZZ_S))
    assert code == 0, output


@pytest.mark.slow
def test_the_fuzzer_finds_what_is_wrong(tmp_path: Path, index: Path) -> None:
    """A model whose vectors are none: the control."""

    class Broken(Embedder):
        def embed_documents(self, texts: Any) -> Any:
            if any("text" in text for text in texts):
                raise RuntimeError("no vectors")
            return super().embed_documents(texts)

    code, output = fuzz(tmp_path, index, Broken, "--phases", "examples")
    assert code == 1, output
    assert "[503]" in output


def test_every_answer_is_described(tmp_path: Path) -> None:
    """Each route's, in good times and bad; what a filter may be is said as it is checked."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: the extra test")
    folder = make_index(tmp_path / "index")

    async def main() -> Any:
        async with serving(folder) as client:
            return (await client.get("/openapi.json")).json()

    described = asyncio.run(main())
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert set(answers) > {"200"}, (method, path)
            assert answers["200"]["content"], (method, path)
    schema = {
        "$ref": "#/components/schemas/SearchRequest",
        "components": described["components"],
    }
    check = jsonschema.Draft202012Validator(schema)
    for where, is_right in (
        ({"year": 2000}, True),
        ({"year": {"$gte": 2000, "$lt": 2010}}, True),
        ({"year": {"$near": 2000}}, False),
        ({"year": {"$gte": []}}, False),
        ({"a": [[[[["deep"]]]]]}, False),
    ):
        assert check.is_valid({"query": "a", "where": where}) is is_right, where
    assert not check.is_valid({"query": "a", "queries": ["b"]})
    assert not check.is_valid({"query": "   "})
    schema["$ref"] = "#/components/schemas/StoreSearchRequest"
    check = jsonschema.Draft202012Validator(schema)
    for kind, value, is_right in (
        ("eq", None, True),
        ("eq", [None, "a"], True),
        ("eq", {"a": 1}, False),
        ("eq", [["a"]], False),
        ("in", "a", False),
        ("gt", None, False),
    ):
        one = {"type": kind, "key": "a", "value": value}
        both = {"type": "and", "filters": [one]}
        for filters in (one, both):
            assert check.is_valid({"query": "a", "filters": filters}) is is_right, filters
            with contextlib.ExitStack() as stack:
                if not is_right:
                    stack.enter_context(pytest.raises(Problem, match="filters cannot be used"))
                where_of(filters, Limits())


def test_bounds_of_numbers_are_described() -> None:
    """What is refused by its size is not allowed by the description either."""
    for request, name, most in (
        (SearchRequest, "top_k", 1000),
        (StoreSearchRequest, "max_num_results", 50),
    ):
        described = request.model_json_schema()["properties"][name]
        assert (described["minimum"], described["maximum"]) == (1, most)
