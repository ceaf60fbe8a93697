"""What is piped in, and what comments hide where only some rules are asked for."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from torch_utils.clean_exit_lint import check, cli, python_files
from torch_utils.clean_exit_lint.catalogue import explain

DIRTY = "class A:\n    def __del__(self):\n        import os\n"
HEIR = "from dirty import A\nclass B(A):\n    pass\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, whose settings are not those of a project around it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.clean_exit_lint]\n")
    return tmp_path


def test_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A dash is the standard input, as it is for flake8 and ruff; it is called so in the report."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DIRTY.encode())))
    assert cli.main(["--format", "json", "-"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["path"], found["line"], found["rule"]) == ("-", 3, "import")


def test_nothing_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found in it, also where there is no input at all."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.main(["-"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["-"]) == 0


def test_a_file_that_is_called_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its folder before it, it is a file."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    (folder / "-").write_text(DIRTY)
    assert cli.main(["./-"]) == 1
    assert cli.main(["-"]) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("text", [DIRTY, HEIR])
def test_a_pipe_is_read_once(folder: Path, text: str) -> None:
    """As ``<(command)`` of a shell is; whoever reads it twice waits for ever, or reads nothing."""
    (folder / "dirty.py").write_text(DIRTY)
    os.mkfifo(folder / "pipe")
    writer = threading.Thread(target=(folder / "pipe").write_text, args=(text,), daemon=True)
    writer.start()
    done: list[int] = []
    paths = list(python_files(["pipe", "dirty.py"]))
    reader = threading.Thread(target=lambda: done.append(len(check(paths).findings)), daemon=True)
    reader.start()
    reader.join(60)
    assert done == [1 + (text is DIRTY)]


def test_a_comment_for_a_rule_that_is_not_asked_for(folder: Path) -> None:
    """It is of use, whether it names the rule or none."""
    path = folder / "a.py"
    path.write_text(DIRTY.replace("import os", "import os  # clean-exit-lint: ignore"))
    assert check([str(path)], select=["log"]).findings == ()
    assert check([str(path)], ignore=["import"]).findings == ()
    path.write_text("x = 1  # clean-exit-lint: ignore\n")
    assert [one.rule for one in check([str(path)], select=["log"]).findings] == ["unused-ignore"]
    assert check([str(path)], ignore=["unused-ignore"]).findings == ()


def test_unknown_rules_are_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The same ones, whichever option names it."""
    said = []
    for option in ("--select", "--ignore", "--explain"):
        assert cli.main([option, "nosuch", "a.py"]) == 2
        said.append(capsys.readouterr().err)
    assert len(set(said)) == 1
    assert "unused-ignore" in said[0]


def test_the_help_of_an_unused_comment_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a report says to ask for can be asked for."""
    (folder / "a.py").write_text("x = 1  # clean-exit-lint: ignore[lgo]\n")
    assert cli.main(["--format", "json", "a.py"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["message"] == "there is no rule 'lgo'"
    assert cli.main(found["help"].split()[1:]) == 0
    assert "**Safe.**" in explain("CEX099")
