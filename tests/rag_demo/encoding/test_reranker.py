"""A reranker orders the results of a search, and is released."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_demo import RagDemoError, Reranker
from tests.support.releasing import gone, weak
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, text_of
from tests.support.tiny_model import write_tiny_reranker
from torch_utils import ResourceClosedError

QUERY = "golf echo"
TEXTS = [f"{text_of(n)} number{n}" for n in range(100)]
TRANSFORMERS = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_reranker(tmp_path_factory.mktemp("cross"), QUERY, TEXTS[:9])


@pytest.fixture
def reranker(cross_encoder: Path) -> Iterator[Reranker]:
    with Reranker(cross_encoder, device="cpu") as reranker:
        yield reranker


@TRANSFORMERS
def test_reranker_orders_results_by_its_scores(reranker: Reranker) -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add(TEXTS)
        first = retriever.search(QUERY, 25)
        found = retriever.search(QUERY, 5, rerank=reranker)
        scores = dict(
            zip(
                [each.id for each in first],
                reranker.score(QUERY, [each.text for each in first]).tolist(),
                strict=True,
            )
        )
        best = sorted(scores, key=lambda name: (-scores[name], name))[:5]
        assert [each.id for each in found] == best != [each.id for each in first[:5]]
        assert [each.rank for each in found] == [1, 2, 3, 4, 5]
        assert [each.score for each in found] == pytest.approx([scores[each.id] for each in found])
        batch = retriever.search_batch([QUERY, "delta"], 5, rerank=reranker)
        assert [each.id for each in batch[0]] == best
        assert retriever.search(QUERY, 5, where={"n": -1}, rerank=reranker) == []


def models_of(kind: type) -> set[Any]:
    return {each for each in gc.get_objects() if type(each) is kind}


@TRANSFORMERS
def test_closed_reranker_is_released_and_raises(cross_encoder: Path) -> None:
    from transformers import BertForSequenceClassification

    before = models_of(BertForSequenceClassification)
    reranker = Reranker(cross_encoder, device="cpu")
    assert len(reranker.score("the", ["cache", "memory"])) == 2
    with pytest.raises(TypeError, match="texts must be a sequence of str, got one str"):
        reranker.score("the", "cache")
    (model,) = models_of(BertForSequenceClassification) - before
    weights = weak(model)
    del model
    reranker.close()
    assert gone(weights)
    for use in (lambda: reranker.score("the", ["cache"]), lambda: reranker.rerank("the", [])):
        with pytest.raises(ResourceClosedError):
            use()


@pytest.mark.parametrize("wrong", ["nowhere", "empty"])
@TRANSFORMERS
def test_folder_without_a_cross_encoder_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "empty").mkdir()
    with Reranker(tmp_path / wrong, device="cpu") as reranker:
        for _ in range(2):
            with pytest.raises(RagDemoError, match=wrong) as error:
                reranker.score("the", ["cache"])
            assert "\n" not in str(error.value)
