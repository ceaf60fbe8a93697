"""What must hold of an index that `rag-demo index` was making when something ended it.

The folder holds nothing, the old index, the new one, or a consistent part: each document once, the
old or the new text of it, and with the scores of that text. The same command goes on from there.

``make torture-save`` runs this at length, the tests for a short time.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from tests.rag_demo.durability.saves import check_size, size_of
from tests.support.interrupts import Place, interrupt_everywhere
from tests.support.programs import Result
from tests.support.rag_command import IMPORT_MAIN, info, rag_demo, succeed, write_lines
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import wait_for
from tests.support.zygotes import Zygotes

PROBES = ["how do i give memory back", "paris 5 7", "x"]
TOLERANCE = 5e-4  # Of scores: a call of many texts may be computed in another way.


class Source:
    """One source in two versions, and what a right index of each answers.

    Most texts differ between the versions, some are in one of them only, and some are long.
    """

    def __init__(self, folder: Path, model: Path, count: int) -> None:
        self.path, self.model, self.count = folder / "source.jsonl", model, count
        self.texts = [dict(self._texts(version)) for version in (0, 1)]
        self.both = set(self.texts[0]) & set(self.texts[1])
        with EmbeddingModel(model, device="cpu") as embedder:
            self.scores = [self._scores(embedder, texts) for texts in self.texts]
        changed = [n for n in self.both if self.texts[0][n] != self.texts[1][n]]
        near = [n for n in changed if np.allclose(*(s[n] for s in self.scores), atol=5 * TOLERANCE)]
        assert len(near) < len(changed) / 2, "another text's vectors would not be noticed"

    def _texts(self, version: int) -> Iterator[tuple[str, str]]:
        for n in range(self.count):
            if n % 50 != 10 + version:
                text = f"{n} paris {n % 97} heap {'trim cache' if version and n % 3 else 'city'}. "
                yield str(n), text * (60 if n % (self.count // 3) == 0 else 1)

    def _scores(self, embedder: EmbeddingModel, texts: dict[str, str]) -> dict[str, Any]:
        with PyTorchGPURetriever(embedder, device="cpu") as retriever:
            retriever.add(list(texts.values()), ids=list(texts), passages=True)
            return {name: scores for name, (_, scores) in ask(retriever).items()}

    def index(self, out: Path, version: int) -> Result:
        return rag_demo(*self.command(out, version))

    def command(self, out: Path, version: int) -> list[str | Path]:
        """Write a version of the source, and return the arguments of `rag-demo`."""
        write_lines(self.path, [{"id": n, "text": t} for n, t in self.texts[version].items()])
        options = ("--model", self.model, "--device", "cpu", "--no-cache")
        return ["index", self.path, "--out", out, *options]

    def check(self, folder: Path, *, there_before: bool) -> dict[str, int]:
        """Assert what must hold; return the version of each text that is there."""
        if not there_before and not folder.exists():
            return {}
        if rag_demo("info", folder).returncode == 2:
            assert not there_before, f"the index that was there is gone: {list(folder.iterdir())}"
            return {}
        succeed("verify", folder)
        with (
            EmbeddingModel(self.model, device="cpu") as embedder,
            PyTorchGPURetriever(embedder, device="cpu") as retriever,
        ):
            count = retriever.load(folder)
            found = ask(retriever) if count else {}
        assert len(found) == count == info(folder)["texts"], "a document stands twice"
        versions = {}
        for name, (text, scores) in found.items():
            fitting = [v for v in (0, 1) if self.texts[v].get(name) == text]
            assert fitting, f"{name!r} is of no version: {text!r}"
            expected = self.scores[fitting[0]][name]
            assert np.allclose(scores, expected, atol=TOLERANCE), f"{name!r} has others' vectors"
            versions[name] = fitting[0] if len(fitting) == 1 else 2
        assert not there_before or set(found) >= self.both, "documents are gone"
        return versions

    def finish(self, folder: Path, version: int) -> None:
        """Run the command once more, and check that the index is that of one version."""
        done = self.index(folder, version)
        assert (done.returncode, done.stderr) == (0, ""), str(done)
        assert info(folder)["finished"]
        versions = self.check(folder, there_before=True)
        assert set(versions) == set(self.texts[version])
        assert set(versions.values()) <= {version, 2}, Counter(versions.values())


def ask(retriever: PyTorchGPURetriever) -> dict[str, tuple[str, list[float]]]:
    """Return the text of each document, and its score for each probe."""
    found: dict[str, tuple[str, list[float]]] = {}
    for results in retriever.search_batch(PROBES, top_k=10 * len(retriever), mode="dense"):
        assert len(results) == len({each.id for each in results}) == len(retriever)
        for each in results:
            found.setdefault(each.id, (each.text, []))[1].append(each.score)
    return found


def torture_interrupts(at_most: int, model: Path, count: int = 18) -> dict[str, Any]:
    """Interrupt the command at each Nth instruction, in an empty folder and over an index."""
    states: dict[bool, set[Any]] = {False: set(), True: set()}
    places = 0
    with tempfile.TemporaryDirectory() as name:
        source, there = Source(Path(name), model, count), Path(name, "there")
        source.finish(there, 0)
        for there_before in (False, True):

            def check(place: Place, there_before: bool = there_before) -> None:
                folder = Path(name, "index")
                if there_before:
                    shutil.copytree(there, folder)
                place.run(lambda: source.index(folder, 1))
                versions = source.check(folder, there_before=there_before)
                states[there_before].add(tuple(sorted(Counter(versions.values()).items())))
                source.finish(folder, 1)
                shutil.rmtree(folder)

            places += interrupt_everywhere(
                check, package="rag_demo", minimum=at_most // 4, at_most=at_most // 2
            )
    return {"places": places, "fewest_states": min(map(len, states.values()))}


PROGRAM = f"""
{IMPORT_MAIN}
print("ready", flush=True)
main()
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CODES = {0, 130, 128 + signal.SIGTERM, *(-number for number in SIGNALS)}


