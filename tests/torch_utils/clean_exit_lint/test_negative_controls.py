"""Each rule switched off: what it is for is then missed, so that the tests can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_utils.clean_exit_lint import RULES, check, lint
from torch_utils.clean_exit_lint.rules import AllRules

from .dirty import DIRTY
from .test_corpus import expected, found

MODULES = {
    "import": "imports",
    "global": "global_names",
    "half-built": "half_built",
    "wait": "wait",
    "device": "device",
    "log": "log",
    "raise": "raising",
    "register": "register",
    "explicit-call": "explicit_call",
    "finalize-keeps-alive": "finalize_keeps_alive",
    "atexit-keeps-alive": "atexit_keeps_alive",
    "async": "coroutines",
    "bare-except": "bare_except",
}


def switch_off(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Take a rule's functions out of all lists and return how many there were."""
    ending = f".rules.{MODULES[name]}"
    taken = 0
    for hook in ("_calls", "_names", "_attributes", "_statements", "_withs"):
        functions = getattr(AllRules, hook)
        left = tuple(one for one in functions if not one.__module__.endswith(ending))
        taken += len(functions) - len(left)
        monkeypatch.setattr(AllRules, hook, left)
    sites = tuple(one for one in lint._SITE_RULES if not one.__name__.endswith(ending))
    taken += len(lint._SITE_RULES) - len(sites)
    monkeypatch.setattr(lint, "_SITE_RULES", sites)
    return taken


@pytest.mark.parametrize("name", RULES)
def test_without_the_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is found in any dirty file; what other rules find there stays."""
    dirty = {
        key: text for key, text in DIRTY.items() if name in dict(map(reversed, expected(text)))
    }
    assert dirty
    assert switch_off(name, monkeypatch) > 0
    for text in dirty.values():
        wanted = expected(text)
        seen = found(tmp_path / "dirty.py", text)
        assert not [one for one in seen if one[1] == name]
        assert {one for one in wanted if one[1] != name} <= seen


@pytest.mark.parametrize("name", RULES)
def test_ignored(name: str, tmp_path: Path) -> None:
    """The same by the option: it hides that rule, and no other."""
    text = next(text for text in DIRTY.values() if name in dict(map(reversed, expected(text))))
    path = tmp_path / "dirty.py"
    every = found(path, text)
    left = {(one.line, one.rule) for one in check([str(path)], ignore=[name]).findings}
    assert left == {one for one in every if one[1] != name}
