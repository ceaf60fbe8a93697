"""What a model counts with in a pool, when its load also imports what it needs."""

from __future__ import annotations

import pytest

from programs import assert_clean, run_forked

PROGRAM = """
import sys, tempfile
from pathlib import Path
import torch
from torch_utils import ModelPool, NoRoomError

class Untold:  # Nothing that a release could count.
    def __init__(self):
        self.memory = b"x" * (4 << 20)

with tempfile.TemporaryDirectory() as folder:
    sys.path.insert(0, folder)
    Path(folder, "large_library.py").write_text("memory = b'x' * (200 << 20)")

    def load():
        import large_library
        return {model}

    with ModelPool(budget_bytes=100 << 20) as pool:
        pool.add("model", load)
        for _ in range(3):
            try:
                with pool.lease("model"):
                    print(pool.status()["model"].nbytes >> 20 < 50)
            except NoRoomError as error:
                print("no room" in str(error), "it needs 2" in str(error))
            else:
                pool.unload("model")
"""


@pytest.mark.parametrize(
    ("model", "says"),
    [("torch.nn.Linear(1024, 1024)", ["True"] * 3), ("Untold()", ["True True", "True", "True"])],
)
def test_imports_are_no_model(model: str, says: list[str]) -> None:
    """Tensors are counted instead; where there are none, the next load is measured anew."""
    done = run_forked(PROGRAM.format(model=model))
    assert_clean(done)
    assert done.stdout.splitlines() == says
