"""The command: exit codes, formats, settings, ignores, the baseline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import IMPORT_PATH
from torch_utils.clean_exit_lint import RULES
from torch_utils.clean_exit_lint.cli import main
from torch_utils.clean_exit_lint.settings import read_settings

from .sarif_schema import SCHEMA

DIRTY = """class A:
    def __del__(self):
        self.close()

    def close(self):
        import os
"""
COMMAND = [sys.executable, "-m", "torch_utils.clean_exit_lint"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a dirty and a clean file, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dirty.py").write_text(DIRTY)
    (tmp_path / "clean.py").write_text("x = 1\n")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, env=env
    )


def test_exit_codes_and_text(folder: Path) -> None:
    """0, 1 and 2; a finding has its line, a caret and what to read."""
    done = run("clean.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "clean-exit-lint: nothing found in 1 file\n"
    done = run(".")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        "dirty.py:6:9: import: __del__ -> close: import os\n"
        "  | import os\n"
        "  | ^^^^^^^^^\n"
        "  see clean-exit-lint --explain import\n"
        "\n"
        "clean-exit-lint: 1 finding in 2 files: 1 import\n"
    )
    for wrong in ([], ["nowhere.py"], ["--select", "no-such", "."], ["--format", "xml", "."]):
        done = run(*wrong)
        assert (done.returncode, done.stdout) == (2, ""), wrong
        assert done.stderr.startswith("clean-exit-lint: "), wrong
        assert "Traceback" not in done.stderr


def test_nothing_is_run_or_imported(folder: Path) -> None:
    """A file that would end the program, and a module of the name of one that is imported here."""
    (folder / "dirty.py").write_text(f"raise SystemExit(7)\n{DIRTY}")
    (folder / "json.py").write_text("raise SystemExit(8)\n")
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    code = (
        "import sys; sys.path.pop(0); from torch_utils.clean_exit_lint.cli import main; main(['.'])"
    )
    command = [
        sys.executable,
        "-c",
        f"{code}; print(sorted({{'dirty', 'torch'}} & set(sys.modules)))",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "1 import" in done.stdout
    assert done.stdout.endswith("[]\n")


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The schema of the documentation, and nothing else."""
    code, said, _ = output(capsys, "--format", "json", ".")
    assert code == 1
    assert json.loads(said) == {
        "schema_version": 1,
        "findings": [
            {
                "rule": "import",
                "path": "dirty.py",
                "line": 6,
                "column": 9,
                "message": "__del__ -> close: import os",
                "trace": ["__del__", "close"],
                "help": "clean-exit-lint --explain import",
            }
        ],
    }
    code, said, _ = output(capsys, "--format", "json", "clean.py")
    assert (code, json.loads(said)) == (0, {"schema_version": 1, "findings": []})


