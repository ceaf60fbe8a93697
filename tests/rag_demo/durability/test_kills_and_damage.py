"""Short runs of the tortures; the long ones are ``make torture-save`` and ``make fuzz-index``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from tests.rag_demo.durability import ingestion, saves
from tests.rag_demo.durability.ingestion import Source
from tests.rag_demo.durability.saves import Model, check_whole, fuzz_index, save

# An interrupt between open() and the block that closes leaves the file to its destructor.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.mark.slow
def test_killed_save_leaves_a_whole_index() -> None:
    assert saves.torture_kills(8)["different_states"] >= 3


@pytest.mark.slow
def test_save_on_a_full_disk_leaves_the_old_index() -> None:
    result = saves.torture_full_disk(8)
    assert 0 < result["failed"] < result["attempts"]


@pytest.mark.slow
def test_two_writers_and_a_reader_disturb_nobody() -> None:
    result = saves.torture_writers(4)
    assert result["saves"] + result["refused"] == 4
    assert result["different_states"] > 1


@pytest.mark.slow
def test_damaged_index_is_refused_or_right() -> None:
    assert fuzz_index(300)["refused"] > 50


@pytest.mark.slow
def test_interrupted_ingestion_leaves_a_consistent_index(tiny_model: Path) -> None:
    result = ingestion.torture_interrupts(12, tiny_model)
    assert result["places"] >= 6
    assert result["fewest_states"] > 1


@pytest.mark.slow
def test_ingestion_that_gets_signals_leaves_a_consistent_index(tiny_model: Path) -> None:
    assert ingestion.torture_signals(2, tiny_model)["runs"] == 2


class Careless(Model):
    """Gives one of its texts the vector of another."""

    def embed_documents(self, texts: Any) -> Any:
        vectors = super().embed_documents(texts)
        vectors[-1] = vectors[0]
        return vectors


def test_control_wrong_vector_of_a_save_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "i", 1, 40)
    assert check_whole(tmp_path / "i", 40) == 1
    save(tmp_path / "i", 1, 40, Careless())
    with pytest.raises(AssertionError, match="wrong vectors"):
        check_whole(tmp_path / "i", 40)


class Mistaken(EmbeddingModel):
    """Gives one of its texts the vector of another."""

    def embed_documents(self, texts: Any, **options: Any) -> Any:
        vectors = super().embed_documents(texts, **options)
        vectors[-1] = vectors[0]
        return vectors


@pytest.mark.parametrize("mistake", ["vector", "missing", "text"])
def test_control_mistake_of_an_ingestion_is_noticed(
    tiny_model: Path, tmp_path: Path, mistake: str
) -> None:
    source = Source(tmp_path, tiny_model, 18)
    texts = dict(source.texts[0])
    if mistake == "missing":
        texts.pop(min(source.both))
    elif mistake == "text":
        texts["3"] = "of no version"
    kind = Mistaken if mistake == "vector" else EmbeddingModel
    with (
        kind(tiny_model, device="cpu") as embedder,
        PyTorchGPURetriever(embedder, device="cpu") as retriever,
    ):
        retriever.add(list(texts.values()), ids=list(texts), passages=True)
        retriever.save(tmp_path / "i")
    wanted = {"vector": "others' vectors", "missing": "are gone", "text": "of no version"}
    with pytest.raises(AssertionError, match=wanted[mistake]):
        source.check(tmp_path / "i", there_before=True)
