"""What must hold of a saved index, whatever happens to the save or to its files.

On a full disk the folder holds the old index or the new one, and all of it. A folder with damaged
files gives the right answers or one error that names it. `tests/rag_demo/contract.py` kills saves,
`test_ingest.py` ends and interrupts ingestions. DURABILITY_RUNS makes these tests longer.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from rag_demo import RagDemoError
from tests.support.full_disk import files_of_at_most
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, are_nearest

pytestmark = pytest.mark.slow

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


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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
                assert contents_of(fresh.parent) == {}
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
    kind = chance.randrange(7)
    if kind == 0 and data:
        data[place % len(data)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 3:
        data[place : place + 8] = (2 ** chance.randrange(64)).to_bytes(8, "little")
    elif kind == 4:
        data[place : place + 4] = str(chance.choice([-1, 2**63, 10**30, 1e308])).encode()
    elif kind == 5:
        data[place : place + 200] = chance.choice([b"[", b'{"a":', b'"', b"\\u0000"]) * 3000
    else:
        half = place // 2
        data[half:place], data[:half] = data[:half], data[half:place]
    return bytes(data)


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
