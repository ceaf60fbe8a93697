"""A reranker orders the results of a search, and is released."""

from pathlib import Path
from typing import Any

import pytest

from rag_demo import RagDemoError, Reranker
from tests.support.releasing import gone, weak
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, text_of
from tests.support.tiny_model import write_tiny_reranker
from torch_utils import ResourceClosedError

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.
QUERY = "golf echo"
TEXTS = [f"{text_of(n)} number{n}" for n in range(100)]


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_reranker(tmp_path_factory.mktemp("cross"), QUERY, TEXTS[:9])


def test_reranker_orders_results_by_its_scores(cross_encoder: Path) -> None:
    with OnCpu(Hashed()) as retriever, Reranker(cross_encoder, device="cpu") as reranker:
        retriever.add(TEXTS)
        first = retriever.search(QUERY, 25)
        found = retriever.search(QUERY, 5, rerank=reranker)
        expected = reranker.score(QUERY, [each.text for each in first]).tolist()
        scores = dict(zip([each.id for each in first], expected, strict=True))
        best = sorted(scores, key=lambda name: (-scores[name], name))[:5]
        assert [each.id for each in found] == best != [each.id for each in first[:5]]
        assert [each.rank for each in found] == [1, 2, 3, 4, 5]
        assert [each.score for each in found] == pytest.approx([scores[name] for name in best])
        batch = retriever.search_batch([QUERY, "delta"], 5, rerank=reranker)
        assert [each.id for each in batch[0]] == best
        assert retriever.search(QUERY, 5, where={"n": -1}, rerank=reranker) == []
        with pytest.raises(TypeError, match="texts must be a sequence of str, got one str"):
            reranker.score("the", "cache")


def test_closed_reranker_is_released_and_raises(
    cross_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertForSequenceClassification as Bert

    used = list[Any]()
    forward = Bert.forward

    def noting(self: Any, *args: Any, **options: Any) -> Any:
        used.extend(weak(self) if not used else [])
        return forward(self, *args, **options)

    monkeypatch.setattr(Bert, "forward", noting)
    reranker = Reranker(cross_encoder, device="cpu")
    assert len(reranker.score("the", ["cache", "memory"])) == 2
    assert not gone(used)
    reranker.close()
    assert gone(used)
    for use in (lambda: reranker.score("the", ["cache"]), lambda: reranker.rerank("the", [])):
        with pytest.raises(ResourceClosedError):
            use()


def test_folder_without_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for wrong in ("nowhere", "empty"):
        with Reranker(tmp_path / wrong, device="cpu") as reranker:
            with pytest.raises(RagDemoError, match=wrong) as error:
                reranker.score("the", ["cache"])
            assert "\n" not in str(error.value)
