"""Fixtures: a tiny sentence-transformers model with random weights, made on the spot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WORDS = "the a of how do i give memory back cache paris france capital heap trim city".split()


def write_tiny_model(folder: Path, *, dimension: int = 32) -> Path:
    """Write a BERT of 2 layers with a vocabulary of letters and a few words."""
    import string

    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    source = folder / "transformer"
    source.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*string.ascii_lowercase, *string.digits, *"?.,:'"]
    pieces = [*special, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=dimension,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * dimension,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(source)
    BertTokenizer(str(source / "vocab.txt")).save_pretrained(source)
    transformer = Transformer(str(source))
    model = SentenceTransformer(modules=[transformer, Pooling(dimension)], device="cpu")
    model.save(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the commands' embedding cache out of the user's folder, in subprocesses too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def _hazards(reporter: pytest.TerminalReporter) -> dict[tuple[str, str], list[bool]]:
    """Collect the outcomes of the hazard matrix, by subject and Python."""
    table: dict[tuple[str, str], list[bool]] = {}
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "hazard" and report.when == "call":
                    subject, version, fine = value
                    table.setdefault((subject, version), []).append(fine)
    return table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the hazard matrix."""
    table = _hazards(terminalreporter)
    if not table:
        return
    versions = sorted({version for _, version in table})
    others = ", ".join(v for v in versions if v[0].isdigit()) or "none was found"
    terminalreporter.section("hazard matrix")
    terminalreporter.line(f"other Pythons: {others}")
    for (subject, version), fine in sorted(table.items()):
        short = fine.count(False)
        verdict = f"{short} fall short" if short else "all fine"
        terminalreporter.line(f"{subject:12} {version:12} {len(fine):4} programs, {verdict}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if no naive destructor fell short: the matrix would then prove nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    naive = [fine for (s, _), fine in _hazards(reporter).items() if s.startswith("naive")]
    if sum(map(len, naive)) > 20 and not any(False in fine for fine in naive):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.line("hazard matrix: no naive destructor fell short; the control has failed")
