"""Damage and full disks: an index is whole, or one error names it, and its source repairs it.

`tests/rag_demo/contract.py` kills saves, `test_ingest.py` ends and interrupts ingestions.
DURABILITY_RUNS makes the tests with many files longer.
"""

import contextlib
import os
import random
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import RagDemoError
from tests.support.rag_command import fail, info, succeed, write_lines
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, are_nearest

TEXTS = 40


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def change(folder: Path, statement: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(folder / "rag-demo-1.sqlite")) as database, database:
        database.execute(statement, values)


def change_text(folder: Path) -> None:
    """The damaged text has a word of SQLite's message about writers."""
    path = folder / "rag-demo-1.sqlite"
    flip(path, path.read_bytes().index("dépôt".encode()) + 1)


def change_owner(folder: Path) -> None:
    owners = np.arange(TEXTS)
    owners[3] = 1 << 33
    change(folder, "UPDATE pieces SET owners = ?", owners.tobytes())


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a vector": (lambda folder: flip(folder / "vectors-1.f32", 100), "checksum of row 0 is wrong"),
    "no vectors": (lambda folder: (folder / "vectors-1.f32").unlink(), "vectors-1.f32' is damaged"),
    "a text": (change_text, "cannot be read|decode"),
    "an owner": (change_owner, "pieces do not match"),
    "an empty database": (lambda folder: (folder / "rag-demo-1.sqlite").write_bytes(b""), "empty"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    records = [{"id": str(n), "text": f"text {n} of the dépôt"} for n in range(TEXTS)]
    return write_lines(tmp_path / "s.jsonl", records)


@pytest.fixture
def folder(source: Path, tiny_model: Path, tmp_path: Path) -> Path:
    succeed("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    return tmp_path / "i"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_only_its_source_repairs_it(
    source: Path, folder: Path, tiny_model: Path, tmp_path: Path, damage: str
) -> None:
    """Neither `add` nor another source replaces the index without --yes."""
    spoil, reason = DAMAGES[damage]
    spoil(folder)
    before = {path.name for path in folder.iterdir()}
    more = write_lines(tmp_path / "more.jsonl", [{"id": "more", "text": "one more"}])
    options = ("--out", folder, "--model", tiny_model)
    for command in (("verify", folder), ("add", folder, more), ("index", more, *options)):
        said = fail(*command)
        assert "is damaged" in said
        assert any(part in said for part in reason.split("|")), said
    assert {path.name for path in folder.iterdir()} == before
    succeed("index", source, *options, *["--yes"] * (damage == "an empty database"))
    assert "is whole" in succeed("verify", folder)
    assert info(folder)["texts"] == TEXTS


@pytest.mark.parametrize("damage", ["an owner", "an empty database"])
def test_save_of_a_program_replaces_damage_only_with_overwrite(tmp_path: Path, damage: str) -> None:
    with OnCpu(Hashed()) as retriever, OnCpu(Hashed()) as other:
        for each in (retriever, other):
            each.add(list(map(str, range(TEXTS))))
        retriever.save(tmp_path / "i")
        DAMAGES[damage][0](tmp_path / "i")
        with pytest.raises(RagDemoError, match="damaged"):
            other.save(tmp_path / "i")
        other.save(tmp_path / "i", overwrite=True)
    assert "is whole" in succeed("verify", tmp_path / "i")


@pytest.mark.parametrize("more", [[], ["more"]], ids=["unchanged", "changed"])
def test_overwrite_replaces_a_damaged_index_that_the_retriever_knows(
    tmp_path: Path, more: list[str]
) -> None:
    folder = tmp_path / "i"
    with OnCpu(Hashed()) as retriever:
        retriever.add(list(map(str, range(TEXTS))))
        retriever.save(folder)
        flip(folder / "vectors-1.f32", 100)
        retriever.add(more)
        retriever.save(folder, overwrite=True)
    assert "is whole" in succeed("verify", folder)
    assert info(folder)["texts"] == TEXTS + len(more)


def test_change_does_not_hide_damaged_vectors(tmp_path: Path) -> None:
    folder, names = tmp_path / "i", list(map(str, range(100)))
    with OnCpu(Hashed()) as retriever:
        retriever.add(names, ids=names)
        retriever.save(folder)
        flip(folder / "vectors-1.f32", 35 * 32)
        retriever.add(["more"])
        retriever.save(folder)
    assert "vectors-1.f32' is damaged" in fail("verify", folder)
    (folder / "vectors-1.f32").unlink()
    succeed("delete", folder, *names[:40])
    assert "vectors-1.f32' is damaged" in fail("verify", folder)


def test_missing_folder_of_words_is_made_again(folder: Path, tmp_path: Path) -> None:
    (words,) = folder.glob("words-*")
    shutil.rmtree(words)
    assert "text 7" in succeed("search", folder, "7", "--mode", "bm25")
    damage = fail("verify", folder)
    assert "it is missing" in damage and "the next rag-demo add" in damage
    assert "--yes" not in damage  # That would lose texts.
    succeed("add", folder, write_lines(tmp_path / "c.jsonl", [{"text": "more"}]))
    succeed("verify", folder)
    assert info(folder)["texts"] == TEXTS + 1


COUNT = 40
PROBES = [f"probe {number}" for number in range(4)]


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
        for probe in PROBES:
            results = retriever.search(probe, 2 * COUNT, mode="dense")
            assert {each.id: each.text for each in results} == documents
            assert {each.id: each.metadata for each in results} == {
                f"id{row}": {"save": number, "row": row} for row in range(COUNT)
            }
            assert are_nearest(results, documents, probe, 2 * COUNT), "wrong vectors"
        words = retriever.search(f"save{number}", 2 * COUNT, mode="bm25")
        assert {each.id for each in words} == set(documents), "wrong words"
        assert retriever.count({"save": number}) == COUNT
        assert retriever.count({"save": number + 1}) == 0
    return number


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let every write beyond this size of a file fail, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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
                with files_of_at_most(limit):
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
    data = bytearray(content)
    place = chance.randrange(len(data) + 1)
    kind = chance.randrange(6)
    if kind == 0 and data:
        data[place % len(data)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 3:
        data[place : place + 8] = (2 ** chance.randrange(64)).to_bytes(8, "little")
    elif kind == 4:
        data[place : place + 200] = chance.choice([b"[", b'{"a":', b'"', b"\\u0000"]) * 3000
    else:
        half = place // 2
        data[half:place], data[:half] = data[:half], data[half:place]
    return bytes(data)


@pytest.mark.slow
def test_damaged_index_is_refused_or_right(tmp_path: Path) -> None:
    """Files are changed, exchanged, mixed with those of another save, and deleted."""
    chance, refused, unnoticed = random.Random(0), 0, 0
    folder, other = tmp_path / "index", tmp_path / "other"
    save(folder, 3)
    save(other, 4)
    contents, others = contents_of(folder), list(contents_of(other).values())
    for _ in range(runs(300)):
        victim, kind = chance.choice(list(contents)), chance.randrange(20)
        if kind == 0:
            victim.unlink()
        elif kind < 3:
            victim.write_bytes(chance.choice([*contents.values()] if kind == 1 else others))
        else:
            victim.write_bytes(mutate(contents[victim], chance))
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
