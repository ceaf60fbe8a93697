"""`EmbeddingModel(cache=...)`: the same bytes again, and never wrong vectors."""

import contextlib
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.overrides import TorchFunctionMode

from rag_demo import EmbeddingModel
from tests.support.programs import assert_clean, run_forked

TEXTS = ["the cache", "how do i give memory back", "paris", "", "the cache"]


class Computation(TorchFunctionMode):
    """Counts what torch computes; a text that is in the cache needs none of it."""

    calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def embed(model: EmbeddingModel, texts: list[str], kind: str = "documents") -> tuple[Any, bool]:
    """Return the vectors, and whether anything was computed for them."""
    model.load_model()
    with Computation() as computation:
        vectors = getattr(model, f"embed_{kind}")(texts)
    return vectors, computation.calls > 0


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Any:
    with EmbeddingModel(tiny_model, device="cpu") as model:
        assert embed(model, TEXTS)[1] and embed(model, TEXTS)[1]  # The control: there is no cache.
        return model.embed_documents(TEXTS)


def open_model(tiny_model: Path, cache: Path, **options: Any) -> EmbeddingModel:
    return EmbeddingModel(tiny_model, device="cpu", cache=cache, **options)


def test_cache_hit_returns_the_same_bytes_without_computing(
    tiny_model: Path, tmp_path: Path
) -> None:
    with open_model(tiny_model, tmp_path / "c.sqlite") as first:
        stored = first.embed_documents(TEXTS)
    with open_model(tiny_model, tmp_path / "c.sqlite") as second:
        vectors, computed = embed(second, TEXTS)
        assert vectors.tobytes() == stored.tobytes()
        assert not computed
        counts: list[int] = []
        vectors = second.embed_documents([*TEXTS, "new"], on_progress=counts.append)
        assert sum(counts) == 6
        assert vectors[:5].tobytes() == stored.tobytes()
        again, computed = embed(second, ["new"])
        assert (again.tobytes(), computed) == (vectors[5:].tobytes(), False)


def test_cache_distinguishes_prompts_dtypes_and_models(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    with open_model(folder, tmp_path / "c") as model:
        for text, kind in (("x", "documents"), ("x", "queries"), ("y", "documents")):
            assert embed(model, [text], kind)[1]
            assert not embed(model, [text], kind)[1]
        assert not embed(model, ["x"])[1]
    with open_model(folder, tmp_path / "c", dtype="bfloat16") as model:
        assert embed(model, ["x"])[1]
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    with open_model(folder, tmp_path / "c") as model:
        assert embed(model, ["x"])[1]


def test_damaged_vector_is_not_returned(tiny_model: Path, tmp_path: Path, expected: Any) -> None:
    """It is stored again."""
    with open_model(tiny_model, tmp_path / "c") as model:
        model.embed_documents(TEXTS)
    content = bytearray((tmp_path / "c").read_bytes())
    content[content.index(expected[2].tobytes()) + 7] ^= 1
    (tmp_path / "c").write_bytes(content)
    with open_model(tiny_model, tmp_path / "c") as model:
        for is_damaged in (True, False):
            vectors, computed = embed(model, TEXTS)
            assert np.abs(vectors - expected).max() < 1e-6
            assert computed == is_damaged


@pytest.mark.parametrize("is_database", [False, True])
def test_unusable_file_is_left_alone(
    tiny_model: Path, tmp_path: Path, expected: Any, is_database: bool, caplog: Any
) -> None:
    """Texts are embedded, and one warning is logged."""
    path = tmp_path / "c"
    if is_database:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE bookmarks (key BLOB, used INTEGER)")
    else:
        path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING, "rag_demo"), open_model(tiny_model, path) as model:
        for _ in range(3):
            assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-6
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_forked_child_and_parent_share_the_cache(tmp_path: Path) -> None:
    """Also the vectors that the child stores after its parent has closed the file stay."""
    program = """
    import os, sys, warnings
    import numpy as np
    from rag_demo.encoding.embedding_cache import EmbeddingCache
    from pathlib import Path
    warnings.simplefilter("ignore")  # Python 3.12 warns of every fork beside threads.
    cache, keys = EmbeddingCache(Path(sys.argv[1])), [bytes([n] * 16) for n in range(12)]
    vectors = np.eye(12, dtype=np.float32)
    cache.put(keys[:4], vectors[:4])
    (read, written), (ended, ending) = os.pipe(), os.pipe()
    if os.fork() == 0:
        assert len(cache.get(keys, 12)) == 4
        os.write(written, b"x")
        os.read(ended, 1)
        cache.put(keys[4:], vectors[4:])
        os._exit(len(cache.get(keys, 12)))
    os.read(read, 1)
    cache.close()
    os.write(ending, b"x")
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 12
    assert len(cache.get(keys, 12)) == 12
    cache.close()
    """
    assert_clean(run_forked(program, str(tmp_path / "c"), quick_end=True))
