"""Damage and full disks: an index is whole, or one error names it, and its source repairs it.

`tests/rag_demo/contract.py` kills saves, `test_ingest.py` ends and interrupts ingestions.
DURABILITY_RUNS makes the tests with many files longer.
"""

import contextlib
import os
import random
import re
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import RagDemoError
from tests.support.rag_command import fail, info, rag_demo, succeed, write_lines
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, are_nearest

COUNT = 40


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def change_text(folder: Path) -> None:
    """The damaged text has a word of SQLite's message about writers."""
    path = only(folder, "*.sqlite")
    flip(path, path.read_bytes().index("dépôt".encode()) + 1)


def change_owner(folder: Path) -> None:
    owners = np.arange(COUNT)
    owners[3] = 1 << 33
    with contextlib.closing(sqlite3.connect(only(folder, "*.sqlite"))) as database, database:
        database.execute("UPDATE pieces SET owners = ?", [owners.tobytes()])


def empty_database(folder: Path) -> None:
    only(folder, "*.sqlite").write_bytes(b"")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: flip(only(folder, "vectors-*"), 100), "checksum of row 0 is wrong"),
    (lambda folder: only(folder, "vectors-*").unlink(), r"vectors-\d.f32' is damaged"),
    (change_text, "cannot be read|decode"),
    (change_owner, "pieces do not match"),
    (empty_database, "empty"),
]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    records = [{"id": str(n), "text": f"text {n} of the dépôt"} for n in range(COUNT)]
    source = write_lines(tmp_path / "s.jsonl", records)
    succeed("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    return tmp_path / "i"


def test_only_its_source_repairs_damage(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    """An error names it; neither `add` nor another source replaces the index without --yes."""
    more = write_lines(tmp_path / "more.jsonl", [{"id": "more", "text": "one more"}])
    options = ("--out", folder, "--model", tiny_model)
    for spoil, reason in DAMAGES:
        spoil(folder)
        before = {path.name for path in folder.iterdir()}
        for command in (("verify", folder), ("add", folder, more), ("index", more, *options)):
            message = fail(*command)
            assert "is damaged" in message and re.search(reason, message), message
        assert {path.name for path in folder.iterdir()} == before
        succeed("index", tmp_path / "s.jsonl", *options, *["--yes"] * (spoil is empty_database))
        assert "is whole" in succeed("verify", folder)
        assert info(folder)["texts"] == COUNT


@pytest.mark.parametrize("spoil", [change_owner, empty_database])
def test_only_overwrite_replaces_damage(tmp_path: Path, spoil: Any) -> None:
    with OnCpu(Hashed()) as retriever, OnCpu(Hashed()) as other:
        for each in (retriever, other):
            each.add(list(map(str, range(COUNT))))
        retriever.save(tmp_path / "i")
        spoil(tmp_path / "i")
        with pytest.raises(RagDemoError, match="damaged"):
            other.save(tmp_path / "i")
        other.save(tmp_path / "i", overwrite=True)
    assert "is whole" in succeed("verify", tmp_path / "i")


def test_change_does_not_hide_damaged_vectors(tmp_path: Path) -> None:
    """With overwrite, a retriever replaces them, whether it has changes or not."""
    folder, names = tmp_path / "i", list(map(str, range(100)))
    with OnCpu(Hashed()) as retriever:
        retriever.add(names, ids=names)
        retriever.save(folder)
        for more in (["more"], []):
            flip(only(folder, "vectors-*"), 35 * 32)
            retriever.add(more)
            retriever.save(folder)
            assert ".f32' is damaged" in fail("verify", folder)
            retriever.save(folder, overwrite=True)
            assert "is whole" in succeed("verify", folder)
    only(folder, "vectors-*").unlink()
    succeed("delete", folder, *names[:40])
    assert ".f32' is damaged" in fail("verify", folder)


def test_missing_folder_of_words_is_made_again(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(only(folder, "words-*"))
    assert "text 7" in succeed("search", folder, "7", "--mode", "bm25")
    message = fail("verify", folder)
    assert "it is missing" in message and "the next rag-demo add" in message
    assert "--yes" not in message  # That would lose texts.
    succeed("add", folder, write_lines(tmp_path / "c.jsonl", [{"text": "more"}]))
    succeed("verify", folder)
    assert info(folder)["texts"] == COUNT + 1


def runs(usual: int) -> int:
    return int(os.environ.get("DURABILITY_RUNS", usual))


def documents_of(number: int) -> dict[str, str]:
    return {f"id{row}": f"save{number} document {row}" for row in range(COUNT)}


def save(folder: Path, number: int) -> None:
    """Save documents in which everything names that save."""
    with OnCpu(Hashed()) as retriever:
        documents = documents_of(number)
        metadata = [{"save": number, "row": row} for row in range(COUNT)]
        retriever.add(list(documents.values()), metadata, list(documents))
        retriever.save(folder)


def check_whole(folder: Path) -> int:
    """Ask an index by vectors, words and filters; return the save that all of it belongs to."""
    with OnCpu(Hashed()) as retriever:
        assert retriever.load(folder) == COUNT
        number = int(retriever.search("probe", 1, mode="dense")[0].metadata["save"])
        documents = documents_of(number)
        for probe in ("probe 0", "probe 1", "probe 2"):
            results = retriever.search(probe, 2 * COUNT, mode="dense")
            assert {each.id: (each.text, each.metadata) for each in results} == {
                f"id{n}": (documents[f"id{n}"], {"save": number, "row": n}) for n in range(COUNT)
            }
            assert are_nearest(results, documents, probe, 2 * COUNT), "wrong vectors"
        words = retriever.search(f"save{number}", 2 * COUNT, mode="bm25")
        assert {each.id for each in words} == set(documents), "wrong words"
        assert retriever.count({"save": number}) == COUNT
        assert retriever.count({"save": number + 1}) == 0
    return number


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """Limit files, or their size, beyond which every write fails as on a full disk."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_unreadable_index_is_not_called_damaged(tmp_path: Path) -> None:
    """And no command replaces it."""
    save(tmp_path, 0)
    check_whole(tmp_path)  # Everything is imported.
    before = contents_of(tmp_path)
    with limited(resource.RLIMIT_NOFILE, 0):
        with pytest.raises(RagDemoError, match="Too many open files") as error:
            check_whole(tmp_path)
        assert rag_demo("index", __file__, "--out", tmp_path).returncode == 2
    assert "damaged" not in str(error.value)
    assert contents_of(tmp_path) == before


@pytest.mark.slow
def test_save_on_a_full_disk_leaves_the_old_index(tmp_path: Path) -> None:
    """A first save leaves no file."""
    chance, failed, number = random.Random(1795852282), 0, 0
    folder, fresh = tmp_path / "index", tmp_path / "fresh" / "index"
    save(folder, number)
    clean = sum(map(len, contents_of(folder).values()))
    for _ in range(runs(12)):
        limit = max(64, int(clean ** chance.uniform(0.3, 1.2)))
        for target in (folder, fresh):
            try:
                with limited(resource.RLIMIT_FSIZE, limit):
                    save(target, number + 1)
            except RagDemoError as error:
                assert str(target) in str(error), error
                failed += 1
                assert check_whole(folder) == number
                assert not contents_of(fresh)
            else:
                assert check_whole(target) == number + 1
                number += target == folder
        shutil.rmtree(fresh.parent, ignore_errors=True)
    assert 0 < failed < 2 * runs(12)
    save(folder, number + 1)
    assert sum(map(len, contents_of(folder).values())) < 5 * clean + 5_000_000


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change a file as strangers, disks and transfers do."""
    start = chance.randrange(len(content) + 1)
    number = (2 ** chance.randrange(64)).to_bytes(8, "little")
    new = chance.choice([b"", chance.randbytes(1), chance.randbytes(64), number, b"[" * 3000])
    rest = chance.choice([content[start:], content[start + max(1, len(new)) :], b""])
    return content[:start] + new + rest


@pytest.mark.slow
def test_damaged_index_is_refused_or_right(tmp_path: Path) -> None:
    """Files are changed, exchanged, mixed with those of another save, and deleted."""
    chance, refused, unnoticed = random.Random(0), 0, 0
    folder, other = tmp_path / "index", tmp_path / "other"
    save(folder, 3)
    save(other, 4)
    contents = contents_of(folder)
    others = [*contents.values(), *contents_of(other).values()]
    for _ in range(runs(300)):
        victim, kind = chance.choice(list(contents)), chance.randrange(20)
        if kind == 0:
            victim.unlink()
        else:
            mutated = mutate(contents[victim], chance)
            victim.write_bytes(chance.choice(others) if kind < 3 else mutated)
        try:
            assert check_whole(folder) == 3
        except RagDemoError as error:
            assert str(folder) in str(error), error
            refused += 1
        except AssertionError:
            # Vectors and words have checksums. Of databases, SQLite checks the structure.
            if not contents[victim].startswith(b"SQLite format 3"):
                raise
            unnoticed += 1
        shutil.rmtree(folder)
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    assert refused > runs(300) / 6
    assert unnoticed < runs(300) / 20, f"{unnoticed} texts were changed unnoticed"
