"""What the commands of `rag-demo` print and do."""

import math
import re
import shutil
from pathlib import Path

import pytest

from rag_demo.commands.evaluate import QUESTIONS
from tests.support.programs import ROOT, assert_clean, run
from tests.support.rag_command import (
    IMPORT_MAIN,
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

TINY = ["--model"]


@pytest.fixture(scope="module", autouse=True)
def use_tiny_model(tiny_model: Path) -> None:
    TINY[1:] = [str(tiny_model)]


def write_source(folder: Path) -> Path:
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
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def index(source: Path, tmp_path: Path) -> Path:
    succeed("index", source, "--out", tmp_path / "index", *TINY)
    return tmp_path / "index"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an index that no test changes."""
    folder = tmp_path_factory.mktemp("shared")
    succeed("index", write_source(folder / "source"), "--out", folder / "index", *TINY)
    return folder / "index"


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


def test_search_prints_lines_to_a_pipe_and_texts_on_a_terminal(shared: Path) -> None:
    """Each of several questions has a heading. They may come from a pipe."""
    lines = succeed("search", shared, "--top-k", "2", stdin="Paris\n\nrecord 2\n").splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# Paris", "# record 2"]
    rank, score, place, text = lines[1].split("\t")
    assert (rank, place.endswith("page.html"), "Paris" in text) == ("1", True, True)
    assert 0 < float(score) < 1
    command = ("search", shared, "the [of] Paris?", "--top-k", "1")
    heading, place, text, *_ = succeed(*command, on_terminal=True).splitlines()
    assert heading == "# the [of] Paris?"
    assert place.startswith("  1  0.") and place.endswith("page.html")
    assert text.startswith("     # Cities Paris, Rome")


def test_where_filters_results(shared: Path) -> None:
    """Conditions that nothing can fulfil are explained."""
    for conditions, years in (
        (["year=2019", "year=2021"], [2019, 2021]),
        (["year!=2019", "year<=2020"], [2018, 2020]),
        (["source>=c.jsonl:2", "source<d"], [2019, 2020, 2021]),
        (["source~.jsonl:2"], [2019]),
        (["nothing!=1"], []),
        (["$id=2"], [2020]),
    ):
        options = [option for condition in conditions for option in ("--where", condition)]
        (found,) = search(shared, "record", "--top-k", "9", *options)
        assert sorted(each["metadata"]["year"] for each in found["results"]) == years, conditions
    for command, condition, message in (
        ("search", "nosuch=1", "no document has the metadata key 'nosuch'; the keys are: $id, "),
        ("delete", "yaer=1", "no document has the metadata key 'yaer'; the keys are: $id, "),
        ("search", "year>=abc", "no document has a text as 'year', to compare with 'abc'"),
        ("search", "source<3", "no document has a number as 'source', to compare with 3"),
    ):
        result = rag_demo(command, shared, "--where", condition, *["Paris"] * (command == "search"))
        assert message in result.stderr, condition
        assert result.returncode == (command == "delete")


def test_min_score_compares_cosines(shared: Path) -> None:
    (everything,) = search(shared, "record number 2", "--top-k", "9", "--min-score", "-1")
    (best,) = search(shared, "record number 2", "--top-k", "9", "--min-score", "0.99999")
    assert [each["id"] for each in best["results"]] == ["2"]
    assert len(everything["results"]) > 1


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


def test_mistake_is_one_line_that_says_what_to_do(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    empty, out, source = tmp_path / "empty", tmp_path / "out", shared.parent / "source"
    empty.mkdir()
    cases: dict[tuple[str | Path, ...], tuple[str, ...]] = {
        ("index", tmp_path / "nowhere", "--out", out): ("nowhere' does not exist",),
        ("index", empty, "--out", out): ("empty", "holds no text"),
        ("index", source, "--out", tmp_path): ("is not an index",),
        ("index", source, "--out", out, "--device", "nope"): ("cannot be used: ", "nope"),
        ("index", source, "--out", out, "--language", "klingon"): ("language must be",),
        ("index", empty, "--out", out, "--actors", "2", "--device", "cpu"): ("--device", "Ray"),
        ("search", tmp_path / "nowhere", "q"): ("no index in", "nowhere'", "rag-demo index"),
        ("search", shared, "q", "--model", "all-MiniLM-L6-v2"): ("all-MiniLM-L6-v2", "tiny"),
        ("search", shared, "q", "--top-k", "0"): ("--top-k", "0 is not in the range x>=1"),
        ("search", shared): ("no question given",),
        ("search", shared, " "): ("question is empty",),
        ("search", shared, "q", "--where", "lang==en"): ("'lang==en' is not a condition", "quotes"),
        ("search", shared, "q", "--where", "$or=1"): ("not a condition",),
        ("search", shared, "q", "--where", "line>="): ("has no value",),
        ("get", shared, "nowhere"): ("not in the index: nowhere",),
        ("delete", shared): ("nothing to delete",),
        ("snapshot", shared, "--to", shared): ("is the index; name another folder",),
        ("evaluate", tmp_path / "nowhere", "--index", shared): ("nowhere' does not exist",),
        ("evaluate", empty): ("--index",),
        ("demo",): ("'.' has no Markdown files",),
        ("nonsense",): ("No such command 'nonsense'",),
    }
    for arguments, wanted in cases.items():
        said = fail(*arguments)
        for text in wanted:
            assert text in said, arguments
    assert not out.exists()


def test_search_by_words_needs_no_model(shared: Path) -> None:
    command = ("search", shared, "Paris", "--mode", "bm25")
    assert succeed(*command, "--model", "no/such/model") == succeed(*command) != ""


def test_texts_are_listed_in_pages_and_printed_by_id(shared: Path) -> None:
    lines = succeed("list", shared, "--where", "year>=2020").splitlines()
    assert lines == ["2\trecord number 2", "3\trecord number 3"]
    every = succeed("list", shared).splitlines()
    ids = [line.partition("\t")[0] for line in every]
    assert ids == sorted(ids)
    assert succeed("list", shared, "--after", ids[1], "--limit", "2").splitlines() == every[2:4]
    listed = succeed("list", shared, "--json").splitlines()
    assert len(listed) == info(shared)["texts"]
    assert succeed("get", shared, "2").splitlines() == [listed[ids.index("2")]]


def test_update_keeps_the_language_and_the_prompts(tmp_path: Path) -> None:
    write_lines(tmp_path / "s.jsonl", [{"id": "a", "text": "Die Häuser der Stadt"}])
    command: list[str | Path] = ["index", tmp_path / "s.jsonl", *TINY, "--out"]
    chosen = ["--language", "german", "--document-prompt", "passage: ", "--query-prompt", "query: "]
    found = []
    for out, options in (("english", []), ("german", chosen), ("german", [])):
        shown = succeed(*command, tmp_path / out, *options)
        found += search(tmp_path / out, "--mode", "bm25", "Haus")
    assert "unchanged" in shown
    assert [[one["id"] for one in each["results"]] for each in found] == [[], ["a"], ["a"]]
    assert info(tmp_path / "german")["document prompt"] == "passage: "
    before = search(tmp_path / "german", "--mode", "dense", "Haus")
    (tmp_path / "model").symlink_to(TINY[1])
    other: list[str | Path] = ["--model", tmp_path / "model", "--query-prompt", "another one: "]
    assert "unchanged" in succeed(*command, tmp_path / "german", *other)
    assert info(tmp_path / "german")["query prompt"] == "another one: "
    assert info(tmp_path / "german")["document prompt"] == "passage: "
    assert search(tmp_path / "german", "--mode", "dense", "Haus") != before


def test_neighbors_are_shown(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {n} is a text about {name}." for n, name in enumerate("abcdefgh")]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    succeed("index", tmp_path / "a.txt", "--out", tmp_path / "i", "--chunk-size", "100", *TINY)
    command = ("search", tmp_path / "i", "--mode", "bm25", "--top-k", "1", "about d")
    assert "Paragraph 0" not in succeed(*command)
    assert "Paragraph 0" in succeed(*command, "--neighbors", "1")


def test_part_of_a_source_is_not_another_source(source: Path, index: Path, tmp_path: Path) -> None:
    """The id of a line is the same, however its file is read."""
    before = documents(index)
    (source / "server.md").write_text("Changed words.")
    for path in (source / "server.md", source / "c.jsonl", source):
        succeed("add", index, path)
        assert info(index)["source"] == str(source)
    now = {name for name in before if not name.startswith("server.md#")}
    assert {*documents(index)} == now | {"server.md#0"}
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


def make_index(path: Path, *texts: str) -> Path:
    """Index texts whose ids are their numbers."""
    records = [{"_id": str(n), "text": text} for n, text in enumerate(texts)]
    lines = write_lines(path.with_suffix(".jsonl"), records)
    succeed("index", lines, "--out", path, *TINY)
    return path


def metrics(*command: str | Path) -> dict[str, float]:
    """Return what the command prints of each metric."""
    found = re.findall(r"^(\S+@\d+) +(\d\.\d+)$", succeed("evaluate", *command), re.MULTILINE)
    return {name: float(score) for name, score in found}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A collection in the layout of BEIR; the first document has the id of the query."""
    folder = tmp_path / "small"
    (folder / "qrels").mkdir(parents=True)
    queries = [{"_id": "0", "text": "capital of france"}, {"_id": "q9", "text": "never judged"}]
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n0\t2\t2\n0\t0\t1\n")
    return folder


def test_answers_of_an_index_are_judged(small: Path, tmp_path: Path) -> None:
    """Grades and places count; a document with the id of the query is dropped."""
    three = make_index(tmp_path / "three", *["capital of france"] * 3)
    found = metrics(small, "--index", three, "--mode", "bm25")
    ideal = 2 + 1 / math.log2(3)
    assert found["nDCG@10"] == pytest.approx(2 / math.log2(3) / ideal, abs=1e-4)
    assert (found["MRR@10"], found["Recall@100"]) == (0.5, 0.5)
    assert "small, hybrid, 1 questions" in succeed("evaluate", small, "--index", three)
    one = make_index(tmp_path / "one", "the heap gives memory back")
    other = (small, "--index", one, "--mode", "bm25")
    assert metrics(*other)["nDCG@10"] == 0
    (small / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n0\td9\t2\n")
    assert "has none of the judged documents" in rag_demo("evaluate", *other).stderr


@pytest.mark.slow
def test_judged_answers_may_be_reranked_and_weighed(small: Path, tmp_path: Path) -> None:
    other = "the capital of france the capital of france"
    index = make_index(tmp_path / "index", "paris", "france", other)
    reranker = write_tiny_reranker(tmp_path / "reranker", "capital of france", ["france", other])
    command = (small, "--index", index)
    for mode, weights in (("dense", ("1", "0")), ("bm25", ("0", "1"))):
        expected = metrics(*command, "--mode", mode)["MRR@10"]
        assert metrics(*command, "--weights", *weights)["MRR@10"] == expected
    assert metrics(*command, "--rerank", reranker)["Recall@100"] == 0.5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("a\tb\n1\t2\n", "wrong judgements"),
        ("query-id\tcorpus-id\tscore\nq7\td1\t1\n", "unknown queries"),
        ("query-id\tcorpus-id\tscore\n", "no judgements"),
    ],
)
def test_invalid_collection_is_one_error_that_names_the_file(
    small: Path, content: str | None, said: str
) -> None:
    file = small / "qrels" / "test.tsv"
    file.unlink()
    if content is not None:
        file.write_text(content)
    message = fail("evaluate", small, "--index", small)
    assert said in message and "qrels/test.tsv" in message


@pytest.mark.slow
def test_demo_answers_from_a_folder_and_releases_its_model(tmp_path: Path) -> None:
    for name in ("frameworks.md", "troubleshooting.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    command, question = ("demo", str(tmp_path)), "how is a model released in celery?"
    result = run(f"{IMPORT_MAIN}; main()", *command, question, "--top-k", "1")
    assert_clean(result)
    assert f"passages of {tmp_path}" in result.stdout and question in result.stdout
    assert "frameworks.md" in result.stdout
    (freed,) = re.findall(r"released: freed ([\d.]+) MB on host in .* ms; resident ", result.stdout)
    assert float(freed) > 80, str(result)
    answers = succeed(*command, "--top-k", "3").partition(QUESTIONS[1])[0]
    assert "safe_cuda_empty_cache" in answers, "the first question is not answered"
