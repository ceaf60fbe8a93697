"""Programs that end by themselves: what they measure, with the product and with its mutants.

cached_pipeline: an object with a transformers pipeline and a tokenizer, obtained from a cache.
embedding_worker: a thread embeds batches, released one by one; 110 MB are more than two batches.
ensemble: one of two classifiers on a shared backbone is retired.
gradcam: an object whose hooks keep feature maps of a model that is used further.
training: a run that is resumed from a checkpoint in the same process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.applications.harness import run_application
from tests.support.tiny_model import write_tiny_model

SLOW = pytest.mark.slow
FACTS: dict[str, dict[str, Any]] = {
    "cached_pipeline": {"alive_mb": 0, "written": [2], "tokenizes": True, "is_similar": True},
    "embedding_worker": {"left_mb": 0, "means": True, "closed": ["documents"]},
    "ensemble": {"head_alive_mb": 0, "closed": ["large"], "dropped": [40_000], "trains": True},
    "gradcam": {"alive_mb": 0, "heat": [4, 256, 256], "hook_calls": [], "trains": True},
    "training": {
        "alive_mb": [0, 0, 0],
        "epochs": 2,
        **dict.fromkeys(("same_losses", "same_files", "same_weights"), True),
    },
}
# The memory that each may keep, and its ways; with the first one it also meets the mutants.
LIMITS = {
    "cached_pipeline": (35, ("parts", "embedder", "host")),
    "embedding_worker": (110, ("alone", "heartbeat")),
    "ensemble": (20, ("scope", "release")),
    "gradcam": (35, ("maps", "object", "closable")),
    "training": (40, ("scope",)),
}
MUTANTS = ("leak", "break_sharing", "skip_destructor")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a BERT of 70 MB."""
    folder = tmp_path_factory.mktemp("cached_pipeline")
    write_tiny_model(folder, dimension=1024)
    return folder / "transformer"


@pytest.fixture
def folder(name: str, request: pytest.FixtureRequest) -> Path:
    """Return what the program reads, or where it writes."""
    found: Path = request.getfixturevalue("model" if name == "cached_pipeline" else "tmp_path")
    return found


def check(name: str, how: str, folder: Path, mutant: str | None = None) -> None:
    """Memory comes back, and what is used further computes the right values."""
    facts = run_application(name, how, str(folder), mutant=mutant)
    expected = {"is_right": True, **FACTS[name]}
    assert {fact: facts[fact] for fact in expected} == expected
    assert facts["grown_mb"] < LIMITS[name][0]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) == ("ensemble", "scope") else SLOW)
        for name, (_, ways) in LIMITS.items()
        for how in ways
    ],
)
def test_memory_is_back_and_the_rest_works(name: str, how: str, folder: Path) -> None:
    check(name, how, folder)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", LIMITS)
def test_sees_a_broken_product(name: str, mutant: str, folder: Path) -> None:
    ways = LIMITS[name][1]
    how = ways[MUTANTS.index(mutant)] if name == "gradcam" else ways[0]
    with pytest.raises(AssertionError):
        check(name, how, folder, mutant)
