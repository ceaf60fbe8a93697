"""The identity of a model depends on its files, not on its path."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever, RagDemoError
from tests.support.rag_command import info, search, succeed, write_lines

TEXTS = ["the cache", "how do i give memory back", "paris"]
THAT_COUNT = """
    model.safetensors modules.json config.json tokenizer.json vocab.txt tokenizer.model
    1_Pooling/config.json 1_Pooling/pytorch_model.bin
"""
# Notes, results, hidden files, and weights that are not read.
OTHERS = """
    notes.txt trainer_state.json training_args.bin results/eval.txt results/config.json README.md
    eval/similarity.json eval/predicted.txt 1_Pooling/log.json LICENSE LICENSE.txt training.log
    pytorch_model.bin .git/HEAD .cache/x.json onnx/model.json tf_model.h5 train_script.py
    checkpoint-500/x.bin
"""


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, with all kinds of files that a model may have."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    for name in ("vocab.txt", "tokenizer.model", "1_Pooling/pytorch_model.bin"):
        (folder / name).write_text("# anything")
    return folder


def make_index(model: str | Path, path: Path) -> Path:
    """Save an index of vectors that are said to be the model's, which is not loaded for that."""
    with (
        EmbeddingModel(model, device="cpu") as embedder,
        PyTorchGPURetriever(embedder, device="cpu") as retriever,
    ):
        retriever.add(TEXTS, vectors=np.eye(3, 32, dtype=np.float32))
        retriever.save(path)
    return path


@pytest.fixture
def index(folder: Path, tmp_path: Path) -> Path:
    return make_index(folder, tmp_path / "i")


def load(index: Path, model: str | Path, **options: Any) -> int:
    """Open an index with a model, which is not loaded for that."""
    with (
        EmbeddingModel(model, device="cpu", **options) as embedder,
        PyTorchGPURetriever(embedder, device="cpu") as retriever,
    ):
        return retriever.load(index)


def test_each_file_that_changes_vectors_changes_the_identity(folder: Path, index: Path) -> None:
    """Another content of the same size and time, or no file."""
    for name in THAT_COUNT.split():
        path = folder / name
        content, status = path.read_bytes(), path.stat()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(RagDemoError, match=r"name that one: --model .* or make it again"):
            load(index, folder)
        path.unlink()
        with pytest.raises(RagDemoError):
            load(index, folder)
        path.write_bytes(content)
        assert load(index, folder) == 3, name


def test_other_files_and_the_path_do_not_change_the_identity(
    folder: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OTHERS.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("anything")
    (folder / "itself").symlink_to(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for path in ("m", "m/", "./m", str(folder), "link", "link/../m"):
        assert load(index, path) == 3
    shutil.move(folder, tmp_path / "moved")
    assert load(index, tmp_path / "moved") == 3


def test_second_load_of_changed_files_is_refused(folder: Path) -> None:
    with EmbeddingModel(folder, device="cpu") as model:
        model.load_model()
        model.unload_model()
        (folder / "vocab.txt").write_text("# anything else")
        with pytest.raises(RagDemoError, match="have changed since"):
            model.load_model()
        assert not model.is_loaded


def test_hub_model_is_identified_by_its_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another program downloads later change nothing. No request is made."""
    repository = tmp_path / "hub" / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(folder, repository / "snapshots" / "abc")
    (repository / "snapshots" / "def").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    index = make_index("owner/model", tmp_path / "i")
    with EmbeddingModel("owner/model") as model:
        assert model.identity.fingerprint == "owner/model@abc"
    for name in ("data_config.json", "train_script.py", "vocab.bpe"):
        (repository / "snapshots" / "abc" / name).write_text("[]")
    assert load(index, "owner/model") == 3
    with pytest.raises(RagDemoError):
        load(index, "owner/other")
    (repository / "refs" / "main").write_text("def")
    with pytest.raises(RagDemoError, match=r"owner/model@abc.*not with.*owner/model@def"):
        load(index, "owner/model")


def test_code_counts_where_it_runs(folder: Path) -> None:
    identities = []
    for code in ("# code", "# other code"):
        (folder / "custom.py").write_text(code)
        for is_trusted in (False, True):
            with EmbeddingModel(folder, trust_remote_code=is_trusted) as model:
                identities.append(model.identity)
    plain, own, plain_after, own_after = identities
    assert plain.is_same(plain_after) and not own.is_same(own_after)


def test_index_gives_back_the_options_of_its_model(tiny_model: Path, tmp_path: Path) -> None:
    """By command, and in Python; the prompt of queries may change, the other options may not."""
    source = write_lines(tmp_path / "s.jsonl", [{"text": text} for text in TEXTS])
    prompts = ("--query-prompt", "paris ", "--document-prompt", "give ", "--truncate-dim", "8")
    out = tmp_path / "i"
    succeed("index", source, "--out", out, "--model", tiny_model, "--dtype", "bfloat16", *prompts)
    assert (info(out)["dimension"], info(out)["dtype"]) == (8, "bfloat16")
    (found,) = search(out, "the cache", "--mode", "dense", "--top-k", "1")
    options: Any = {
        "prompts": {"query": "paris ", "document": "give "},
        "truncate_dim": 8,
        "dtype": "bfloat16",
    }
    with EmbeddingModel(tiny_model, device="cpu", **options) as model:
        score = float(model.embed_query("the cache") @ model.embed_documents(TEXTS)[0])
    assert found["results"][0]["score"] == pytest.approx(score, abs=1e-6)
    options["prompts"].pop("query")
    assert load(out, tiny_model, **options) == 3
    for name in options:
        with pytest.raises(RagDemoError, match=r"bfloat16.*not with"):
            load(out, tiny_model, **{**options, name: None})
    write_lines(tmp_path / "more.jsonl", [{"text": "a city", "id": "more"}])
    succeed("add", out, tmp_path / "more.jsonl")
    assert info(out)["texts"] == 4
