"""Adapters of peft on one base model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.applications.harness import run_application
from tests.support.programs import ROOT, assert_clean, run

pytestmark = pytest.mark.slow  # The import of peft takes ten seconds of processor time.


def check_lora(python: str, how: str = "scope", mutant: str | None = None) -> None:
    """Retire one of two adapters; the other one and the base compute what they did."""
    facts = run_application("lora_classifiers", how, mutant=mutant, python=python)
    assert facts["retired_alive_mb"] == 0
    assert facts["freed_mb"] > 40
    assert facts["closed"] == ["topic"]
    assert facts["adapters"] == ["mood"]
    assert facts["is_right"]
    assert facts["trains"]
    # At the end everything is released together.
    assert facts["all_closed"] == ["topic", "mood"]
    assert facts["shared_alive_mb"] == 0
    assert facts["grown_mb"] < 60


@pytest.mark.parametrize("how", ["scope", "release"])
def test_retired_adapter_is_freed_and_the_other_still_works(
    applications_python: str, how: str
) -> None:
    check_lora(applications_python, how)


@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(applications_python: str, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check_lora(applications_python, mutant=mutant)


def test_program_of_the_documentation_runs(applications_python: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "peft.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(block)
    done = run(
        tmp_path / "program.py", python=applications_python, env={"PYTHONWARNINGS": "ignore"}
    )
    assert_clean(done)
    assert done.stdout == "['mood'] torch.Size([1, 2])\n"
