"""The commands: tables and JSON on stdout, errors of one line with exit code 2."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from programs import IMPORT_PATH, Result, assert_clean, run, run_forked
from rag_demo import commands
from rag_demo.errors import RagDemoError
from rag_demo.index import read_index

MAIN = "from rag_demo.cli import main; main()"


def rag_demo(*arguments: str | Path) -> Result:
    return run_forked(MAIN, *map(str, arguments), quick_end=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "paris.md").write_text("# France\n\nThe capital of France is the city of Paris.\n")
    (folder / "memory.md").write_text("How to give the memory of the cache back to the system.\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9 is not UTF-8, so this is passed over")
    out = folder.parent / f"{folder.name}-index"
    result = rag_demo("index", folder, "--out", out, "--model", tiny_model)
    assert result.returncode == 0, str(result)
    assert "indexed 2 texts" in result.stdout
    skipped = "skipped 1: 1 .txt that is not UTF-8 text (latin.txt)"
    assert result.stderr == f"rag-demo: {skipped}\n"
    return out


@pytest.mark.parametrize("retriever", ["torch", "faiss"])
def test_search(saved: Path, tiny_model: Path, retriever: str) -> None:
    """JSON for programs; the same answers from both retrievers; nothing on stderr."""
    query = ("search", saved, "give memory back", "--model", tiny_model, "--retriever", retriever)
    result = rag_demo(*query, "--json", "--top-k", "1")
    assert_clean(result)
    answer = json.loads(result.stdout)
    assert answer["results"][0]["metadata"]["source"] == "memory.md"
    assert answer["results"][0]["rank"] == 1


def test_long_documents_in_bfloat16(tmp_path: Path, tiny_model: Path) -> None:
    """What stands late in a line of JSON is found, and the answer says where; dtype is taken."""
    text = "the capital of france . " * 60 + "\n\n" + "give memory back . " * 40
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "long", "text": text}) + "\n")
    source, out = tmp_path / "c.jsonl", tmp_path / "i"
    command = ("index", source, "--out", out, "--model", tiny_model, "--dtype", "bfloat16")
    assert_clean(rag_demo(*command, "--no-cache"))
    result = rag_demo("search", out, "give memory back", "--mode", "dense", "--json")
    assert_clean(result)
    (answer,) = json.loads(result.stdout)["results"]
    start, stop = answer["passage"]
    assert answer["text"] == text
    assert "give memory back" in text[start:stop]
    assert stop - start <= 800


def test_table(saved: Path) -> None:
    """People get a table with scores and sources, which a long path makes wrap."""
    result = rag_demo("search", saved, "the capital [of] France?", "--format", "table")
    assert_clean(result)
    for wanted in ("capital [of] France?", "score"):
        assert wanted in result.stdout
    rows = [line.split("│") for line in result.stdout.splitlines() if line.count("│") > 3]
    assert "paris.md" in "".join(row[-2].strip() for row in rows)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "manifest.json").write_text("{")
    return folder


def test_errors(
    saved: Path,
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each mistake is one line that names the thing and says what to do, and exit code 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    cases: dict[tuple[str | Path, ...], tuple[str, ...]] = {
        ("index", tmp_path / "nowhere", "--out", out): ("nowhere' does not exist",),
        ("index", empty, "--out", out): ("empty", "holds no text"),
        ("index", "no_such_package", "--out", out): ("no_such_package", "nor an installed"),
        ("index", "json", "--out", tmp_path): ("holds other files",),
        ("index", "json", "--out", tmp_path / "dangling"): ("dangling", "link", "not there"),
        ("search", tmp_path / "nowhere", "q"): ("nowhere' was not found", "rag-demo index"),
        ("search", broken, "q"): ("manifest.json", "is damaged"),
        ("search", saved, "q", "--model", "all-MiniLM-L6-v2"): ("all-MiniLM-L6-v2", "tiny"),
        ("search", saved, "q", "--top-k", "0"): ("--top-k", "'0'", "1 or more"),
        ("search", saved, "q", "--top-k", "x"): ("--top-k", "'x'"),
        ("search", saved): ("no question was asked",),
        ("search", saved, " "): ("question is empty",),
        ("search", saved, "q", "--where", "lang"): ("'lang' is no condition",),
        ("search", saved, "q", "--where", "lang==en"): ("'lang==en' is no condition", "quotes"),
        ("delete", saved, "--where", "year>>2000"): ("'year>>2000' is no condition",),
        ("search", saved, "q", "--where", "year=>2000"): ("'year=>2000' is no condition",),
        ("evaluate", tmp_path / "nowhere"): ("nowhere' was not found", "corpus.jsonl", "qrels/"),
        ("info", empty): (f"'{empty}' holds no index",),
        ("delete", saved): ("nothing was named",),
        ("nonsense",): ("No such command 'nonsense'",),
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for arguments, wanted in cases.items():
        with pytest.raises(RagDemoError) as error:
            commands.run([str(argument) for argument in arguments])
        for text in wanted:
            assert text in str(error.value), arguments
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    result = rag_demo("search", broken, "q")
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    assert result.stderr.count("\n") == 1, str(result)
    assert result.stderr.startswith("rag-demo: error: "), str(result)
    assert not out.exists()


def test_a_model_that_has_moved(tmp_path: Path, tiny_model: Path) -> None:
    """Whoever asks for it or adds to it names its place; it is known by its content."""
    (tmp_path / "note.txt").write_text("the capital of france is paris")
    before, now = tmp_path / "model", tmp_path / "moved"
    shutil.copytree(tiny_model, before)
    index, note = str(tmp_path / "index"), str(tmp_path / "note.txt")
    commands.run(["index", note, "--out", index, "--model", str(before), "--no-cache"])
    before.rename(now)
    for command in (["search", index, "paris"], ["add", index, note, "--no-cache"]):
        with pytest.raises(RagDemoError, match=r"no such folder; .*--model"):
            commands.run(command)
        assert not commands.run([*command, "--model", str(now)])


def test_what_the_log_warns_of_is_said(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, such as of a cache that is another program's; the work is done without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "rag-demo" / "embeddings.sqlite"
    cache.parent.mkdir()
    with sqlite3.connect(cache) as database:
        database.execute("CREATE TABLE bookmarks (name TEXT)")
    database.close()
    (tmp_path / "note.txt").write_text("the capital of france is paris")
    source = [str(tmp_path / "note.txt"), "--out", str(tmp_path / "index")]
    assert not commands.run(["index", *source, "--model", str(tiny_model)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"rag-demo: the embedding cache {cache} is not used: ")
    assert said[0].endswith("move it elsewhere")


def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets no control characters; a terminal gets a bar."""
    from rag_demo.console import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("embedding", 2) as advance:
            advance(2)
        assert ("embedding" in stream.getvalue()) is expected


