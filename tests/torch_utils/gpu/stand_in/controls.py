"""Controls of the tests over the stand-in: defects by which a test must fail.

``controls.py NAME JOURNAL`` replaces a function of torch and runs the test of that control.
`run.py` switches on faults of the stand-in by environment variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Control:
    """A defect, the test that it must break, and the text of that failure."""

    test: str
    says: str
    env: Mapping[str, str] = field(default_factory=dict)
    breaks: Callable[[Any], None] = lambda torch: None


CONTROLS: Mapping[str, Control] = {
    "a driver that keeps what it is given back": Control(
        "test_memory_is_back::test_stored_oom_error_keeps_no_memory",
        "CUDA out of memory",
        env={"CUDA_STAND_IN_FAULT": "keeps-freed-memory"},
    ),
    "a driver that says of every device that it is in use": Control(
        "test_no_context::test_checks_and_cleanups_create_no_context",
        "assert set(t.memory_snapshot().devices)",
        env={"CUDA_STAND_IN_FAULT": "every-device-in-use"},
    ),
    "a check that asks the driver": Control(
        "test_no_context::test_checks_and_cleanups_create_no_context",
        "something has called cuInit",
        env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
    ),
    "a release that leaves the cuBLAS workspaces": Control(
        "test_memory_is_back::test_scope_returns_all_device_memory",
        "assert device.reserved_bytes() == before",
        breaks=lambda torch: setattr(
            vars(torch)["_C"], "_cuda_clearCublasWorkspaces", lambda: None
        ),
    ),
    "a release that leaves torch's cache": Control(
        "test_memory_is_back::test_release_of_a_model_returns_its_memory",
        "assert device.reserved_bytes() == before",
        breaks=lambda torch: setattr(torch.cuda, "empty_cache", lambda: None),
    ),
}


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT)]
    import torch

    from tests.torch_utils.gpu import plain

    control = CONTROLS[sys.argv[1]]
    control.breaks(torch)
    part = plain.part_of(dict(plain.tests())[control.test])
    plain.main("stand-in", Path(sys.argv[2]), part, control.test)
