"""What the commands of `rag-demo` print and do."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel, FaissRetriever, PyTorchGPURetriever
from rag_demo.commands.evaluate import QUESTIONS
from tests.support.programs import ROOT, assert_clean, run
from tests.support.rag_command import (
    Terminal,
    documents,
    fail,
    info,
    rag_demo,
    search,
    succeed,
    texts,
    write_lines,
)
from tests.support.tiny_model import write_tiny_reranker
from torch_utils import SafePyTorchCleanup

TINY = ["--model"]


@pytest.fixture(scope="module", autouse=True)
def use_tiny_model(tiny_model: Path) -> None:
    TINY[1:] = [str(tiny_model)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "server.md").write_text(
        "# Server\n\nThe server is set up by a file that lies beside it.\n\n## Port\n\n8443\n\n"
        "## Host\n\nThe name of the host is read from the environment.\n"
    )
    (folder / "page.html").write_text("<body>\n<h1 id='top'>Cities</h1>\n<p>Paris, Rome, Oslo.</p>")
    records = [{"id": n, "text": f"record number {n}", "year": 2018 + n} for n in range(4)]
    write_lines(folder / "c.jsonl", records)
    return folder


@pytest.fixture
def index(source: Path, tmp_path: Path) -> Path:
    succeed("index", source, "--out", tmp_path / "index", *TINY)
    return tmp_path / "index"


def test_index_says_how_many_texts_there_are_and_what_was_skipped(
    source: Path, tmp_path: Path
) -> None:
    (source / "x.bin").write_bytes(b"\0")
    (source / "binary.txt").write_bytes(b"caf\x81 is not text, so it is skipped")
    command: tuple[str | Path, ...] = ("index", source, "--out", tmp_path / "i", *TINY)
    result = rag_demo(*command)
    assert result.stdout.startswith(f"indexed {len(texts(tmp_path / 'i'))} texts of ")
    assert result.stderr.startswith("rag-demo: skipped 2: ")
    assert "1 not UTF-8 text (binary.txt)" in result.stderr
    assert "1 of an unsupported type (x.bin)" in result.stderr
    assert "unchanged" not in result.stdout
    assert "unchanged" in succeed(*command)


def test_search_prints_tab_separated_lines_to_a_pipe(index: Path) -> None:
    """Each of several questions has a heading."""
    lines = succeed("search", index, "Paris", "record 2", "--top-k", "2").splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# Paris", "# record 2"]
    rank, score, place, text = lines[1].split("\t")
    assert (rank, place.endswith("page.html"), "Paris" in text) == ("1", True, True)
    assert 0 < float(score) < 1


def test_search_prints_question_place_and_text_on_a_terminal(index: Path) -> None:
    heading, place, text, *_ = succeed(
        "search", index, "the [of] Paris?", "--top-k", "1", stdout=Terminal
    ).splitlines()
    assert heading == "# the [of] Paris?"
    assert place.startswith("  1  0.") and place.endswith("page.html")
    assert text.startswith("     # Cities Paris, Rome")


def test_where_filters_results(index: Path) -> None:
    for conditions, years in (
        (["year=2019", "year=2021"], [2019, 2021]),
        (["year!=2019", "year<=2020"], [2018, 2020]),
        (["source>=c.jsonl:2", "source<d"], [2019, 2020, 2021]),
        (["source~.jsonl:2"], [2019]),
        (["nothing!=1"], []),
        (["$id=2"], [2020]),
    ):
        options = [option for condition in conditions for option in ("--where", condition)]
        (found,) = search(index, "record", "--top-k", "9", *options)
        assert sorted(each["metadata"]["year"] for each in found["results"]) == years, conditions


def test_min_score_compares_cosines(index: Path) -> None:
    (everything,) = search(index, "record number 2", "--top-k", "9", "--min-score", "-1")
    (best,) = search(index, "record number 2", "--top-k", "9", "--min-score", "0.99999")
    assert len(best["results"]) == 1 < len(everything["results"])
    assert best["results"][0]["id"] == "2"
    assert "--min-score" in (shown := succeed("search", "--help"))
    assert "None" not in shown


def test_search_reads_questions_from_a_pipe(index: Path) -> None:
    lines = succeed("search", index, "--json", stdin="Paris\n\n8443\n").splitlines()
    assert [json.loads(line)["question"] for line in lines] == ["Paris", "8443"]


def test_add_and_delete_change_an_index(index: Path, tmp_path: Path) -> None:
    """A file that is added again is replaced."""
    before = texts(index)
    more = tmp_path / "server.md"
    for content in ("Another file of the same name.", "It has changed."):
        more.write_text(content)
        assert f"{len(before) + 1} texts, " in succeed("add", index, more)
        assert texts(index) == sorted([*before, content])
    nothing = rag_demo("delete", index, "nosuch")
    assert nothing.returncode == 1 and nothing.stdout.startswith("deleted 0 texts")
    deleted = rag_demo("delete", index, "2", "nosuch")
    assert (deleted.returncode, deleted.stderr) == (0, "rag-demo: not in the index: nosuch\n")
    succeed("delete", index, "--where", f"path={more}")
    assert texts(index) == sorted(set(before) - {"record number 2"})
    succeed("verify", index)
    facts = info(index)
    assert (facts["texts"], facts["model"]) == (len(before) - 1, TINY[1])
    assert facts["finished"] is True
    assert "finished   yes\n" in succeed("info", index)


def test_index_reads_standard_input(tmp_path: Path) -> None:
    """Text or JSON lines."""
    out, first = tmp_path / "i", '{"id": "a", "body": "from lines"}\n'
    succeed("index", "-", "--out", out, "--text-field", "body", *TINY, stdin=first)
    succeed("add", out, "-", stdin="one text")
    succeed("add", out, "-", stdin="another text")
    assert texts(out) == ["another text", "from lines", "one text"]


def test_index_replaces_another_index_only_with_yes(index: Path, tmp_path: Path) -> None:
    other, moved = tmp_path / "other.txt", tmp_path / "other"
    other.write_text("other words")
    shutil.copytree(TINY[1], moved)
    (moved / "vocab.txt").write_text("another model")
    before = documents(index)
    assert "--yes" in fail("index", other, "--out", index, *TINY)
    assert "--yes" in fail("index", tmp_path / "source", "--out", index, "--model", moved)
    assert documents(index) == before
    succeed("index", other, "--out", index, "--yes", *TINY)
    assert texts(index) == ["other words"]
    succeed("index", tmp_path / "source", "--out", index, "--yes", *TINY)
    assert documents(index) == before


def test_model_option_names_a_moved_model(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("the capital of france is paris")
    before, now, index = (tmp_path / name for name in ("model", "moved", "index"))
    shutil.copytree(TINY[1], before)
    succeed("index", tmp_path / "note.txt", "--out", index, "--model", before)
    before.rename(now)
    for command in (("search", index, "paris"), ("add", index, tmp_path / "note.txt")):
        said = fail(*command)
        assert "no model in the folder" in said
        assert "--model" in said
        succeed(*command, "--model", now)
    assert "0 remain" in succeed("delete", index, "--where", "line>=0")  # It needs no model.


def test_escape_sequences_are_not_printed(tmp_path: Path) -> None:
    """From texts, names and models."""
    evil = "\x1b]0;title\x07"
    folder, model, out = (tmp_path / f"{name}{evil}" for name in ("source", "model", "index"))
    folder.mkdir()
    shutil.copytree(TINY[1], model)
    (folder / f"a{evil}.txt").write_text(f"words {evil} of a text")
    (folder / f"b{evil}.bin").write_text("x")
    write_lines(folder / "c.jsonl", [{"text": f"half a pair \ud800 {evil}"}])
    commands: list[tuple[str | Path, ...]] = [
        ("index", folder, "--out", out, "--model", model),
        ("search", out, f"words {evil}"),
        ("search", out, f"words {evil}", "--json"),
        *(("info", out), ("verify", out), ("delete", out, f"x{evil}")),
        *(("info", tmp_path / evil), ("search", out), (f"no{evil}",)),
    ]
    results = [rag_demo(*command) for command in commands]
    assert [each.returncode for each in results] == [0] * 5 + [1] + [2] * 3
    for result in results:
        assert "title" in result.stdout + result.stderr or result.returncode == 2
        assert not {"\x1b", "\x07", "\ud800"} & set(result.stdout + result.stderr), str(result)


def test_mistake_is_one_line_that_says_what_to_do(index: Path, tmp_path: Path) -> None:
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    cases: dict[tuple[str | Path, ...], tuple[str, ...]] = {
        ("index", tmp_path / "nowhere", "--out", out): ("nowhere' does not exist",),
        ("index", empty, "--out", out): ("empty", "holds no text"),
        ("index", index.parent / "source", "--out", tmp_path): ("is not an index",),
        ("index", index.parent / "source", "--out", out, "--device", "nope"): ("cannot be used",),
        ("search", tmp_path / "nowhere", "q"): ("no index in", "nowhere'", "rag-demo index"),
        ("search", index, "q", "--model", "all-MiniLM-L6-v2"): ("all-MiniLM-L6-v2", "tiny"),
        ("search", index, "q", "--top-k", "0"): ("--top-k", "0 is not in the range x>=1"),
        ("search", index): ("no question given",),
        ("search", index, " "): ("question is empty",),
        ("search", index, "q", "--device", "nonsense"): ("cannot be used: ", "nonsense"),
        ("search", index, "q", "--where", "lang==en"): ("'lang==en' is not a condition", "quotes"),
        ("search", index, "q", "--where", "$or=1"): ("not a condition",),
        ("search", index, "q", "--where", "line>="): ("has no value",),
        ("delete", index): ("nothing to delete",),
        ("index", empty, "--out", out, "--actors", "2", "--device", "cpu"): ("--device", "Ray"),
        ("evaluate", tmp_path / "nowhere", "--index", index): ("nowhere' does not exist",),
        ("evaluate", empty): ("--index",),
        ("nonsense",): ("No such command 'nonsense'",),
    }
    for arguments, wanted in cases.items():
        said = fail(*arguments)
        for text in wanted:
            assert text in said, arguments
    assert not out.exists()


def test_search_by_words_needs_no_model(index: Path) -> None:
    options = ("--mode", "bm25", "--model", "no/such/model")
    assert succeed("search", index, "Paris", *options) == succeed(
        "search", index, "Paris", "--mode", "bm25"
    )


def test_texts_are_listed_in_pages_and_printed_by_id(index: Path) -> None:
    lines = succeed("list", index, "--where", "year>=2020").splitlines()
    assert lines == ["2\trecord number 2", "3\trecord number 3"]
    every = succeed("list", index).splitlines()
    ids = [line.partition("\t")[0] for line in every]
    assert ids == sorted(ids)
    assert succeed("list", index, "--after", ids[1], "--limit", "2").splitlines() == every[2:4]
    listed = succeed("list", index, "--json").splitlines()
    assert len(listed) == info(index)["texts"]
    assert succeed("get", index, "2").splitlines() == [listed[ids.index("2")]]
    assert "not in the index: nowhere" in fail("get", index, "nowhere")


def test_conditions_that_nothing_can_fulfil_are_explained(index: Path) -> None:
    for command, condition, message in (
        ("search", "nosuch=1", "no document has the metadata key 'nosuch'; the keys are: $id, "),
        ("delete", "yaer=1", "no document has the metadata key 'yaer'; the keys are: $id, "),
        ("search", "year>=abc", "no document has a text as 'year', to compare with 'abc'"),
        ("search", "source<3", "no document has a number as 'source', to compare with 3"),
    ):
        question = ["Paris", "--mode", "bm25"] if command == "search" else []
        result = rag_demo(command, index, *question, "--where", condition)
        assert message in result.stderr, condition
        assert result.returncode == (command == "delete")


def test_prompts_of_an_index_are_kept_until_others_are_given(source: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["index", source, "--out", tmp_path / "i", *TINY]
    succeed(*command, "--document-prompt", "passage: ", "--query-prompt", "query: ")
    assert "unchanged" in succeed(*command)
    assert info(tmp_path / "i")["document prompt"] == "passage: "
    before = search(tmp_path / "i", "host", "--mode", "dense")
    again = [*command, "--document-prompt", "passage: ", "--query-prompt", "another one: "]
    assert "unchanged" in succeed(*again)
    assert info(tmp_path / "i")["query prompt"] == "another one: "
    assert search(tmp_path / "i", "host", "--mode", "dense") != before


def test_neighbors_are_shown(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {n} is a text about {name}." for n, name in enumerate("abcdefgh")]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    succeed("index", tmp_path / "a.txt", "--out", tmp_path / "i", "--chunk-size", "100", *TINY)
    alone = succeed("search", tmp_path / "i", "--mode", "bm25", "--top-k", "1", "about d")
    wide = succeed(
        "search", tmp_path / "i", "--mode", "bm25", "--top-k", "1", "--neighbors", "1", "about d"
    )
    assert "Paragraph 0" not in alone and "Paragraph 0" in wide and "Paragraph 5" in wide


def test_language_of_stems_is_chosen_by_the_command(tmp_path: Path) -> None:
    write_lines(tmp_path / "s.jsonl", [{"id": "a", "text": "Die Häuser der Stadt"}])
    command: list[str | Path] = ["index", tmp_path / "s.jsonl", "--out", tmp_path / "i", *TINY]
    succeed(*command)
    ask: list[str | Path] = [tmp_path / "i", "--mode", "bm25", "Haus"]
    assert search(*ask)[0]["results"] == []
    succeed(*command, "--language", "german")
    assert search(*ask)[0]["results"][0]["id"] == "a"
    succeed(*command)  # The language stays.
    assert search(*ask)[0]["results"][0]["id"] == "a"
    assert "language must be" in fail(*command, "--language", "klingon")


def test_part_of_a_source_is_not_another_source(source: Path, index: Path, tmp_path: Path) -> None:
    """The id of a line is the same, however its file is read."""
    before = documents(index)
    (source / "server.md").write_text("Changed words.")
    for path in (source / "server.md", source / "c.jsonl", source):
        succeed("add", index, path)
        assert info(index)["source"] == str(source)
    now = [name for name in before if not name.startswith("server.md#")]
    assert set(documents(index)) == {*now, "server.md#0"}
    hidden, other = source / ".hidden", tmp_path / "other.txt"
    for path in (hidden, other):
        path.write_text("Other words.")
    succeed("add", index, other)
    succeed("add", index, source)
    assert info(index)["source"] == f"{other} + {source}"
    succeed("add", index, tmp_path, "--exclude", "index")
    assert info(index)["source"] == str(tmp_path)
    assert "--yes" in fail("index", source, "--out", index, *TINY)
    succeed("index", source, "--out", index, "--yes", *TINY)
    succeed("add", index, hidden)
    assert "--yes" in fail("index", source, "--out", index, *TINY)


def test_snapshot_needs_two_folders(index: Path, tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    url = "postgresql://me:secret@localhost/db"
    for arguments in ((url, "--to", tmp_path / "snapshots"), (index, "--to", url)):
        said = fail("snapshot", *arguments)
        assert "is not a folder; copy a database with pg_dump" in said
        assert "secret" not in said
    assert not (tmp_path / "snapshots").exists()
    assert "is the index; name another folder" in fail("snapshot", index, "--to", index)


def judge(
    folder: Path, queries: list[dict[str, Any]], judgements: list[tuple[str, str, int]]
) -> Path:
    """Write queries and judgements as BEIR does."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "queries.jsonl", queries)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, each)) for each in judgements)]
    (folder / "qrels" / "test.tsv").write_text("".join(f"{line}\n" for line in lines))
    return folder


