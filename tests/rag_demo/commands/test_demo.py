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
    files = [f"--include={name}" for name in (*KNOWN.values(), "limits.md")]
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
def test_demo_answers_from_a_folder_and_releases_its_model() -> None:
    docs, question = ROOT / "docs", "how is a model released in celery?"
    command = ("demo", str(docs), question, "--top-k", "3")
    result = run("from rag_demo.cli import main; main()", *command)
    assert_clean(result)
    assert f"passages of {docs}" in result.stdout and question in result.stdout
    assert "frameworks.md" in result.stdout
    (freed,) = re.findall(r"released: freed ([\d.]+) MB on host in .* ms; resident ", result.stdout)
    assert float(freed) > 80, str(result)


def test_demo_reads_the_folder_that_it_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'.' has no Markdown files" in fail("demo")
