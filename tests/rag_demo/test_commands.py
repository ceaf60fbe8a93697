"""The commands in this process, with a model that compares letters: what is printed, and done."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from letters import Letters, letters  # noqa: F401  (a fixture)

from programs import run_forked
from rag_demo import PyTorchGPURetriever
from rag_demo.commands import run
from rag_demo.errors import IndexFileError, RagDemoError
from rag_demo.index import read_index, read_manifest
from rag_demo.storage.manifest import digest


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
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture
def index(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    folder = tmp_path / "index"
    assert run(["index", str(source), "--out", str(folder)]) == 0
    capsys.readouterr()
    return str(folder)


def texts(folder: str | Path) -> list[str]:
    return sorted(document.text for document in read_index(Path(folder)).documents)


def search(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(["search", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_short_section_is_found(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By words, and the answer names its line."""
    ((answer, *_),) = [found["results"] for found in search(capsys, index, "8443")]
    assert "8443" in answer["text"]
    assert answer["place"].endswith("source/server.md:5")


def test_a_folder_of_one_short_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds a text, and the index has it."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x.txt").write_text("hi")
    assert run(["index", str(tmp_path / "s"), "--out", str(tmp_path / "i")]) == 0
    assert capsys.readouterr().out.startswith("indexed 1 text of ")
    assert texts(tmp_path / "i") == ["hi"]


