"""The rules of docs/architecture.md about imports and files, and that each can be broken."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
from import_graph import Import, arrows, circle, imports_of, modules_of, read

from programs import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("torch_utils", "rag_demo")
MOST_LINES = 400
ALLOWED = {
    wing: set(re.findall(r"`(\w+)`", allowed))
    for wing, allowed in re.findall(r"^\| `(\w+\.\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
}
ADAPTS = {
    "torch_utils.prometheus": {"prometheus_client"},
    "torch_utils.pytest_plugin": {"pytest"},
    "torch_utils.clean_exit.fresh_pytest": {"pytest"},
}
# They lie in a folder of sys.path of their own, and import each other by bare names.
# Programs of their own, which find what they import beside them.
STARTUP = ("torch_utils.clean_exit._startup.", "torch_utils.clean_exit.keeper")


@functools.cache
def imports_within(package: str) -> list[Import]:
    """Every import of a package; read by whoever runs a test, and not by every worker."""
    return read(ROOT / package)


def foreign(imports: list[Import]) -> list[str]:
    """Imports of what is not the standard library's, when torch_utils is imported."""
    return [
        f"{one.importer} imports {one.module}"
        for one in imports
        if not one.is_late
        and not one.importer.startswith(STARTUP)
        and one.module.partition(".")[0]
        not in {"torch_utils", *sys.stdlib_module_names, *ADAPTS.get(one.importer, ())}
    ]


def is_private(one: Import) -> bool:
    """Whether a module or a name with an underscore is imported, but for dunders."""
    names = [*one.module.split("."), one.name or ""]
    return any(name.startswith("_") and not name.endswith("__") for name in names)


def uninvited(imports: list[Import], allowed: dict[str, set[str]]) -> list[str]:
    """Imports by a wing of what its row of the table does not name."""
    found = []
    for one in imports:
        package, wing = (*one.importer.split("."), "")[:2]
        own = f"{package}.{wing}"
        full = f"{one.module}.{one.name}" if one.module == package else one.module
        if own not in allowed or not full.startswith(f"{package}."):
            continue
        room = full.split(".")[1]
        if room != wing and room not in allowed[own]:
            found.append(f"{one.importer} imports {full}")
    return found


def intruders(imports: list[Import]) -> list[str]:
    """Imports of a private name of another module."""
    return [
        f"{one.importer} imports {one.name} of {one.module}"
        for one in imports
        if re.match(r"_(?!_)", one.name or "")
        and one.module.count(".") > 0
        and one.importer != one.module
    ]


def test_torch_utils_imports_the_standard_library_only() -> None:
    """At import time; what is imported late is for functions that are called."""
    assert foreign(imports_within("torch_utils")) == []


def test_torch_utils_does_not_know_rag_demo() -> None:
    """Not even late."""
    assert [one for one in imports_within("torch_utils") if one.module.startswith("rag_demo")] == []


def test_rag_demo_uses_public_names_only() -> None:
    """Of torch_utils: no module or name with an underscore."""
    used = [one for one in imports_within("rag_demo") if one.module.startswith("torch_utils")]
    assert used
    assert [one for one in used if is_private(one)] == []


@pytest.mark.parametrize(
    "package",
    [
        "torch_utils",
        pytest.param(
            "rag_demo",
            marks=pytest.mark.skipif(
                not (ROOT / "rag_demo" / "encoding").is_dir(), reason="rag_demo has no wings yet"
            ),
        ),
    ],
)
def test_wings(package: str) -> None:
    """No circles; the wings are those of the page, and import what it allows."""
    assert circle(arrows(imports_within(package), set(modules_of(ROOT / package)))) == []
    wings = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert wings == {wing.split(".")[1] for wing in ALLOWED if wing.startswith(f"{package}.")}
    assert uninvited(imports_within(package), ALLOWED) == []


def test_nobody_enters_by_a_private_name() -> None:
    """A name with an underscore is its own module's."""
    assert intruders([one for package in PACKAGES for one in imports_within(package)]) == []


