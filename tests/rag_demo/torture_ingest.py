"""Interrupt ingestions, at any line and at any moment: what must hold after each.

``make torture-save`` runs both at length; the tests run them for a short time.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import rag_demo
from rag_demo.documents.document import Document
from rag_demo.documents.rows import texts_to_embed
from rag_demo.index import read_index
from rag_demo.ingest import ingest
from rag_demo.storage.manifest import is_ours

OURS = str(Path(rag_demo.__file__).parent)
COUNT = 18
# Where a line more or less decides: half of the interruptions fall into these.
DECISIVE = (
    *("take", "_write", "save", "_take_all", "save_files", "replace_index"),
    *("replace_manifest", "remove_others", "remove_unfinished"),
)


class Model:
    """Every text has a vector of its own; each call takes a moment."""

    name = "torture"
    dimension = 16

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    def embed_documents(self, texts: Any) -> Any:
        time.sleep(self._pause_s)
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Any:
        vector = np.random.default_rng(list(text.encode())).standard_normal(16)
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def documents(round: int) -> Iterator[Document]:
    """Some change from round to round; every seventh is long."""
    for n in range(COUNT):
        text = f"document {n} of round {round if n % 3 else 0}. "
        yield Document(str(n), text * (60 if n % 7 == 0 else 1), {"n": n})


@contextlib.contextmanager
def small_steps() -> Iterator[None]:
    """Batches of four documents, parts of three texts."""
    with mock.patch("rag_demo.ingest.BATCH", 4), mock.patch("rag_demo.index_builder._AT_ONCE", 3):
        yield


def run(folder: Path, round: int, pause_s: float = 0.0) -> bool:
    with small_steps():
        return ingest(documents(round), Model(pause_s), folder, checkpoint_s=0).finished


def check(folder: Path, *, rounds: tuple[int, ...], complete: bool) -> int:
    """Look at everything that an interrupted run has left; return how many documents there are."""
    left = [path.name for path in folder.iterdir()] if folder.exists() else []
    assert all(map(is_ours, left)), left
    assert not [name for name in left if name.startswith("texts-spool")], left
    if "manifest.json" not in left:
        assert not complete, "the index that was there before is gone"
        return 0
    index = read_index(folder)
    index.check_vectors()
    found = list(index.documents.stream())
    times = Counter(document.id for document in found)
    assert not times or max(times.values()) == 1, f"twice: {times.most_common(3)}"
    assert not complete or len(found) == COUNT, f"{len(found)} of {COUNT} documents"
    known = {each for round in rounds for each in map(repr, documents(round))}
    assert all(repr(document) in known for document in found)
    for number, document in enumerate(found):
        rows = index.rows.rows_of(np.asarray([number]))
        texts, _ = texts_to_embed([(document.text, document.metadata)])
        expected = Model().embed_documents(texts)
        assert np.allclose(index.vectors[rows], expected, atol=1e-6), "another text's vectors"
    return len(found)


def interrupted(
    work: Callable[[], object], line: int | None = None, within: tuple[str, ...] = ()
) -> int:
    """Run with a Ctrl-C before a line of this package; return how many lines there were.

    Args:
        work: What is run.
        line: Which one, in the order in which they are run; None for none.
        within: Count only lines of functions of these names; of all if there is none.
    """
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and (not within or frame.f_code.co_name in within):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def torture_lines(
    runs: int, seed: int = 0, withins: tuple[tuple[str, ...], ...] = ((), DECISIVE)
) -> dict[str, Any]:
    """Interrupt a run at lines that chance chooses, on an empty folder and on an index."""
    chance = random.Random(seed)
    states: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name:
        empty, there = Path(name, "empty"), Path(name, "there")
        run(there, 0)
        totals = {}
        for within in withins:
            for before in (empty, there):
                folder = Path(name, f"count-{len(totals)}")
                if before.exists():
                    shutil.copytree(before, folder)
                totals[within, before] = interrupted(lambda: run(folder, 1), None, within)
        for number in range(runs):
            (within, before), total = list(totals.items())[number % len(totals)]
            folder, complete = Path(name, str(number)), before is there
            if complete:
                shutil.copytree(there, folder)
            interrupted(lambda: run(folder, 1), chance.randrange(1, total), within)
            states[check(folder, rounds=(0, 1), complete=complete)] += 1
            assert run(folder, 1)
            assert check(folder, rounds=(1,), complete=True) == COUNT
            assert len(list(folder.iterdir())) == 6  # what is kept is one of them
    return {"runs": runs, "lines": sum(totals.values()), "different_states": len(states)}


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from torture_ingest import run
print("ready", flush=True)
print(run(Path(sys.argv[1]), int(sys.argv[2]), 0.001), flush=True)
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def torture_signals(runs: int, seed: int = 0) -> dict[str, Any]:
    """Interrupt programs: by Ctrl-C, SIGTERM and SIGKILL, some by two of them."""
    chance = random.Random(seed)
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "index")
        started_s = time.perf_counter()
        run(folder, 0, 0.001)
        takes_s = time.perf_counter() - started_s
        for number in range(1, runs + 1):
            program = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROGRAM,
                    str(folder),
                    str(number),
                    str(Path(__file__).parent),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert program.stdout is not None
            program.stdout.readline()
            for _ in range(chance.choice((1, 1, 2))):
                time.sleep(chance.uniform(0, 1.2 * takes_s))
                kind = chance.choice(SIGNALS)
                program.send_signal(kind)
            _, error = program.communicate(timeout=60)
            assert "Error" not in error, error
            ended[f"{program.returncode}"] += 1
            check(folder, rounds=tuple(range(number + 1)), complete=True)
        assert run(folder, runs)
        assert check(folder, rounds=(runs,), complete=True) == COUNT
        assert len(list(folder.iterdir())) == 6  # what is kept is one of them
    return {"runs": runs, "exit_codes": dict(ended)}


if __name__ == "__main__":
    count = int(sys.argv[1])
    result = {"lines": torture_lines(3 * count), "signals": torture_signals(count)}
    print(result)
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from results_file import write

    write("torture_ingest", result)