def test_the_count_is_that_of_the_index(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what was skipped is the last line."""
    (source / "x.bin").write_bytes(b"\0")
    run(["index", str(source), "--out", str(tmp_path / "i")])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"indexed {len(texts(tmp_path / 'i'))} texts of ")
    assert shown.err == "rag-demo: skipped 1: 1 .bin of no kind that is read (x.bin)\n"
    run(["index", str(source), "--out", str(tmp_path / "i")])
    assert "unchanged" in capsys.readouterr().out


def test_plain_output(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each answer, with tabs; a heading for each of several questions."""
    run(["search", index, "Paris", "record 2", "--top-k", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# Paris", "# record 2"]
    rank, score, place, text = lines[1].split("\t")
    assert (rank, place.endswith("page.html:2 #top"), "Paris" in text) == ("1", True, True)
    assert 0 < float(score) < 1
    run(["search", index, "Paris", "--top-k", "1"])
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("conditions", "years"),
    [
        (["year>=2020"], [2020, 2021]),
        (["year>2018", "year<2021"], [2019, 2020]),
        (["year=2019"], [2019]),
        (["year=2019", "year=2021"], [2019, 2021]),
        (["year!=2019", "year<=2020"], [2018, 2020]),
        (["source=c.jsonl:1"], [2018]),
        (["source>=c.jsonl:2", "source<d"], [2019, 2020, 2021]),
        (["nothing!=1"], []),
        (["year=x"], []),
        (["nothing=1"], []),
    ],
)
def test_where(
    index: str, capsys: pytest.CaptureFixture[str], conditions: list[str], years: list[int]
) -> None:
    """Conditions are typed, and hold inside of the search."""
    options = [option for condition in conditions for option in ("--where", condition)]
    (found,) = search(capsys, index, "record", "--top-k", "9", *options)
    assert sorted(each["metadata"]["year"] for each in found["results"]) == years


@pytest.mark.parametrize("condition", ["$or=1", "=1", "year", "year>1 --where year>2"])
def test_wrong_conditions(index: str, condition: str) -> None:
    """One clear error, not an empty answer."""
    with pytest.raises(RagDemoError, match=r"no condition|no key|another >"):
        run(["search", index, "x", "--where", *condition.split()])


def test_min_score(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of cosines, unless a mode is named."""
    (everything,) = search(capsys, index, "record number 2", "--top-k", "9", "--min-score", "-1")
    (best,) = search(capsys, index, "record number 2", "--top-k", "9", "--min-score", "0.999")
    assert len(best["results"]) == 1 < len(everything["results"])
    assert best["results"][0]["id"] == "c.jsonl#2"


def test_context(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The passages before and after, of the same file only."""
    words = [f"word{n} " * 40 for n in range(5)]
    (source / "long.txt").write_text("\n\n".join(words))
    out = str(tmp_path / "i")
    run(["index", str(source), "--out", out, "--chunk-size", "300"])
    capsys.readouterr()
    (found,) = search(capsys, out, "word0", "--mode", "bm25", "--context", "1")
    answer = found["results"][0]
    assert answer["before"] == []
    assert [text.split()[0] for text in answer["after"]] == ["word1"]
    run(["search", out, "word2", "--mode", "bm25", "--context", "2", "--format", "table"])
    assert "word3" in capsys.readouterr().out


def test_questions_from_a_pipe(
    index: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a line; none is an error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Paris\n\n8443\n"))
    assert [found["question"] for found in search(capsys, index)] == ["Paris", "8443"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(RagDemoError, match="no question was asked"):
        run(["search", index])


def test_a_prompt(
    index: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal questions are asked until its end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Paris\n\n8443\n"))
    assert run(["search", index, "--top-k", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("question> ") == 4
    assert "Paris, Rome" in shown
    assert "8443" in shown


def test_add_and_delete(
    index: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there stays, and is not embedded again; a file that is added again is replaced."""
    before = texts(index)
    more = tmp_path / "server.md"
    more.write_text("Another file of the same name.")
    Letters.embedded = 0
    for content in ("Another file of the same name.", "It has changed."):
        more.write_text(content)
        assert run(["add", index, str(more)]) == 0
        assert texts(index) == sorted([*before, content])
    assert Letters.embedded == 2
    assert run(["delete", index, "c.jsonl#2", "nosuch"]) == 0
    assert capsys.readouterr().err == "rag-demo: not there: nosuch\n"
    assert run(["delete", index, "--where", f"path={more}"]) == 0
    assert texts(index) == sorted(set(before) - {"record number 2"})
    assert run(["verify", index]) == 0
    run(["info", index, "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["texts"], facts["model"]) == (len(before) - 1, "letters")
    run(["info", index])
    assert "finished   yes\n" in capsys.readouterr().out


def test_all_texts_deleted(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty index is one."""
    assert run(["delete", index, "--where", "source!=1"]) == 0
    assert run(["verify", index]) == 0
    capsys.readouterr()
    assert search(capsys, index, "x")[-1]["results"] == []
    assert texts(index) == []


@pytest.fixture
def made_by_a_program(tmp_path: Path) -> str:
    """An index with a long text that is embedded as a whole."""
    folder = tmp_path / "made"
    with PyTorchGPURetriever(Letters(dtype="float32"), device="cpu") as retriever:
        retriever.add(["short", "a long sentence. " * 100], [{"n": 1}, {"n": 2}], ["s", "l"])
        retriever.save(folder)
    return str(folder)


def test_delete_embeds_nothing(made_by_a_program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left stays as it is, however it was embedded."""
    Letters.embedded = 0
    assert run(["delete", made_by_a_program, "s"]) == 0
    assert texts(made_by_a_program) == ["a long sentence. " * 100]
    assert Letters.embedded == 0
    capsys.readouterr()
    ((answer,),) = [found["results"] for found in search(capsys, made_by_a_program, "sentence")]
    assert (answer["id"], answer["metadata"]) == ("l", {"n": 2})


def test_delete_ends_in_order(index: str) -> None:
    """SIGTERM in the middle of its save: the index is as it was, and nothing lies beside it."""
    before = sorted(path.name for path in Path(index).iterdir())
    result = run_forked(
        """
        import signal, sys
        from rag_demo.commands import run
        from rag_demo.storage import saving
        saving.replace_manifest = lambda *arguments: signal.raise_signal(signal.SIGTERM)
        run(["delete", sys.argv[1], "--where", "source!=1"])
        """,
        index,
    )
    assert (result.returncode, result.stderr) == (128 + signal.SIGTERM, ""), str(result)
    assert sorted(path.name for path in Path(index).iterdir()) == before


def test_a_program_s_texts_are_not_dropped_unasked(made_by_a_program: str, tmp_path: Path) -> None:
    """After something was added the index is of that, and of what the program put there."""
    other = tmp_path / "other.txt"
    other.write_text("other words")
    for _ in range(2):
        assert run(["add", made_by_a_program, str(other)]) == 0
    assert len(texts(made_by_a_program)) == 3
    with pytest.raises(RagDemoError, match="--yes"):
        run(["index", str(other), "--out", made_by_a_program])
    assert len(texts(made_by_a_program)) == 3


def test_an_earlier_version_s_index_is_not_changed(
    index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model is known by name only: it answers as before, and `delete` does not spoil that."""
    path = Path(index) / "manifest.json"
    manifest = {**read_manifest(Path(index)), "version": 3}
    for key in ("dtype", "fingerprint", "source", "finished"):
        del manifest[key]
    path.write_text(json.dumps({**manifest, "sha256": digest(manifest)}))
    for command in (["delete", index, "c.jsonl#2"], ["add", index, str(tmp_path / "source")]):
        with pytest.raises(IndexFileError, match="earlier version"):
            run(command)
    assert search(capsys, index, "8443")[0]["results"]


def test_verify_reads_what_was_computed_too(index: str) -> None:
    """A search meets damage in the kept words; so does `verify`."""
    (path,) = Path(index).glob("derived-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    assert run(["verify", index]) == 0
    path.write_bytes(content)
    with pytest.raises(IndexFileError, match="damaged"):
        run(["verify", index])


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_no_such_device(index: str, device: str) -> None:
    """One line, and no traceback of torch's."""
    with pytest.raises(RagDemoError, match="device"):
        run(["search", index, "8443", "--mode", "bm25", "--device", device])


def test_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, or JSON lines; two texts that are added this way are two."""
    out = str(tmp_path / "i")
    first = '{"id": "a", "body": "from lines"}\n'
    for command, content in (
        (["index", "-", "--out", out, "--text-field", "body"], first),
        (["add", out, "-"], "one text"),
        (["add", out, "-"], "another text"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        assert run(command) == 0
    assert texts(out) == ["another text", "from lines", "one text"]


def test_another_index_is_not_replaced_unasked(
    index: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another source, or another model; --yes does, and so does an answer at a terminal."""
    other = tmp_path / "other.txt"
    other.write_text("other words")
    before = texts(index)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for command in (["index", str(other)], ["index", str(source), "--model", "another"]):
        with pytest.raises(RagDemoError, match="--yes"):
            run([*command, "--out", index])
    assert texts(index) == before
    run(["index", str(other), "--out", index, "--yes"])
    assert texts(index) == ["other words"]


def test_options_reach_the_model(source: Path, tmp_path: Path) -> None:
    """Workers, batch size, dtype and the cache."""
    out = ["--out", str(tmp_path / "i")]
    run(["index", str(source), *out, "--workers", "2", "--batch-size", "7", "--no-cache"])
    found = {name: Letters.options[name] for name in ("workers", "batch_size", "cache")}
    assert found == {"workers": 2, "batch_size": 7, "cache": None}


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words alone embed nothing; the others use the cache."""
    from test_evaluate import write_beir

    folder = write_beir(tmp_path / "c")
    assert run(["evaluate", str(folder), "--mode", "bm25"]) == 0
    assert Letters.embedded == 0
    assert run(["evaluate", str(folder)]) == 0
    assert "hybrid" in capsys.readouterr().out
    assert Letters.embedded > 0
    assert Letters.options["cache"] is not None


def test_escapes_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of texts, of names and of models: on no way to the terminal."""
    evil = "\x1b]0;title\x07"
    folder = tmp_path / f"so{evil}urce"
    folder.mkdir()
    (folder / f"a{evil}.txt").write_text(
        f"words {evil} of a text \ud800 and more", "utf-8", "ignore"
    )
    (folder / f"b{evil}.bin").write_text("x")
    (folder / "c.jsonl").write_text(json.dumps({"text": f"half a pair \ud800 {evil}"}))
    out = str(tmp_path / f"in{evil}dex")
    run(["index", str(folder), "--out", out, "--model", f"mo{evil}del"])
    for layout in ("plain", "table", "json"):
        run(["search", out, f"words {evil}", "--format", layout, "--context", "1"])
    for command in (["info", out], ["verify", out], ["delete", out, f"no{evil}such"]):
        run(command)
    shown = capsys.readouterr()
    assert "title" in shown.out
    assert "title" in shown.err
    for text in (shown.out, shown.err):
        assert not {"\x1b", "\x07", "\ud800"} & set(text), repr(text)
    for command in (["info", str(tmp_path / evil)], ["search", out], [f"no{evil}"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(RagDemoError):
            run(command)


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, over several lines, on stdout."""
    assert run([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: rag-demo")
    for command in ("index", "add", "delete", "search", "info", "verify", "evaluate", "demo"):
        assert f"\n  {command} " in shown


def test_help_names_no_range_that_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A score may be any number."""
    run(["search", "--help"])
    said = capsys.readouterr().out
    assert "--min-score" in said
    assert "None" not in said
