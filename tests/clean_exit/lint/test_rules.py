"""The rules find what the comments of dirty programs name; files that cannot be read get a note.

`rules` has a file of programs for each rule. ``### dirty: NAME`` or ``### clean: NAME`` begins a
program. At the end of a line, ``# <- RULE`` names a rule that has to be found there.
"""

import re
from pathlib import Path

import pytest

from clean_exit.lint import RULES, python_files
from clean_exit.lint import check as lint


def read_programs(rule: str) -> dict[str, str]:
    text = (Path(__file__).parent / "rules" / f"{rule}.txt").read_text("utf-8")
    _, *parts = re.split(r"^### (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_findings_are_where_the_marks_are(rule: str, tmp_path: Path) -> None:
    """With all rules, with this rule alone, and without it."""
    path, programs = tmp_path / "program.py", read_programs(rule)
    assert sum(name.startswith("dirty: ") for name in programs) >= 4
    for name, program in programs.items():
        path.write_text(program, encoding="utf-8")
        marks = {
            (number, found)
            for number, line in enumerate(program.splitlines(), start=1)
            for match in re.finditer(r"# <- ([\w -]+)$", line)
            for found in match[1].split()
        }
        assert bool(marks) == name.startswith("dirty: "), name
        own = {mark for mark in marks if mark[1] == rule}
        for select, ignore, expected in (
            ((), (), marks),
            ([rule], (), own),
            ((), [rule], marks - own),
        ):
            findings = lint([str(path)], select=select, ignore=ignore).findings
            assert {(one.line, one.rule) for one in findings} == expected, name


DIRTY = "class A:\n    def __del__(self):\n        import os\n"


def test_unreadable_file_gets_a_note_and_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text(f"{DIRTY}def (:\n")
    (tmp_path / "null.py").write_bytes(b"x = '__del__\0'\n")
    (tmp_path / "encoding.py").write_bytes(b"# coding: no-such\n__del__ = 1\n")
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff' # __del__\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "good.py").write_text(DIRTY)
    result = lint(python_files([str(tmp_path)]))
    assert [Path(one.path).name for one in result.findings] == ["good.py"]
    lines = {Path(note.path).name: note.line for note in result.notes}
    assert set(lines) == {"syntax.py", "null.py", "encoding.py", "bytes.py", "gone.py"}
    assert lines["syntax.py"] == 4


def test_columns_count_characters_in_every_encoding(tmp_path: Path) -> None:
    source = "class A:\n    def __del__(self): 'äöü→'; import os\n"
    (tmp_path / "utf8.py").write_text(source, encoding="utf-8-sig")
    latin = "# -*- coding: latin-1 -*-\n" + source.replace("→", ".")
    (tmp_path / "latin.py").write_text(latin, encoding="latin-1")
    (tmp_path / "lines.py").write_bytes(source.replace("\n", "\r\n").encode())
    result = lint(python_files([str(tmp_path)]))
    assert {one.column for one in result.findings} == {32}
    assert {one.code_line.strip()[-9:] for one in result.findings} == {"import os"}


def test_hidden_folders_caches_and_environments_are_skipped(tmp_path: Path) -> None:
    for place in ("a", ".hidden", "__pycache__", "venv/lib", "node_modules", "skipped"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "x.py").write_text(DIRTY)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    script = tmp_path / "script"
    script.write_text(DIRTY)
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    assert list(python_files([str(tmp_path)], ["skipped"])) == [str(tmp_path / "a" / "x.py")]
    assert list(python_files([str(script), str(script)])) == [str(script)]
    with pytest.raises(ValueError, match="does not exist"):
        list(python_files([str(tmp_path / "nowhere")]))
