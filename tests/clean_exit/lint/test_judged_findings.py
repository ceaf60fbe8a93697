"""The linter on real packages: it finds what was judged, and nothing that was not.

Each row of judged_findings.json was looked at, in one version of a package. The versions that are
here are checked.
"""

from __future__ import annotations

import json
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.support.clean_exit import lint_as_command

JUDGED = json.loads(Path(__file__).with_name("judged_findings.json").read_text("utf-8"))
AT_LEAST_CHECKED = 5


def test_nine_tenths_of_what_a_person_would_fix_are_found() -> None:
    fix = [row["found"] for row in JUDGED["rows"] if row["judgement"].startswith("fix")]
    assert (len(fix), sum(fix)) == (JUDGED["fix"], JUDGED["fix_found"])
    assert sum(fix) >= 0.9 * len(fix)


def is_here(of: str) -> bool:
    name, _, wanted = of.rpartition(" ")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


@pytest.mark.slow
def test_judged_findings() -> None:
    folder = Path(sysconfig.get_path("purelib"))
    rows = [row for row in JUDGED["rows"] if is_here(row["of"])]
    if len(rows) < AT_LEAST_CHECKED:
        pytest.skip("the packages are not here in the versions that were judged")
    tops = {row["path"].split("/")[0] for row in rows}
    findings, _ = lint_as_command([folder / top for top in sorted(tops)], exclude=["tests"])
    found = {
        (Path(one.path).relative_to(folder).as_posix(), one.line, one.rule) for one in findings
    }
    assert found == {(row["path"], row["line"], row["rule"]) for row in rows if row["found"]}
