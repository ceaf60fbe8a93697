"""Damage is named, loses nothing, and the source of the index repairs it."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import RagDemoError
from tests.support.rag_command import fail, info, succeed, write_lines
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed

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
    "names of other files": (
        lambda folder: change(
            folder, "UPDATE manifest SET value = json_set(value, '$.file_number', 3)"
        ),
        "its manifest names files 3",
    ),
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
    has_no_source = damage in ("an empty database", "names of other files")
    succeed("index", source, *options, *["--yes"] * has_no_source)
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


def test_change_does_not_hide_or_recreate_damaged_vectors(tmp_path: Path) -> None:
    folder, names = tmp_path / "i", list(map(str, range(100)))
    with OnCpu(Hashed()) as retriever:
        retriever.add(names, ids=names)
        retriever.save(folder)
        flip(folder / "vectors-1.f32", 35 * 32)
        retriever.add(["more"])
        retriever.save(folder)
    assert "vectors-1.f32' is damaged" in fail("verify", folder)
    (folder / "vectors-1.f32").unlink()
    assert "vectors-1.f32' is damaged" in fail("delete", folder, *names[:40])


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
