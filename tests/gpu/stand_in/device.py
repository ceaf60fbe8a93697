"""The device of the tests over the stand-in."""

from __future__ import annotations

from typing import Any

from gpu.device import MB, Cuda

_NUMBERS = "what kernels compute: over the stand-in they do nothing"
_NCCL = "NCCL, which asks the driver for more than the stand-in has"
SKIPPED = {
    "test_shared_use::test_arrays_of_other_libraries_keep_memory": "CuPy brings its own kernels",
    "test_shared_use::test_views_and_autograd_graphs_keep_memory": _NUMBERS,
    "test_shared_use::test_cuda_graph_replays_after_thorough_release": _NUMBERS,
    "test_shared_use::test_cuda_graph_keeps_its_pool": _NUMBERS,
    "test_clean_exit::test_process_group_that_was_not_destroyed_is_reported": _NCCL,
    "test_clean_exit::test_destroyed_process_group_is_not_reported": _NCCL,
}


class StandIn(Cuda):
    """torch's allocators, streams and graphs; only copies write values, not kernels."""

    model_bytes, large_bytes = 256 * MB, 32 * MB
    skipped = SKIPPED

    def tensor(self, nbytes: int, value: float = 1.0) -> Any:
        import torch

        return torch.full((nbytes // 4,), value).to(self.torch_name)

    def compiled(self, model: Any) -> Any:
        """Compile a model to CUDA graphs, without the kernels of Inductor."""
        import torch

        return torch.compile(model, backend="cudagraphs")

    def holds(self, tensor: Any, value: float) -> bool:
        return super().holds(tensor.cpu(), value)