def sarif_errors(data: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [SCHEMA]
    if path := os.environ.get("SARIF_SCHEMA"):
        schemas.append(json.loads(Path(path).read_text()))
    return [
        error.message
        for schema in schemas
        for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(data)
    ]


def test_sarif(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid, with the way there as a code flow, and what was not read as a notification."""
    (folder / "ä b.py").write_text("def (:\n")
    (folder / "dirty 2.py").write_text(f"{DIRTY}x = 1  # clean-exit-lint: ignore\n")
    (folder / "ä b.py").write_text("__del__ = (\n")
    code, said, noted = output(capsys, "--format", "sarif", ".")
    data = json.loads(said)
    assert code == 1
    assert "note: " in noted
    assert sarif_errors(data) == []
    (run_,) = data["runs"]
    assert len(run_["tool"]["driver"]["rules"]) == len(RULES) + 1
    first, unused, last = run_["results"]
    assert first["ruleId"] == last["ruleId"] == "import"
    assert unused["ruleId"] == "unused-ignore"
    for result in run_["results"]:
        assert run_["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    steps = last["codeFlows"][0]["threadFlows"][0]["locations"]
    assert [step["location"]["message"]["text"] for step in steps][:2] == ["__del__", "close"]
    uri = first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "dirty%202.py"
    told = run_["invocations"][0]["toolExecutionNotifications"]
    assert len(told) == 1


def test_sarif_errors_are_seen() -> None:
    """A control: a run without results, and a key that is not in the standard."""
    assert sarif_errors({"version": "2.1.0", "runs": [{}]})
    assert sarif_errors({"version": "2.1.0", "runs": [], "more": 1})
    assert sarif_errors({"version": "2.0.0", "runs": []})


def test_github(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One annotation a finding; what ends a property in a path is written otherwise."""
    (folder / "a,b:c.py").write_text(DIRTY)
    code, said, _ = output(capsys, "--format", "github", ".")
    lines = said.splitlines()
    assert code == 1
    assert lines[0].startswith("::error file=a%2Cb%3Ac.py,line=6,col=9,title=")
    assert lines[1].endswith("import os (see clean-exit-lint --explain import)")


def test_select_and_ignore(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By id and by code, with commas and repeated."""
    (folder / "dirty.py").write_text(DIRTY + "        print(1)\n        assert os\n")

    def rules(*arguments: str) -> set[str]:
        said = json.loads(output(capsys, "--format", "json", *arguments, ".")[1])
        return {finding["rule"] for finding in said["findings"]}

    assert rules() == {"import", "log", "raise"}
    assert rules("--select", "import,CEX006") == {"import", "log"}
    assert rules("--select", "import", "--select", "raise") == {"import", "raise"}
    assert rules("--ignore", "CEX001,log") == {"raise"}
    assert rules("--select", "log,raise", "--ignore", "log") == {"raise"}


IGNORED = """class A:
    def __del__(self):
        import os  # clean-exit-lint: ignore[import]
        import re  # noqa  # clean-exit-lint: ignore
        import io  # clean-exit-lint: ignore[log, import]
        from json import (
            dumps,  # clean-exit-lint: ignore[import]
        )
        text = "# clean-exit-lint: ignore[import]"
x = 1  # clean-exit-lint: ignore[import]
y = 1  # clean-exit-lint: ignore
z = 1  # clean-exit-lint: ignore[no-such]
"""


def test_ignores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On any line of what was found; what hides nothing is reported, what is text is none."""
    (folder / "dirty.py").write_text(IGNORED)
    code, said, _ = output(capsys, "--format", "json", ".")
    found = [(one["rule"], one["line"]) for one in json.loads(said)["findings"]]
    assert code == 1
    assert found == [("unused-ignore", line) for line in (5, 10, 11, 12)]
    code, said, _ = output(capsys, "--format", "json", "--ignore", "log,import", ".")
    found = [(one["rule"], one["line"]) for one in json.loads(said)["findings"]]
    assert ("unused-ignore", 5) not in found  # What is not checked cannot be said to be unused.


def test_baseline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was there is not reported, wherever it has moved; one more of it is."""
    code, said, _ = output(capsys, "--write-baseline", "known.json", ".")
    assert (code, said) == (0, "clean-exit-lint: 1 findings are in known.json now\n")
    (folder / "dirty.py").write_text("# moved\n\n" + DIRTY)
    assert output(capsys, "--baseline", "known.json", ".")[0] == 0
    (folder / "dirty.py").write_text(DIRTY + "\n\n" + DIRTY.replace("A", "B"))
    code, said, _ = output(capsys, "--baseline", "known.json", ".")
    assert code == 1
    assert "1 finding in" in said
    (folder / "dirty.py").write_text("")
    code, said, noted = output(capsys, "--baseline", "known.json", ".")
    assert code == 0
    assert "1 findings of the baseline are gone" in noted
    for wrong in ("[]", "{", '{"version": 9, "findings": []}', '{"version": 1, "findings": [1]}'):
        (folder / "wrong.json").write_text(wrong)
        code, said, noted = output(capsys, "--baseline", "wrong.json", ".")
        assert (code, said) == (2, ""), wrong
        assert "baseline" in noted
    assert output(capsys, "--baseline", "gone.json", ".")[0] == 2
    assert output(capsys, "--write-baseline", "no/such/folder.json", ".")[0] == 2


def test_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults of a project, from its folder or one below; options come before them."""
    toml = folder / "pyproject.toml"
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    toml.write_text('[tool.clean_exit_lint]\npaths = ["dirty.py"]\nignore = ["import"]\n')
    assert output(capsys)[0] == 0
    toml.write_text('[tool.clean-exit-lint]\nexclude = ["dirty.py"]\nformat = "json"\n')
    code, said, _ = output(capsys, ".")
    assert (code, json.loads(said)["findings"]) == (0, [])
    assert output(capsys, "--format", "github", "dirty.py")[0] == 1
    toml.write_text('[tool.clean_exit_lint]\nselect = ["log"]\n')
    assert output(capsys, ".")[0] == 0
    assert output(capsys, "--select", "import", ".")[0] == 1
    below = folder / "below"
    below.mkdir()
    toml.write_text('[tool.clean_exit_lint]\nbaseline = "known.json"\npaths = ["dirty.py"]\n')
    settings = read_settings(below)
    assert settings == {"baseline": "known.json", "paths": ["dirty.py"]}


@pytest.mark.parametrize(
    "table",
    [
        "[tool.clean_exit_lint]\nno-such = 1",
        '[tool.clean_exit_lint]\nselect = "import"',
        "[tool.clean_exit_lint]\nselect = [1]",
        '[tool.clean_exit_lint]\nselect = ["no-such"]',
        "[tool.clean_exit_lint]\nformat = 3",
        '[tool.clean_exit_lint]\nformat = "xml"',
        "[tool]\nclean_exit_lint = 1",
        "[tool.clean_exit_lint]\n[tool.clean-exit-lint]",
        "[tool.clean_exit_lint",
    ],
)
def test_wrong_settings(table: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Are wrong usage, with the reason."""
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    (folder / "pyproject.toml").write_text(table)
    code, said, noted = output(capsys, ".")
    assert (code, said) == (2, "")
    assert noted.startswith("clean-exit-lint: ")


def test_other_tables_do_not_matter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another tool's, however broken."""
    (folder / "pyproject.toml").write_text("[[[")
    assert output(capsys, "clean.py")[0] == 0


def test_output_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Has the report; the summary stays here."""
    code, said, _ = output(capsys, "--format", "json", "--output", "report.json", ".")
    assert (code, said) == (1, "clean-exit-lint: 1 finding in 2 files: 1 import\n")
    assert len(json.loads((folder / "report.json").read_text())["findings"]) == 1
    assert output(capsys, "--output", "no/such/folder", ".")[0] == 2


def test_terminals(folder: Path) -> None:
    """One that cannot show what a file has; one that nobody reads; colours when asked for."""
    (folder / "dirty.py").write_text(
        "class A:\n    def __del__(self): 'ä\\'→'; import os\n", "utf-8"
    )
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "."], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\\u2192" in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    many = [*COMMAND, *["dirty.py"]]
    done = subprocess.run(many, stdout=writing, stderr=subprocess.PIPE, check=False, env=env)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
    assert "\033[" in run("--color", "always", ".").stdout
    assert "\033[" not in run(".").stdout
