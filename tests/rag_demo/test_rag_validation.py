"""The whole path on real text: index, ask, find the known answer, give everything back."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import ROOT, assert_clean, run, run_forked
from rag_demo import EmbeddingModel, FaissRetriever, PyTorchGPURetriever
from rag_demo.corpus import Skipped, read_source
from rag_demo.documents.document import Document
from rag_demo.give_back import WAYS
from torch_utils import SafePyTorchCleanup

KNOWN = {
    "how do I give cached GPU memory back?": "torch.cuda.memory.empty_cache",
    "how much memory is reserved on the device?": "torch.cuda.memory.memory_reserved",
    "wait until all kernels on the device have finished": "torch.cuda.synchronize",
}


def documents() -> list[Document]:
    return list(read_source("torch.cuda", Skipped()))


def main(*kinds: Any) -> None:
    """Ask retrievers questions whose answers are known, then release everything."""
    with SafePyTorchCleanup() as scope:
        model = scope.manage(EmbeddingModel())
        texts = documents()
        assert len(texts) > 100, len(texts)
        for kind in kinds:
            retriever = scope.manage(kind(model))
            retriever.add([d.text for d in texts], [d.metadata for d in texts])
            for question, answer in KNOWN.items():
                titles = [r.metadata["title"] for r in retriever.search(question, top_k=3)]
                assert answer in titles, (question, titles)
    report = scope.report
    assert report is not None
    assert report.freed_bytes["host"] > 80_000_000, report
    assert not report.still_held, report
    assert not report.errors, report


def test_known_answers_are_found() -> None:
    """Here, in the interpreter of the tests."""
    main(PyTorchGPURetriever)


@pytest.mark.slow
def test_as_a_program() -> None:
    """This file, run by itself, leaves with exit code 0 and says nothing on stderr."""
    assert_clean(run_forked(Path(__file__)))


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
def test_demo() -> None:
    """The demo answers its questions, reports what came back, and leaves cleanly."""
    result = run("from rag_demo.cli import main; main()", "demo", "--top-k", "3")
    assert_clean(result)
    assert "torch.cuda.memory.empty_cache" in result.stdout
    assert "\\n" not in result.stdout, str(result)
    assert re.search(r"released in \d+ ms: .* [\d.]+ MB given back", result.stdout), str(result)
    rows = {
        way: [float(number) for number in re.findall(r"([\d.]+) MB", line)]
        for line in result.stdout.splitlines()
        for way in WAYS
        if f" {way} " in line
    }
    assert set(rows) == set(WAYS), str(result)
    # Each took what the weights take, and more; the scope gave back at least the weights.
    assert all(taken > 90 for taken, *_ in rows.values()), rows
    assert rows["with SafePyTorchCleanup()"][1] > 90, rows


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(PyTorchGPURetriever, FaissRetriever)
