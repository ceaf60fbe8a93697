"""A model is what its files say, wherever they lie; a changed one never gets old vectors."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.encoding import model_identity
from rag_demo.encoding.model_identity import ModelIdentity, fingerprint, identify
from rag_demo.errors import ModelError, ModelMismatchError, OtherIndexError
from rag_demo.index import read_index, read_manifest
from rag_demo.ingest import ingest

TEXTS = ["the cache", "how do i give memory back", "paris"]

FILES = {
    "model.safetensors": b"weights",
    "modules.json": b"[]",
    "vocab.txt": b"a\nb",
    "tokenizer.model": b"pieces",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/pytorch_model.bin": b"more weights",
    "0_Transformer/deep/er/model.safetensors": b"deep",
    "custom.py": b"pass",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_each_file_counts(files: Path, name: str) -> None:
    """Another content of the same length, another name, or none: another model."""
    before = fingerprint(files)
    content = FILES[name]
    (files / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changed = fingerprint(files)
    (files / name).rename(files / f"{name}.other")
    renamed = fingerprint(files)
    (files / f"{name}.other").unlink()
    assert len({before, changed, renamed, fingerprint(files)}) == 4
    (files / name).write_bytes(content)
    assert fingerprint(files) == before


def test_a_change_that_hides_is_seen(files: Path) -> None:
    """Same size, and the time of modification put back."""
    before = fingerprint(files)
    path = files / "2_Dense" / "pytorch_model.bin"
    status = path.stat()
    path.write_bytes(b"some weights")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert fingerprint(files) != before


def test_what_cannot_change_a_vector_does_not_count(files: Path) -> None:
    """A readme, git's own files, weights of other frameworks; a link that leads back up."""
    before = fingerprint(files)
    for name in (
        "README.md",
        ".git/HEAD",
        ".cache/x.json",
        "onnx/model.json",
        "tf_model.h5",
        "checkpoint-500/x.bin",
    ):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("anything")
    (files / "itself").symlink_to(files)
    assert fingerprint(files) == before


def test_files_are_read_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the system says that they are the same."""
    first = fingerprint(files)
    made = []

    def counting() -> Any:
        made.append(1)
        return hashlib.new("sha256")

    monkeypatch.setattr(model_identity.hashlib, "sha256", counting)
    assert fingerprint(files) == first
    assert len(made) == 1  # That of the names and digests.
    (files / "vocab.txt").write_bytes(b"c\nd")
    assert fingerprint(files) != first
    assert len(made) == 3


def test_one_model_by_any_path(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with a slash, in full, by a link; of another type it is another."""
    (files.parent / "link").symlink_to(files)
    monkeypatch.chdir(files.parent)
    paths = ("files", "files/", "./files", str(files), "link", "link/../files")
    found = {identify(path, "float32") for path in paths}
    assert len(found) == 1
    assert found.pop().name == str(files)
    assert not identify("files", "float32").is_same(identify("files", "bfloat16"))


def test_one_of_the_hub_is_known_by_what_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    """Nobody is asked who is not here; a name without files is known by the name."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert identify("owner/model", "float32") == ModelIdentity("owner/model", "float32")
    repository = tmp_path / "hub" / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(files, repository / "snapshots" / "abc")
    found = identify("owner/model", "float32")
    assert found == ModelIdentity("owner/model", "float32", fingerprint(files))
    assert identify("no such model!", "float32").fingerprint is None


def change(folder: Path, out: Path | None = None) -> Path:
    """Turn a model's weights around."""
    if out is not None:
        shutil.copytree(folder, out)
    path = (out or folder) / "model.safetensors"
    weights = load_file(path)
    name = "embeddings.word_embeddings.weight"
    weights[name] = weights[name][::-1].copy()
    save_file(weights, path)
    return out or folder


def test_a_changed_model_at_the_same_path(tiny_model: Path, tmp_path: Path) -> None:
    """Gets no vector of the old one: not from the cache, not from an index, not by a search."""
    path = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    index, cache = tmp_path / "i", tmp_path / "c.sqlite"
    documents = [Document(text, text, {}) for text in TEXTS]
    with EmbeddingModel(path, device="cpu", cache=cache) as model:
        old = model.embed_documents(TEXTS)
        ingest(documents, model, index)
    change(path)
    with EmbeddingModel(change(tiny_model, tmp_path / "twin"), device="cpu") as twin:
        expected = twin.embed_documents(TEXTS)
    assert not np.allclose(old, expected, atol=1e-3)  # The change does matter.
    with EmbeddingModel(path, device="cpu", cache=cache) as model:
        assert np.array_equal(model.embed_documents(TEXTS), expected)
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            with pytest.raises(
                ModelMismatchError, match=r"name that one: --model .* or make it again"
            ):
                retriever.load(index)
        with pytest.raises(OtherIndexError, match="replace"):
            ingest(documents, model, index)
        assert ingest(documents, model, index, replace=True).embedded == 3
    assert np.allclose(read_index(index).vectors, expected, atol=1e-6)


def test_types_do_not_mix(tiny_model: Path, tmp_path: Path) -> None:
    """Vectors of bfloat16 are not those of float32, in the index and in the cache."""
    documents = [Document(text, text, {}) for text in TEXTS]
    with EmbeddingModel(tiny_model, device="cpu", dtype="bfloat16") as model:
        ingest(documents, model, tmp_path / "i")
    assert read_manifest(tmp_path / "i")["dtype"] == "bfloat16"
    with EmbeddingModel(tiny_model, device="cpu") as model:
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            with pytest.raises(ModelMismatchError, match=r"bfloat16.*not with.*float32"):
                retriever.load(tmp_path / "i")
        with pytest.raises(OtherIndexError, match=r"bfloat16.*not of.*float32"):
            ingest(documents, model, tmp_path / "i")


def test_a_retrievers_index_knows_its_model(tiny_model: Path, tmp_path: Path) -> None:
    """Saved by one path, opened by another; not by a changed model of the same name."""
    path = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    with EmbeddingModel(path, device="cpu") as model:
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            retriever.add(TEXTS)
            retriever.save(tmp_path / "i")
    (tmp_path / "link").symlink_to(path)
    with EmbeddingModel(tmp_path / "link", device="cpu") as model:
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            assert retriever.load(tmp_path / "i") == 3
    change(path)
    with EmbeddingModel(path, device="cpu") as model:
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            with pytest.raises(ModelMismatchError):
                retriever.load(tmp_path / "i")


def test_one_object_is_one_model(tiny_model: Path, tmp_path: Path) -> None:
    """Files that change after it has said which model it is, or between loads, are refused."""
    path = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    with EmbeddingModel(path, device="cpu") as model:
        said = model.identity
        change(path)
        with pytest.raises(ModelError, match="have changed since"):
            model.load_model()
        assert not model.is_loaded
        assert model.identity == said
    with EmbeddingModel(path, device="cpu") as model:
        model.load_model()
        model.unload_model()
        change(path)
        with pytest.raises(ModelError, match="have changed since"):
            model.load_model()
