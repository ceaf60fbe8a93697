"""What must hold of a saved index, whatever happens to the save or to its files.

After a kill or on a full disk the folder holds the old index or the new one, and all of it. A
folder with damaged files gives the right answers or one error that names it.

CONTRIBUTING.md says how to run this at length; the tests do it for a short time.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rag_demo import RagDemoError
from tests.rag_demo.contract import check_killed_writer_leaves_a_whole_state
from tests.rag_demo.test_contract import LocalPlace
from tests.support.full_disk import files_of_at_most
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, are_nearest

PROBES = [f"probe {number}" for number in range(4)]


def save(folder: Path, number: int, count: int) -> None:
    """Save documents in which everything names that save."""
    with OnCpu(Hashed()) as retriever:
        documents = documents_of(number, count)
        metadata = [{"save": number, "row": row} for row in range(count)]
        retriever.add(list(documents.values()), metadata, list(documents))
        retriever.save(folder)


def documents_of(number: int, count: int) -> dict[str, str]:
    return {f"id{row}": f"save{number} document {row}" for row in range(count)}


def check_whole(folder: Path, count: int) -> int:
    """Ask an index by vectors, words and filters; return the save that all of it belongs to."""
    with OnCpu(Hashed()) as retriever:
        assert retriever.load(folder) == count
        number = int(retriever.search("probe", 1, mode="dense")[0].metadata["save"])
        documents = documents_of(number, count)
        for probe, results in zip(
            PROBES, retriever.search_batch(PROBES, 2 * count, mode="dense"), strict=True
        ):
            assert {each.id: each.text for each in results} == documents
            assert all(each.metadata == {"save": number, "row": int(each.id[2:])}
                       for each in results)  # fmt: skip
            assert are_nearest(results, documents, probe, 2 * count), "wrong vectors"
        words = retriever.search(f"save{number}", top_k=2 * count, mode="bm25")
        assert {each.id for each in words} == set(documents), "wrong words"
        assert retriever.count({"save": number}) == count
        assert retriever.count({"save": number + 1}) == 0
    return number


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def check_size(folder: Path, clean: int) -> None:
    """Assert that what was left behind is gone; a format may keep some room for changes."""
    assert size_of(folder) < 5 * clean + 5_000_000


def torture_kills(kills: int) -> int:
    """Kill a process within its first saves, at moments that chance chooses, three at a time."""
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as name:
            check_killed_writer_leaves_a_whole_state(LocalPlace("default", Path(name, "index")))
    return 3 * kills


def torture_full_disk(attempts: int, seed: int = 0, count: int = 200) -> dict[str, float]:
    """Save where no file may grow beyond some size: one error, and the index as it was."""
    chance = random.Random(seed)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder, fresh = Path(name, "index"), Path(name, "fresh", "index")
        save(folder, 0, count)
        clean, number = size_of(folder), 0
        for _ in range(attempts):
            limit = max(64, int(clean ** chance.uniform(0.3, 1.2)))
            for target in (folder, fresh):
                try:
                    with files_of_at_most(limit):
                        save(target, number + 1, count)
                except RagDemoError as error:
                    assert str(target) in str(error), error
                    failed += 1
                    assert target == fresh or check_whole(folder, count) == number
                    assert files_of(fresh.parent) == []
                else:
                    assert check_whole(target, count) == number + 1
                    if target == folder:
                        number += 1
            shutil.rmtree(fresh.parent, ignore_errors=True)
        save(folder, 1, count)
        assert check_whole(folder, count) == 1
        check_size(folder, clean)
    return {"attempts": 2 * attempts, "failed": failed}


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change a file as strangers, disks and transfers do."""
    data = bytearray(content)
    kind = chance.randrange(8)
    place = chance.randrange(len(data) + 1)
    if kind == 0 and data:
        data[place % len(data)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 3:
        data[place : place + 8] = (2 ** chance.randrange(64)).to_bytes(8, "little")
    elif kind == 4:
        number = str(chance.choice([-1, 0, 2**31, 2**63, 10**30, 1e308]))
        data[place : place + 4] = number.encode()
    elif kind == 5:
        data[place : place + 200] = chance.choice([b"[", b'{"a":', b'"', b"\\u0000"]) * 3000
    elif kind == 6:
        data.clear()
    else:
        half = place // 2
        data[half:place], data[:half] = data[:half], data[half:place]
    return bytes(data)


def fuzz_index(damages: int, seed: int = 0, count: int = 40) -> dict[str, float]:
    """Change, exchange and delete files of an index, and ask it."""
    chance = random.Random(seed)
    refused = unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name, "index"), Path(name, "other")
        save(folder, 3, count)
        save(other, 4, count)
        files, others = files_of(folder), files_of(other)
        contents = {path: path.read_bytes() for path in files}
        assert check_whole(folder, count) == 3
        largest = sum(map(len, contents.values()))
        before = 0
        for number in range(damages):
            if number == min(200, damages // 2):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            victim = chance.choice(files)
            kind = chance.randrange(20)
            if kind == 0:
                victim.unlink()
            elif kind == 1:
                victim.write_bytes(contents[chance.choice(files)])
            elif kind == 2:  # A mixture of two saves.
                victim.write_bytes(chance.choice(others).read_bytes())
            else:
                victim.write_bytes(mutate(contents[victim], chance))
            try:
                assert check_whole(folder, count) == 3
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
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert unnoticed < damages / 20, f"{unnoticed} texts were changed unnoticed"
    assert grown < 1.5 * largest + 50e6, f"{grown} bytes more for files of {largest}"
    accepted = damages - refused
    return {"files": damages, "refused": refused, "accepted": accepted, "grown_bytes": grown}


def torture_save(runs: int, seed: int = 0) -> dict[str, Any]:
    return {
        "kills": torture_kills(runs // 3),
        "full_disks": torture_full_disk(runs, seed),
    }


if __name__ == "__main__":
    what, runs, seed = sys.argv[1], int(sys.argv[2]), int(time.time())
    started = time.perf_counter()
    torture = {"save": torture_save, "fuzz": fuzz_index}[what]
    print(f"seed: {seed}", flush=True)
    result: dict[str, Any] = {"seed": seed, **torture(runs, seed)}
    result["seconds"] = round(time.perf_counter() - started, 1)
    print(result)
    from benchmarks.results_file import write

    write(f"torture_{what}", result)
