"""The device of the tests over the stand-in."""

import ctypes
from typing import Any

from tests.torch_utils.gpu.device import MB, Cuda

_WHY = "the stand-in has no kernels, queued work, captures, virtual memory, IPC or NCCL"
_NAMES = """
arrays_of_other_libraries_keep_memory views_and_autograd_graphs_keep_memory
cuda_graph_keeps_its_workspace_and_its_pool release_during_capture_keeps_the_capture_valid
thorough_scope_frees_cuda_graph_pool thorough_release_frees_cuda_graph_in_a_cycle
thorough_scope_frees_compiled_model training_returns_gradients_and_optimizer_state
expandable_segments_are_unmapped thorough_release_empties_registered_pinned_cache
shared_tensor_that_outlives_its_producer_is_reported
process_group_that_was_not_destroyed_is_reported
ordinary_programs
"""


class StandIn(Cuda):
    """torch's allocators; only copies write values, not kernels."""

    model_bytes, large_bytes = 256 * MB, 32 * MB
    skipped = dict.fromkeys((f"test_{name}" for name in _NAMES.split()), _WHY)

    def tensor(self, nbytes: int, value: float = 1.0) -> Any:
        return self.torch.full((nbytes // 4,), value).to(self.torch_name)

    def holds(self, tensor: Any, value: float) -> bool:
        return super().holds(tensor.cpu(), value)

    def set_fault(self, name: str, calls: int = 0) -> None:
        ctypes.CDLL(None).stand_in_set_fault(name.encode(), calls)