def make_index(path: Path, model: Path, *texts: tuple[str, str]) -> Path:
    lines = write_lines(path.with_suffix(".jsonl"), [{"_id": a, "text": b} for a, b in texts])
    succeed("index", lines, "--out", path, "--model", model)
    return path


def metrics(*command: str | Path) -> dict[str, float]:
    """Return what the command prints of each metric."""
    found = re.findall(r"^(\S+@\d+) +(\d\.\d+)$", succeed("evaluate", *command), re.MULTILINE)
    return {name: float(score) for name, score in found}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    queries = [{"_id": "q1", "text": "capital of france"}, {"_id": "q9", "text": "never judged"}]
    return judge(tmp_path / "small", queries, [("q1", "d1", 1)])


def test_answers_of_an_index_are_judged(small: Path, tmp_path: Path, tiny_model: Path) -> None:
    one = make_index(tmp_path / "one", tiny_model, ("d1", "the capital of france"))
    two = make_index(tmp_path / "two", tiny_model, ("d2", "the heap gives memory back"))
    assert metrics(small, "--index", one)["nDCG@10"] == 1
    assert metrics(small, "--index", two, "--mode", "bm25")["nDCG@10"] == 0
    assert "small, hybrid, 1 questions" in succeed("evaluate", small, "--index", one)
    assert "has none of the judged documents" in rag_demo("evaluate", small, "--index", two).stderr