def too_long(folder: Path) -> list[str]:
    """Files that are to be split by theme."""
    files = [path for path in folder.rglob("*.py") if ".venv" not in path.parts]
    assert files
    return [path.name for path in files if path.read_bytes().count(b"\n") > MOST_LINES]


@pytest.mark.parametrize("folder", [*PACKAGES, "_torch_cleanup", "tests", "benchmarks"])
def test_files_are_short(folder: str) -> None:
    """Tests and benchmarks too."""
    assert too_long(ROOT / folder) == []


def test_rooms_of_the_page_exist() -> None:
    """What the picture of torch_utils names is there."""
    picture = PAGE.partition("```text\n")[2].partition("rag_demo/ ")[0]
    rooms = re.findall(r"[\w/]+\.py|_?\w+/(?= )", picture)
    assert len(rooms) > 15
    for room in set(rooms) - {"torch_utils/"}:
        assert (ROOT / "torch_utils" / room).exists(), room


# Controls: each rule is broken by one line, and found.

BROKEN = {
    "a package at import time": (foreign, "import numpy"),
    "torch behind a try": (foreign, "try:\n    import torch\nexcept ImportError: pass"),
    "in a class": (foreign, "class C:\n    from torch.nn import Module"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_foreign_import_is_found(name: str) -> None:
    """Wherever it stands, if importing the module runs it."""
    check, source = BROKEN[name]
    assert len(check(imports_of("torch_utils.devices", source))) == 1


def test_late_and_typing_imports_are_not_foreign() -> None:
    """What importing the module does not run."""
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "else:\n    import os\ndef f():\n    import numpy\n"
    )
    found = imports_of("torch_utils.devices", source)
    assert foreign(found) == []
    assert [(one.module, one.is_late) for one in found] == [
        ("typing", False),
        ("os", False),
        ("numpy", True),
    ]


def test_private_use_is_found() -> None:
    """By module and by name, and not where it is public."""
    for line, private in {
        "from torch_utils import _registry": True,
        "import torch_utils._scope": True,
        "from torch_utils.release import _find": True,
        "from torch_utils import release, __version__": False,
    }.items():
        assert any(map(is_private, imports_of("rag_demo.index", line))) is private, line
    line = "from torch_utils._releasing.plan import _find"
    assert intruders(imports_of("torch_utils.release", line))
    assert not intruders(imports_of("torch_utils.release", "from torch_utils import _runtime"))


def test_uninvited_guest_is_found() -> None:
    """In each way of writing it; its own files and what is allowed are none."""
    allowed = {"p.wing": {"errors"}}
    for line, count in {
        "from p import cli": 1,
        "import p.cli": 1,
        "from p.cli import main": 1,
        "from ..cli import main": 1,
        "def f():\n    from p.cli import main": 1,
        "from p.errors import E": 0,
        "from p import errors": 0,
        "from p.wing.other import f": 0,
        "from .other import f": 0,
    }.items():
        assert len(uninvited(imports_of("p.wing.a", line), allowed)) == count, line


def test_circle_is_found(tmp_path: Path) -> None:
    """Late, and through a third; a diamond is none."""
    folder = tmp_path / "p"
    folder.mkdir()
    for name, source in {
        "__init__": "",
        "a": "from p import b, d",
        "b": "from p.c import x",
        "c": "def f():\n    from p import a",
        "d": "import p.c",
    }.items():
        (folder / f"{name}.py").write_text(source)
    assert circle(arrows(read(folder), set(modules_of(folder)))) == ["p.a", "p.b", "p.c"]
    (folder / "c.py").write_text("import os")
    assert circle(arrows(read(folder), set(modules_of(folder)))) == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    """At one line more than is allowed, in any folder below."""
    (tmp_path / "below").mkdir()
    (tmp_path / "fine.py").write_text("\n" * MOST_LINES)
    (tmp_path / "below" / "long.py").write_text("\n" * (MOST_LINES + 1))
    assert too_long(tmp_path) == ["long.py"]