def torture_signals(runs: int, model: Path, seed: int = 0, count: int = 4500) -> dict[str, Any]:
    """Interrupt programs by Ctrl-C, SIGTERM and SIGKILL, some by two of them.

    There are so many documents that a run saves parts of them.
    """
    chance = random.Random(seed)
    codes: Counter[int] = Counter()
    states = set()
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Zygotes()) as zygotes:
        source, folder = Source(Path(name), model, count), Path(name, "index")
        files = {stream: Path(name, stream) for stream in ("stdout", "stderr")}
        started_s = time.perf_counter()
        source.finish(folder, 0)
        takes_s, clean = time.perf_counter() - started_s, size_of(folder)
        for number in range(1, runs + 1):
            for file in files.values():
                file.write_text("")
            command = map(str, source.command(folder, number % 2))
            pid = zygotes.start(PROGRAM, *command, **files)
            wait_for(files["stdout"].read_text)
            for _ in range(chance.choice((1, 1, 2))):
                time.sleep(chance.uniform(0, takes_s))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, chance.choice(SIGNALS))
            code, said = zygotes.wait(), files["stderr"].read_text()
            assert code in CODES, (code, said)
            assert "Error" not in said, said
            codes[code] += 1
            versions = source.check(folder, there_before=True)
            states.add(tuple(sorted(Counter(versions.values()).items())))
        source.finish(folder, runs % 2)
        check_size(folder, clean)
    return {"runs": runs, "exit_codes": dict(codes), "different_states": len(states)}


if __name__ == "__main__":
    runs, seed = int(sys.argv[1]), int(time.time())
    print(f"seed: {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        tiny = write_tiny_model(Path(name))
        result: dict[str, Any] = {
            "seed": seed,
            "interrupts": torture_interrupts(3 * runs, tiny),
            "signals": torture_signals(runs, tiny, seed),
        }
    print(result)
    from benchmarks.results_file import write

    write("torture_ingest", result)
