"""`rag-demo` as a process: streams, signals, terminals, and what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import IMPORT_PATH, TIMEOUT_S, run
from tests.support.rag_command import IMPORT_MAIN, info, rag_demo, succeed, write_lines

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_lines(folder / "two.jsonl", [{"id": n, "text": f"paris {n}"} for n in range(2)])
    succeed("index", folder / "two.jsonl", "--out", folder / "index", "--model", tiny_model)
    return folder / "index"


def shell(script: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run the commands as a shell script does: ``rag-demo`` is a function in it."""
    function = f"rag-demo() {{ '{sys.executable}' -c '{IMPORT_MAIN}; main()' \"$@\"; }}\n"
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    command = ["bash", "-c", function + script, "bash", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=env, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "wanted"),
    [
        pytest.param('rag-demo info "$1" > /dev/full', 2, "No space left", marks=FULL),
        ('rag-demo info "$1" | true; exit ${PIPESTATUS[0]}', 1, ""),
        ("rag-demo info $'/nowhere-\\xff-\\e[31m'", 2, r"/nowhere-\udcff-\x1b[31m"),
        ('(ulimit -f 0; rag-demo delete "$1" 0)', 2, "cannot be written"),
        ('rag-demo search "$1" paris --mode bm25 >&-', 0, ""),
    ],
)
def test_stream_error_is_one_line(saved: Path, script: str, code: int, wanted: str) -> None:
    returncode, _, stderr = shell(script, saved)
    assert returncode == code, stderr
    assert wanted in stderr
    assert stderr.count("\n") == (1 if wanted else 0), stderr
    assert stderr.startswith("rag-demo: error: " if wanted else ""), stderr
    assert info(saved)["texts"] == 2


def test_command_without_arguments_shows_help() -> None:
    shown = succeed()
    assert shown.startswith("Usage: rag-demo")
    for command in ("index", "add", "delete", "search", "info", "verify", "evaluate", "demo"):
        assert f"\n  {command} " in shown


def test_missing_packages_are_named() -> None:
    program = f"import sys\nsys.modules['click'] = None\n{IMPORT_MAIN}\nmain()"
    result = run(program, "info", "folder")
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    assert result.stderr.startswith("rag-demo: error: "), str(result)
    assert "pip install '.[rag,model]'" in result.stderr, str(result)
    assert result.stderr.count("\n") == 1, str(result)


def test_ctrl_c_during_import_shows_no_traceback() -> None:
    result = run(
        f"""
        import signal, sys
        class Early:
            def find_spec(name, path, target=None):
                if name == "torch_utils":
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Early)
        {IMPORT_MAIN}
        main()
        """,
        "--version",
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", ""), str(result)


def test_index_says_if_bfloat16_is_faster(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    """Only after it has embedded everything; another dtype needs another index."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    (tmp_path / "x.txt").write_text("paris")
    command = ("index", tmp_path / "x.txt", "--device", "cpu", "--model", tiny_model)
    hint = "bfloat16 is several times faster on this processor: --dtype bfloat16 --yes"
    for dtype in ("float32", "bfloat16"):
        options = ("--out", tmp_path / dtype, "--dtype", dtype)
        assert (hint in succeed(*command, *options)) == (dtype == "float32")
        assert hint not in succeed(*command, *options)


def test_progress_is_shown_on_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("paris")
    command = ("index", tmp_path / "x.txt", "--out", tmp_path / "i", "--model", tiny_model)
    assert "embedding" in rag_demo(*command, on_terminal=True).stderr
    assert rag_demo(*command).stderr == ""
