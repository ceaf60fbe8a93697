"""Controls of the tests over the stand-in: defects by which a test must fail.

``controls.py NAME JOURNAL TEST`` replaces a function of torch, so that a release misbehaves, and
runs one test. `run.py` switches on faults of the stand-in by environment variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Control:
    """A defect, the test that it must break, and the text of that failure."""

    test: str
    says: str
    env: Mapping[str, str] = field(default_factory=dict)
    breaks: Callable[[], None] = lambda: None


def _hide_captures() -> None:
    import torch.cuda

    torch.cuda.is_current_stream_capturing = lambda: False


def _keep_workspaces() -> None:
    import torch

    vars(vars(torch)["_C"])["_cuda_clearCublasWorkspaces"] = lambda: None


def _keep_cache() -> None:
    import torch.cuda

    torch.cuda.empty_cache = lambda: None


CONTROLS: Mapping[str, Control] = {
    "a driver that keeps what it is given back": Control(
        "test_memory_is_back::test_stored_oom_error_keeps_no_memory",
        "CUDA out of memory",
        env={"CUDA_STAND_IN_FAULT": "keeps-freed-memory"},
    ),
    "events that say too soon that work is done": Control(
        "test_shared_use::test_pending_copy_to_device_survives_release",
        "assert device.holds(result, 1)",
        env={"CUDA_STAND_IN_FAULT": "done-too-soon"},
    ),
    "a driver that says of every device that it is in use": Control(
        "test_no_context::test_other_gpus_get_no_context",
        "assert set(t.memory_snapshot().devices)",
        env={"CUDA_STAND_IN_FAULT": "every-device-in-use"},
    ),
    "a check that asks the driver": Control(
        "test_no_context::test_checks_and_cleanups_create_no_context",
        "something has opened the driver",
        env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
    ),
    "a fork after such a check": Control(
        "test_no_context::test_forked_child_can_use_cuda_after_checks",
        "Cannot re-initialize CUDA in forked subprocess",
        env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
    ),
    "a release that empties caches during a capture": Control(
        "test_shared_use::test_release_during_capture_keeps_the_capture_valid",
        "operation failed due to a previous error during capture",
        breaks=_hide_captures,
    ),
    "a release that leaves the cuBLAS workspaces": Control(
        "test_memory_is_back::test_scope_returns_all_device_memory",
        "assert device.reserved_bytes() == before",
        breaks=_keep_workspaces,
    ),
    "a release that leaves torch's cache": Control(
        "test_memory_is_back::test_release_of_a_model_returns_its_memory",
        "assert device.reserved_bytes() == before",
        breaks=_keep_cache,
    ),
}


if __name__ == "__main__":
    sys.path[:1] = [str(TESTS.parent), str(TESTS), str(TESTS / "torch_utils")]
    from gpu import plain

    CONTROLS[sys.argv[1]].breaks()
    sys.exit(plain.main("stand-in", Path(sys.argv[2]), sys.argv[3]))
