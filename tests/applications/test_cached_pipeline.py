"""An object with a transformers pipeline and a tokenizer, obtained from a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from applications.harness import run_application
from support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a BERT of 70 MB."""
    folder = tmp_path_factory.mktemp("cached_pipeline")
    write_tiny_model(folder, dimension=1024)
    return folder / "transformer"


def check(model: Path, how: str = "parts", mutant: str | None = None) -> dict[str, Any]:
    """Release the embedder and load a new one; what shares its word embeddings goes on."""
    facts = run_application("cached_pipeline", str(model), how, mutant=mutant)
    assert facts["alive_mb"] == 0
    assert facts["grown_mb"] < 35
    assert facts["written"] == [2]
    assert facts["tokenizes"]
    assert facts["is_similar"]
    assert facts["is_right"]
    assert facts.get("size_mb", 70) > 60
    return facts


@pytest.mark.slow
def test_released_pipeline_is_freed_and_a_new_one_computes(model: Path) -> None:
    check(model)


@pytest.mark.slow
def test_released_embedder_is_freed_and_a_new_one_computes(model: Path) -> None:
    check(model, "embedder")


@pytest.mark.slow
def test_host_refuses_a_cached_load_until_the_cache_is_cleared(model: Path) -> None:
    assert "do not cache it" in check(model, "host")["refusal"]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(model: Path, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(model, mutant=mutant)