WITHOUT_CLICK = """
import sys
sys.modules["click"] = None
from rag_demo.cli import main
main()
"""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["search", "folder", "question"]])
def test_plain_install(arguments: list[str]) -> None:
    """Without the extra that brings click: one line that says what to install, exit code 2."""
    result = run(WITHOUT_CLICK, *arguments)
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    assert result.stderr.startswith("rag-demo: error: "), str(result)
    assert "pip install '.[rag,model]'" in result.stderr, str(result)
    assert result.stderr.count("\n") == 1, str(result)


def test_a_library_that_cannot_be_loaded() -> None:
    """What is installed, and finds no memory, is not told to be installed."""
    said = 'raise ImportError("libtorch_cpu.so: failed to map segment from shared object")'
    program = "import rag_demo.commands\ndef run(arguments):\n    "
    result = run(f"{program}{said}\nrag_demo.commands.run = run\n{MAIN}")
    assert result.returncode == 2
    what = said.split('"')[1]
    assert result.stderr == f"rag-demo: error: a library cannot be loaded: {what}\n"


def test_control_click_at_the_top() -> None:
    """What imports click before the handler is there leaves with a traceback."""
    result = run(WITHOUT_CLICK.replace("rag_demo.cli import main", "rag_demo.commands import run"))
    assert result.returncode == 1
    assert "Traceback" in result.stderr


ON_A_TERMINAL = """
import os, pty, subprocess, sys
# A session of its own with a terminal of its own; stderr is a pipe, as under clean-exit.
pid, terminal = pty.fork()
if pid == 0:
    program = (
        "from rag_demo.console import progress\\n"
        "with progress('embedding', 2, sys.argv[1]) as advance: advance(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import sys\\n" + program, sys.argv[1]], stderr=subprocess.PIPE
    )
    os.write(1, b"on stderr: %r" % done.stderr)
    os._exit(done.returncode)
shown = b""
try:
    while data := os.read(terminal, 65536):
        shown += data
except OSError:
    pass  # Linux says so at the end.
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "embedding" in shown.decode())
print("on stderr: b''" in shown.decode())
"""


@pytest.mark.parametrize(("show", "seen"), [("terminal", True), ("auto", False), ("none", False)])
def test_progress_while_stderr_is_read(show: str, seen: bool) -> None:
    """The terminal has the bar although another program reads stderr, which stays empty."""
    result = run(ON_A_TERMINAL, show)
    assert_clean(result)
    assert result.stdout.split() == ["0", str(seen), "True"], str(result)