@pytest.mark.slow
def test_judged_answers_may_be_reranked_and_weighed(
    small: Path, tmp_path: Path, tiny_model: Path
) -> None:
    other = "the capital of france the capital of france"
    one = make_index(tmp_path / "one", tiny_model, ("d1", "france"), ("d2", other))
    reranker = write_tiny_reranker(tmp_path / "reranker", "capital of france", ["france", other])
    by_mode = [
        metrics(small, "--index", one, "--mode", mode)["MRR@10"] for mode in ("dense", "bm25")
    ]
    for weights, expected in zip((("1", "0"), ("0", "1")), by_mode, strict=True):
        assert metrics(small, "--index", one, "--weights", *weights)["MRR@10"] == expected
    assert metrics(small, "--index", one, "--rerank", reranker)["Recall@100"] == 1


def test_document_with_the_id_of_the_query_is_dropped(tmp_path: Path, tiny_model: Path) -> None:
    """Grades count, and a document at the second place gives less than the best."""
    texts = [(name, "capital of france") for name in ("q1", "a", "b")]
    index = make_index(tmp_path / "index", tiny_model, *texts)
    queries = [{"_id": "q1", "text": "capital"}]
    judge(tmp_path / "small", queries, [("q1", "b", 2), ("q1", "q1", 1)])
    found = metrics(tmp_path / "small", "--index", index, "--mode", "bm25")
    ideal = 2 + 1 / math.log2(3)
    assert found["nDCG@10"] == pytest.approx(2 / math.log2(3) / ideal, abs=1e-4)
    assert (found["MRR@10"], found["Recall@100"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("qrels/test.tsv", None, "cannot be read"),
        ("qrels/test.tsv", "a\tb\n1\t2\n", "wrong judgements"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq7\td1\t1\n", "unknown queries"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "no judgements"),
    ],
)
def test_invalid_collection_is_one_error_that_names_the_file(
    small: Path, file: str, content: str | None, said: str
) -> None:
    (small / file).unlink()
    if content is not None:
        (small / file).write_text(content)
    message = fail("evaluate", small, "--index", small)
    assert said in message and file in message


KNOWN = {
    "how are questions about documents answered by vectors and full text?": "retrieval.md",
    "files of a saved index and their checksums": "storage.md",
    "which models does a pool evict to stay within its budget?": "hosting.md",
}


def test_known_answers_are_found_and_memory_is_released(tmp_path: Path) -> None:
    files = [f"--include={name}" for name in KNOWN.values()]
    succeed("index", ROOT / "docs", *files, "--out", tmp_path / "index")
    assert info(tmp_path / "index")["texts"] > 50
    with SafePyTorchCleanup() as scope:
        model = scope.manage(EmbeddingModel())
        for kind in (PyTorchGPURetriever, FaissRetriever):
            retriever = scope.manage(kind(model))
            retriever.load(tmp_path / "index")
            for question, answer in KNOWN.items():
                best = retriever.search(question, top_k=3)
                assert answer in [Path(one.metadata["path"]).name for one in best], question
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
    result = run("from rag_demo.cli import main; main()", "demo", str(docs), "--top-k", "3")
    answers = result.stdout.partition(QUESTIONS[1])[0]
    assert "safe_cuda_empty_cache" in answers, "the first question is not answered"
    (freed,) = re.findall(r"released: freed ([\d.]+) MB on host in .* ms; resident ", result.stdout)
    assert float(freed) > 80, str(result)


def test_demo_reads_the_folder_that_it_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'.' has no Markdown files" in fail("demo")
