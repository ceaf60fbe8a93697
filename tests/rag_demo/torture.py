"""Kill saves at random moments, and mutate the files of an index: what must never happen.

``make torture-save`` and ``make fuzz-index`` run them at length; the tests run both for a
short time.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.errors import IndexFileError
from rag_demo.index import read_index, write_index
from rag_demo.storage.checked_file import BLOCK_BYTES

WRITER = """
import sys, pathlib, numpy as np
sys.path.insert(0, sys.argv[2])
from torture import make
from rag_demo.index import write_index
print("ready", flush=True)
number = 0
while True:
    number += 1
    write_index(pathlib.Path(sys.argv[1]), *make(number))
    print("saved", flush=True)
"""


def make(number: int, count: int = 2000) -> tuple[str, np.ndarray, list[Document]]:
    """An index in which everything tells which save it belongs to."""
    vectors = np.zeros((count, 64), np.float32)
    vectors[:, number % 64] = 1
    return (
        "m",
        vectors,
        [Document(str(row), f"save {number}", {"n": number}) for row in range(count)],
    )


def check_whole(folder: Path) -> int:
    """Open an index; return the number of the save that all of it belongs to."""
    index = read_index(folder)
    numbers = {document.metadata["n"] for document in index.documents}
    assert len(numbers) == 1, numbers
    (number,) = numbers
    assert np.array_equal(index.vectors, make(number)[1]), "a mixture of two saves"
    return int(number)


def torture_save(kills: int, seed: int = 0) -> dict[str, float]:
    """Kill a process that saves again and again; after each kill the index has to be whole.

    It is killed within one of its first saves, at a moment in proportion to what a save takes
    on this machine.
    """
    chance = random.Random(seed)
    saves, seen = 0, set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "index")
        started = time.perf_counter()
        write_index(folder, *make(0))
        save_s = time.perf_counter() - started
        for _ in range(kills):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)],
                stdout=subprocess.PIPE,
            )
            assert writer.stdout is not None
            for _ in range(1 + chance.randrange(6)):
                writer.stdout.readline()
            time.sleep(chance.uniform(0, save_s))
            writer.kill()
            writer.wait()
            writer.stdout.close()
            number = check_whole(folder)
            seen.add(number)
            saves += number
        write_index(folder, *make(1))  # What the killed ones left behind is no obstacle, and goes.
        assert len(list(folder.iterdir())) == 5
    return {"kills": kills, "saves_survived": saves, "different_states": len(seen)}


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change a file as strangers, disks and transfers do."""
    data = bytearray(content)
    kind = chance.randrange(7)
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
    else:
        half = place // 2
        data[half:place], data[:half] = data[:half], data[half:place]
    return bytes(data)


def fuzz_index(count: int, seed: int = 0) -> dict[str, float]:
    """Mutate files and repair the checksums of half of them, as somebody who means harm would."""
    import resource

    from rag_demo.storage.manifest import digest

    chance = random.Random(seed)
    refused = unchanged = 0
    with tempfile.TemporaryDirectory() as name:
        original, folder = Path(name, "original"), Path(name, "index")
        derived = {"codes": np.arange(640, dtype=np.int8), "scales": np.ones((5, 4), np.float32)}
        write_index(original, *make(3, count=40), derived=derived)
        files = {p.name: p.read_bytes() for p in original.iterdir() if p.name != "lock"}
        folder.mkdir()
        for path, content in files.items():
            (folder / path).write_bytes(content)
        largest = sum(map(len, files.values()))
        before = 0
        for number in range(count):
            if number == min(200, count // 2):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            victim = chance.choice(sorted(files))
            mutated = mutate(files[victim], chance)
            (folder / victim).write_bytes(mutated)
            also = ()
            if chance.random() < 0.5:
                also = _repair(folder, victim, files, digest)
            largest = max(largest, len(mutated))
            try:
                index = read_index(folder)
                index.check_vectors()
                documents = list(index.documents)
                assert len(documents) == len(index.vectors)
                assert all(np.asarray(array).size < 1e6 for array in index.derived.values())
                unchanged += 1
            except IndexFileError as error:
                assert str(folder) in str(error), error
                refused += 1
            for path in (victim, *also):
                (folder / path).write_bytes(files[path])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1.5 * largest + 50e6, f"{grown} bytes more for files of {largest}"
    return {"files": count, "refused": refused, "accepted": unchanged, "grown_bytes": grown}


def _repair(folder: Path, victim: str, files: dict[str, bytes], digest: object) -> tuple[str, ...]:
    """Make sizes and checksums fit the mutated file, so that its content is looked at."""
    import hashlib
    import json

    from safetensors.numpy import load, save

    part = victim.partition("-")[0]
    manifest = json.loads(files["manifest.json"])
    if part == "manifest.json":
        try:
            manifest = json.loads((folder / victim).read_text())
            manifest.pop("sha256", None)
            manifest["sha256"] = digest(manifest)  # type: ignore[operator]
            (folder / victim).write_text(json.dumps(manifest))
        except (ValueError, AttributeError, RecursionError, TypeError):
            pass  # No JSON any more: there is nothing to repair.
        return ()
    changed = ["manifest.json"]
    manifest["files"][part]["bytes"] = (folder / victim).stat().st_size
    checks = next(name for name in files if name.startswith("checks-"))
    if part != "checks":
        arrays = load(files[checks])
        arrays[part] = _checksums(folder / victim)
        (folder / checks).write_bytes(save(arrays))
        manifest["files"]["checks"]["bytes"] = (folder / checks).stat().st_size
        changed.append(checks)
    manifest["checks_sha256"] = hashlib.sha256((folder / checks).read_bytes()).hexdigest()
    manifest.pop("sha256")
    manifest["sha256"] = digest(manifest)  # type: ignore[operator]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return tuple(changed)


def _checksums(path: Path) -> np.ndarray:
    content = path.read_bytes()
    blocks = range(0, len(content), BLOCK_BYTES)
    return np.asarray([zlib.crc32(content[at : at + BLOCK_BYTES]) for at in blocks], np.uint32)


if __name__ == "__main__":
    what, count = sys.argv[1], int(sys.argv[2])
    started = time.perf_counter()
    result = {"save": torture_save, "fuzz": fuzz_index}[what](count, seed=int(time.time()))
    result["seconds"] = round(time.perf_counter() - started, 1)
    print(result)
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(benchmarks))
    from results_file import write

    write(f"torture_{what}", result)