def test_progress_without_a_terminal() -> None:
    """Where there is none, as in a scheduled job, there is no bar and no error."""
    program = """
    import os
    os.setsid()
    from rag_demo.console import progress
    with progress("embedding", 2, "terminal") as advance:
        advance(2)
    """
    result = run(program)
    assert_clean(result)
    assert result.stdout == ""


def shell(script: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run the commands as a shell script does: ``rag-demo`` is a function in it."""
    function = f"rag-demo() {{ '{sys.executable}' -c '{MAIN}' \"$@\"; }}\n"
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    command = ["bash", "-c", function + script, "bash", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=env, timeout=600, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@pytest.mark.parametrize(
    ("script", "code", "wanted"),
    [
        pytest.param("rag-demo --help > /dev/full", 2, "No space left", marks=FULL),
        pytest.param('rag-demo info "$1" > /dev/full', 2, "No space left", marks=FULL),
        pytest.param("rag-demo nosuch 2> /dev/full", 2, "", marks=FULL),
        ('rag-demo info "$1" >&-', 2, "Bad file descriptor"),
        ("rag-demo nosuch >&- 2>&- <&-", 2, ""),
        ('rag-demo index - --out "$1" <&-', 2, "standard input holds no text"),
        ('rag-demo index json --out "$1" <&-', 2, "--yes"),
        ('rag-demo info "$1" | true; exit ${PIPESTATUS[0]}', 1, ""),
        ("rag-demo info $'/nowhere-\\xff-\\e[31m'", 2, r"/nowhere-\udcff-\x1b[31m"),
        ('(ulimit -f 0; rag-demo delete "$1" paris.md#0)', 2, "cannot be written"),
        ("rag-demo", 0, ""),
    ],
)
def test_streams(saved: Path, script: str, code: int, wanted: str) -> None:
    """Where nothing can be written that is one line and not a traceback; a closed pipe is none."""
    returncode, _, stderr = shell(script, saved)
    assert returncode == code, stderr
    assert wanted in stderr
    assert stderr.count("\n") == (1 if wanted else 0), stderr
    assert stderr.startswith("rag-demo: error: " if wanted else ""), stderr
    assert len(read_index(saved).documents) == 2


def test_control_what_python_prints_by_itself() -> None:
    """Without the handler a full disk is said twice, and with a traceback."""
    program = "from rag_demo.commands import run; run(['--help'])"
    command = f"'{sys.executable}' -c \"{program}\" > /dev/full"
    if Path("/dev/full").exists():
        returncode, _, stderr = shell(command)
        assert returncode not in (0, 2)
        assert "Traceback" in stderr


def test_shell_completion() -> None:
    """As the documentation says: click's script, and its answers."""
    script = "export _RAG_DEMO_COMPLETE; _RAG_DEMO_COMPLETE=bash_source rag-demo"
    assert "_rag_demo_completion" in shell(script)[1]
    script = "export _RAG_DEMO_COMPLETE COMP_WORDS='rag-demo ver' COMP_CWORD=1;"
    found = shell(script + "_RAG_DEMO_COMPLETE=bash_complete rag-demo")
    assert found[1].split() == ["plain,verify"]


@pytest.mark.parametrize(
    ("when", "code"),
    [
        ("while it is imported", 130),
        ("when all is said", -signal.SIGINT),
        ("after a SIGTERM", -signal.SIGINT),
    ],
)
def test_ctrl_c_at_the_edges(when: str, code: int) -> None:
    """Before a command has begun, and while the interpreter ends: no traceback."""
    result = run(
        """
        import atexit, signal, sys
        class Early:
            def find_spec(name, path, target=None):
                if name == "torch_utils":
                    signal.raise_signal(signal.SIGINT)
        if sys.argv[1] == "while it is imported":
            sys.meta_path.insert(0, Early)
        else:
            atexit.register(signal.raise_signal, signal.SIGINT)
        if sys.argv[1] == "after a SIGTERM":
            import rag_demo.commands
            from torch_utils import exit_on_signals
            def run(arguments):
                print("version")
                with exit_on_signals(signal.SIGTERM):
                    signal.raise_signal(signal.SIGTERM)
            rag_demo.commands.run = run
        sys.argv = ["rag-demo", "--version"]
        from rag_demo.cli import main
        main()
        """,
        when,
    )
    assert result.stderr == "", str(result)
    assert result.returncode == code, str(result)
    assert ("version" in result.stdout) == (code != 130)
