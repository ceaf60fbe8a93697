"""What the tests ask of a device, asked of torch over the stand-in."""

from __future__ import annotations

from typing import Any

from gpu.device import MB, Cuda

_NUMBERS = "what kernels compute: over the stand-in they do nothing"
_NCCL = "NCCL, which asks the driver for more than the stand-in has"
SKIPPED = {
    "test_shared_use::test_another_library_keeps_its_memory": "CuPy, which brings its own kernels",
    "test_shared_use::test_views_and_graphs_keep_their_memory": _NUMBERS,
    "test_shared_use::test_a_cuda_graph_replays_what_it_captured": _NUMBERS,
    "test_shared_use::test_a_cuda_graph_keeps_what_it_writes_to": _NUMBERS,
    "test_clean_exit::test_group_that_is_not_destroyed": _NCCL,
    "test_clean_exit::test_group_that_is_destroyed": _NCCL,
}


class StandIn(Cuda):
    """torch's own allocators, streams and graphs; values arrive by copies, never by kernels."""

    model_bytes, large_bytes = 256 * MB, 32 * MB
    skipped = SKIPPED

    def tensor(self, nbytes: int, value: float = 1.0) -> Any:
        import torch

        return torch.full((nbytes // 4,), value).to(self.torch_name)

    def compiled(self, model: Any) -> Any:
        """Compile to CUDA graphs, with the trees of their pools, and without Inductor's kernels."""
        import torch

        return torch.compile(model, backend="cudagraphs")

    def holds(self, tensor: Any, value: float) -> bool:
        return super().holds(tensor.cpu(), value)
