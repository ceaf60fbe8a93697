"""What must hold of an index that `rag-demo index` was making when something ended it.

The folder has the old index, the new one, or a consistent part: each document once, with the text
of one version of the source and with the vectors of that text. The same command goes on from there.

CONTRIBUTING.md says how to run this at length; a test does it for a short time.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo import EmbeddingModel
from tests.support.interrupts import Place, interrupt_everywhere
from tests.support.rag_command import IMPORT_MAIN, rag_demo, succeed, write_lines
from tests.support.retriever_kinds import OnCpu
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import wait_for
from tests.support.zygotes import Zygotes

PROBE = "paris 5 7"
TOLERANCE = 5e-4  # of scores: a call of many texts may be computed in another way


class Source:
    """A source in two versions. Most texts differ, and some are in one version only."""

    def __init__(self, folder: Path, model: Path, count: int) -> None:
        self.path, self.model = folder / "source.jsonl", model
        self.texts = [
            {
                str(n): f"{n} paris {n % 97} heap {'trim cache' if version and n % 3 else 'city'}."
                for n in range(count)
                if n % 50 != 10 + version
            }
            for version in (0, 1)
        ]

    def command(self, out: Path, version: int) -> list[str | Path]:
        """Write a version of the source, and return the arguments of `rag-demo`."""
        write_lines(self.path, [{"id": n, "text": t} for n, t in self.texts[version].items()])
        options = ("--out", out, "--model", self.model, "--device", "cpu", "--no-cache")
        return ["index", self.path, *options]

    def check(self, folder: Path) -> tuple[int, ...]:
        """Assert what must hold; return how many texts of each version there are, and of both."""
        succeed("verify", folder)
        with EmbeddingModel(self.model, device="cpu") as model, OnCpu(model) as retriever:
            count = retriever.load(folder)
            results = retriever.search(PROBE, 2 * count, mode="dense")
            vectors = model.embed_documents([each.text for each in results])
            expected = vectors @ model.embed_query(PROBE)
        found = {each.id: each.text for each in results}
        assert len(results) == len(found) == count, "a document stands twice"
        assert np.allclose([each.score for each in results], expected, atol=TOLERANCE)
        old, new = self.texts
        assert set(found) >= set(old) & set(new), "documents are gone"
        kinds = Counter((old.get(n) == text, new.get(n) == text) for n, text in found.items())
        assert not kinds[False, False], "a text is of no version"
        return kinds[True, False], kinds[False, True], kinds[True, True]

    def finish(self, folder: Path, version: int) -> None:
        """Run the command once more, and check that the index is that of one version."""
        assert rag_demo(*self.command(folder, version)).returncode == 0
        kinds = self.check(folder)
        assert kinds[1 - version] == 0 and sum(kinds) == len(self.texts[version])


def torture_interrupts(at_most: int, model: Path, count: int = 18) -> dict[str, Any]:
    """Interrupt the command at each Nth instruction while it changes an index."""
    states = set()
    with tempfile.TemporaryDirectory() as name:
        source, there, folder = Source(Path(name), model, count), Path(name, "a"), Path(name, "b")
        source.finish(there, 0)

        def check(place: Place) -> None:
            shutil.copytree(there, folder)
            place.run(lambda: rag_demo(*source.command(folder, 1)))
            states.add(source.check(folder))
            source.finish(folder, 1)
            shutil.rmtree(folder)

        places = interrupt_everywhere(
            check, package="rag_demo", minimum=at_most // 2, at_most=at_most
        )
    return {"runs": places, "different_states": len(states)}


PROGRAM = f"{IMPORT_MAIN}\nprint('ready', flush=True)\nmain()\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CODES = {0, 130, 128 + signal.SIGTERM, *(-number for number in SIGNALS)}


def torture_signals(runs: int, model: Path, seed: int = 0, count: int = 4500) -> dict[str, Any]:
    """Interrupt programs by Ctrl-C, SIGTERM and SIGKILL; each run saves several parts."""
    chance = random.Random(seed)
    codes: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Zygotes()) as zygotes:
        source, folder = Source(Path(name), model, count), Path(name, "index")
        files = {stream: Path(name, stream) for stream in ("stdout", "stderr")}
        started_s = time.perf_counter()
        source.finish(folder, 0)
        takes_s = time.perf_counter() - started_s
        for number in range(1, runs + 1):
            for file in files.values():
                file.write_text("")
            command = map(str, source.command(folder, number % 2))
            pid = zygotes.start(PROGRAM, *command, **files)
            wait_for(files["stdout"].read_text)
            time.sleep(chance.uniform(0, takes_s))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, chance.choice(SIGNALS))
            code, said = zygotes.wait(), files["stderr"].read_text()
            assert code in CODES and "Error" not in said, (code, said)
            codes[code] += 1
            source.check(folder)
        source.finish(folder, runs % 2)
    return {"runs": runs, "exit_codes": dict(codes)}


if __name__ == "__main__":
    runs, seed = int(sys.argv[1]), int(time.time())
    print(f"seed: {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        tiny = write_tiny_model(Path(name))
        result: dict[str, Any] = {
            "seed": seed,
            "lines": torture_interrupts(3 * runs, tiny),
            "signals": torture_signals(runs, tiny, seed),
        }
    print(result)
    from benchmarks.results_file import write

    write("torture_ingest", result)
