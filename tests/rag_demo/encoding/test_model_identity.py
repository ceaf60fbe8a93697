"""The identity of a model depends on its files, not on its path."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from rag_demo import EmbeddingModel, PyTorchGPURetriever, RagDemoError
from tests.support.programs import run_forked
from tests.support.rag_command import fail, info, search, succeed, write_lines

TEXTS = ["the cache", "how do i give memory back", "paris"]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, with all kinds of files that a model may have."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    for name in ("vocab.txt", "tokenizer.model", "1_Pooling/pytorch_model.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("# anything")
    return folder


@pytest.fixture
def index(folder: Path, tmp_path: Path) -> Path:
    with (
        EmbeddingModel(folder, device="cpu") as model,
        PyTorchGPURetriever(model, device="cpu") as retriever,
    ):
        retriever.add(TEXTS)
        retriever.save(tmp_path / "i")
    return tmp_path / "i"


def load(index: Path, model: str | Path, **options: Any) -> int:
    """Open an index with a model, which is not loaded for that."""
    with (
        EmbeddingModel(model, device="cpu", **options) as embedder,
        PyTorchGPURetriever(embedder, device="cpu") as retriever,
    ):
        return retriever.load(index)


def reverse_words(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "embeddings.word_embeddings.weight"
    save_file({**weights, name: weights[name][::-1].copy()}, path)


def test_each_file_that_changes_vectors_changes_the_identity(folder: Path, index: Path) -> None:
    """Another content of the same size and time, another name, or no file."""
    for name in (
        "model.safetensors",
        "modules.json",
        "config.json",
        "tokenizer.json",
        "vocab.txt",
        "tokenizer.model",
        "1_Pooling/config.json",
        "1_Pooling/pytorch_model.bin",
    ):
        path = folder / name
        content, status = path.read_bytes(), path.stat()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(RagDemoError, match=r"name that one: --model .* or make it again"):
            load(index, folder)
        renamed = path.with_suffix(".txt" if path.suffix != ".txt" else ".bin")
        path.rename(renamed)
        with pytest.raises(RagDemoError):
            load(index, folder)
        renamed.unlink()
        with pytest.raises(RagDemoError):
            load(index, folder)
        path.write_bytes(content)
        assert load(index, folder) == 3, name


def test_other_files_do_not_change_the_identity(folder: Path, index: Path) -> None:
    """Notes, results, hidden files, weights that are not read, a link to a parent folder."""
    names = (
        "notes.txt",
        "trainer_state.json",
        "training_args.bin",
        "results/eval.txt",
        "results/config.json",
        "eval/similarity.json",
        "eval/predicted.txt",
        "1_Pooling/log.json",
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        "pytorch_model.bin",
        "training.log",
        ".git/HEAD",
        ".cache/x.json",
        "onnx/model.json",
        "tf_model.h5",
        "train_script.py",
    )
    for name in (*names, "checkpoint-500/x.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("anything")
    (folder / "itself").symlink_to(folder)
    assert load(index, folder) == 3


def test_path_does_not_change_the_identity(
    folder: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for path in ("m", "m/", "./m", str(folder), "link", "link/../m"):
        assert load(index, path) == 3
    shutil.move(folder, tmp_path / "moved")
    assert load(index, tmp_path / "moved") == 3


def test_dtype_changes_the_identity(tiny_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "s.jsonl", [{"text": text} for text in TEXTS])
    command = ("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    succeed(*command, "--dtype", "bfloat16")
    assert info(tmp_path / "i")["dtype"] == "bfloat16"
    with pytest.raises(RagDemoError, match=r"bfloat16.*not with.*float32"):
        load(tmp_path / "i", tiny_model)
    assert "--yes" in fail(*command)
    assert load(tmp_path / "i", tiny_model, dtype="bfloat16") == 3


def test_second_load_of_changed_files_is_refused(folder: Path) -> None:
    with EmbeddingModel(folder, device="cpu") as model:
        model.load_model()
        model.unload_model()
        reverse_words(folder)
        with pytest.raises(RagDemoError, match="have changed since"):
            model.load_model()
        assert not model.is_loaded


@pytest.mark.slow
def test_hub_model_is_identified_by_its_commit(folder: Path, tmp_path: Path) -> None:
    """Files that another program downloads later change nothing. No request is made."""
    repository = tmp_path / "hub" / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(folder, repository / "snapshots" / "abc")
    (repository / "snapshots" / "def").mkdir()
    program = """
    import sys
    from pathlib import Path
    from rag_demo import EmbeddingModel, PyTorchGPURetriever, RagDemoError
    index, repository = map(Path, sys.argv[1:])
    with EmbeddingModel("owner/model", device="cpu") as model, PyTorchGPURetriever(model) as made:
        made.add(["a text", "another"])
        made.save(index)
        print(model.identity.fingerprint)
    for name in ("data_config.json", "train_script.py", "vocab.bpe"):
        (repository / "snapshots" / "abc" / name).write_text("[]")
    for name in ("owner/model", "owner/other", "owner/model"):
        try:
            with EmbeddingModel(name, device="cpu") as model, PyTorchGPURetriever(model) as opened:
                print(opened.load(index))
        except RagDemoError as error:
            print("refused")
        (repository / "refs" / "main").write_text("def" if name == "owner/other" else "abc")
    """
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    done = run_forked(program, str(tmp_path / "made"), str(repository), env=env)
    expected = "owner/model@abc\n2\nrefused\nrefused\n"
    assert (done.stdout, done.returncode) == (expected, 0), str(done)


def test_code_counts_where_it_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "custom.py").write_text("# code")
    with EmbeddingModel(folder) as plain, EmbeddingModel(folder, trust_remote_code=True) as own:
        before = plain.identity, own.identity
    (folder / "custom.py").write_text("# other code")
    with EmbeddingModel(folder) as plain, EmbeddingModel(folder, trust_remote_code=True) as own:
        after = plain.identity, own.identity
    assert [one.is_same(other) for one, other in zip(before, after, strict=True)] == [True, False]


def test_index_gives_back_the_options_of_its_model(tiny_model: Path, tmp_path: Path) -> None:
    """By command, and in Python; the prompt of queries may change, that of documents may not."""
    source = write_lines(tmp_path / "s.jsonl", [{"text": text} for text in TEXTS])
    prompts = ("--query-prompt", "paris ", "--document-prompt", "give ", "--truncate-dim", "8")
    out = tmp_path / "i"
    succeed("index", source, "--out", out, "--model", tiny_model, *prompts)
    assert info(out)["dimension"] == 8
    (found,) = search(out, "the cache", "--mode", "dense", "--top-k", "1")
    options: Any = {"prompts": {"query": "paris ", "document": "give "}, "truncate_dim": 8}
    with EmbeddingModel(tiny_model, device="cpu", **options) as model:
        score = float(model.embed_query("the cache") @ model.embed_documents(TEXTS[:1])[0])
    assert found["results"][0]["score"] == pytest.approx(score, abs=1e-6)
    assert load(out, tiny_model, prompts={"document": "give "}, truncate_dim=8) == 3
    for other in ({"truncate_dim": 8}, {"prompts": {"document": "give "}}):
        with pytest.raises(RagDemoError, match="not with"):
            load(out, tiny_model, **other)
    write_lines(tmp_path / "more.jsonl", [{"text": "a city", "id": "more"}])
    succeed("add", out, tmp_path / "more.jsonl")
    assert info(out)["texts"] == 4
