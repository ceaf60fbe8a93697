"""The linter on real packages: what was judged to be right is found, and nothing that was not.

Each row of judged_findings.json was looked at by a person, in one version of a package or of the
standard library. The versions that are here are checked.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from support.clean_exit import lint_as_command

Row = dict[str, str]
Key = tuple[str, str, str]
"""A path, a rule and a line of code."""

ROWS: list[Row] = json.loads(Path(__file__).with_name("judged_findings.json").read_text())["rows"]
SOURCES = sorted({row["of"] for row in ROWS})
AT_LEAST_CHECKED = 20
MAY_BE_MISSED = 4


def key(row: Row) -> Key:
    return row["path"], row["rule"], row["code"].strip()


def is_cpython(source: str) -> bool:
    return source.startswith("CPython ")


def find_folder(source: str) -> Path | None:
    """Return the folder that a package, or a standard library, of this very version is in."""
    name, _, wanted = source.rpartition(" ")
    if is_cpython(source):
        here = ".".join(map(str, sys.version_info[:3]))
        minor = ".".join(wanted.split(".")[:2])
        library = Path(f"~/.pyenv/versions/{wanted}/lib/python{minor}").expanduser()
        library = Path(sysconfig.get_path("stdlib")) if wanted == here else library
        return library if library.is_dir() else None
    try:
        return Path(sysconfig.get_path("purelib")) if version(name) == wanted else None
    except PackageNotFoundError:
        return None


def compare(source: str, folder: Path, **options: Collection[str]) -> tuple[set[Key], set[Key]]:
    """Return the rows of a source that are missed, and what is found but was never judged."""
    rows = [row for row in ROWS if row["of"] == source]
    # What several standard libraries have alike is a row of the newest one only.
    judged = {key(row) for row in ROWS if row["of"] == source or is_cpython(row["of"])}
    paths = {row["path"] for row in rows}
    tops = {path.split("/")[0] for path in paths}  # Whole packages: a way may lead through others.
    options["exclude"] = ["test", "tests"]
    findings, _ = lint_as_command([folder / top for top in sorted(tops)], **options)
    found = {
        (Path(one.path).relative_to(folder).as_posix(), one.rule, one.code) for one in findings
    }
    wanted = {key(row) for row in rows if not row["judgement"].startswith("wrong")}
    return wanted - found, {one for one in found - judged if one[0] in paths}


@pytest.mark.slow
def test_judged_findings() -> None:
    folders = {source: find_folder(source) for source in SOURCES}
    here = {source: folder for source, folder in folders.items() if folder is not None}
    assert sum(row["of"] in here for row in ROWS) >= AT_LEAST_CHECKED, f"only {sorted(here)}"
    missed, unjudged = set(), set()
    for source, folder in here.items():
        of_source = compare(source, folder)
        missed |= {(source, *one) for one in of_source[0]}
        unjudged |= {(source, *one) for one in of_source[1]}
    assert len(missed) <= MAY_BE_MISSED, missed
    assert not unjudged
    if absent := [source for source in SOURCES if is_cpython(source) and source not in here]:
        pytest.skip(f"all that is here is right, but there is no {', '.join(absent)}")


def test_a_rule_that_is_gone_is_missed() -> None:
    """The control, with the smallest package that is here."""
    rules = {row["of"]: row["rule"] for row in ROWS if not row["judgement"].startswith("wrong")}
    for source in ("fsspec 2026.9.0", "hypothesis 6.170.15", "openai 3.54.0"):
        if source in rules and (folder := find_folder(source)):
            assert compare(source, folder) == (set(), set())
            missed, _ = compare(source, folder, ignore=[rules[source]])
            assert {rule for _, rule, _ in missed} == {rules[source]}
            return
    pytest.skip("none of the small packages is here in the version that was judged")
