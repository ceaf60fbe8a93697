"""The whole path on real text: index, search, release everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rag_demo import EmbeddingModel, FaissRetriever, PyTorchGPURetriever
from tests.support.programs import ROOT, assert_clean, run
from tests.support.rag_command import fail, info, succeed
from torch_utils import SafePyTorchCleanup

KNOWN = {
    "how are questions about documents answered by vectors and full text?": "retrieval.md",
    "files of a saved index and their checksums": "storage.md",
    "which models does a pool evict to stay within its budget?": "hosting.md",
}


def test_known_answers_are_found_and_memory_is_released(tmp_path: Path) -> None:
    files = [f"--include={name}" for name in (*KNOWN.values(), "faq.md", "memory.md")]
    succeed("index", ROOT / "docs", *files, "--out", tmp_path / "index")
    assert info(tmp_path / "index")["texts"] > 50
    with SafePyTorchCleanup() as scope:
        model = scope.manage(EmbeddingModel())
        for kind in (PyTorchGPURetriever, FaissRetriever):
            retriever = scope.manage(kind(model))
            retriever.load(tmp_path / "index")
            for question, answer in KNOWN.items():
                found = retriever.search(question, top_k=3)
                names = [Path(each.metadata["path"]).name for each in found]
                assert answer in names, (question, names)
    report = scope.report
    assert report is not None
    assert report.freed_bytes["host"] > 80_000_000, report
    assert not report.still_held, report
    assert not report.errors, report


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
def test_demo_compares_ways_to_release_memory() -> None:
    docs, question = ROOT / "docs" / "howto", "how is a model released in celery?"
    command = ("demo", str(docs), question, "--top-k", "3")
    result = run("from rag_demo.cli import main; main()", *command)
    assert_clean(result)
    assert f"passages of {docs}" in result.stdout and question in result.stdout
    assert "celery.md" in result.stdout
    assert "\\n" not in result.stdout, str(result)
    assert re.search(r"released: freed [\d.]+ MB on host in .* ms; resident ", result.stdout), str(
        result
    )
    lines = [line for line in result.stdout.splitlines() if line.count(" MB") > 1]
    rows = [[float(number) for number in re.findall(r"([\d.]+) MB", line)] for line in lines]
    assert len(rows) > 2, str(result)
    # Each took what the weights take, and more; the scope gave back at least the weights.
    assert all(taken > 90 for taken, *_ in rows), str(result)
    (scope,) = (line for line in lines if " with SafePyTorchCleanup() " in line)
    assert float(re.findall(r"([\d.]+) MB", scope)[1]) > 90, scope


def test_demo_reads_the_folder_that_it_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'.' has no Markdown files" in fail("demo")
