"""Programs that end or fork with CUDA in use release each model once, silently."""

from typing import Any

RESOURCE = """
import atexit, gc, os, sys
import torch, torch_utils as t
class Model(t.Resource):
    def __init__(self):
        self.model = device.model(1 << 20)
    def _release(self):
        os.write(1, b"released\\n")
        model, self.model = self.model, None
        t.release(model)
"""


def run(device: Any, program: str) -> None:
    """Run a program; assert a clean exit and that one model was released."""
    result = device.run(RESOURCE + program)
    device.assert_clean(result)
    assert result.stdout.count("released\n") == 1, str(result)


def test_open_model_is_closed_and_late_destructors_empty_caches_silently(device: Any) -> None:
    """Only teardown could free the model, and an exit callback of the program still uses it."""
    run(
        device,
        """
class Last:
    def __del__(self, t=t, calls=(
        t.safe_cuda_empty_cache, t.is_cuda_available, t.get_device_info, t.memory_snapshot,
        t.get_optimal_device, t.release,
    ), clean=t.safe_tensor_cleanup):
        clean("tensor", self)
        for call in calls:
            call()
sys.last, torch.last, torch.cuda.last = Last(), Last(), Last()
for last in (sys.last, torch.last, torch.cuda.last):
    last.tensor = device.tensor(1 << 20)
sys.kept = torch.kept = model = Model()
device.make_context()
atexit.register(lambda: model.model(device.inputs(model.model)))
""",
    )


def test_forked_child_releases_nothing_of_its_parent(device: Any) -> None:
    run(
        device,
        """
model = Model()
device.make_context()
tensor = device.tensor(1 << 20)
sys.stdout.flush()
child = os.fork()
if child == 0:
    if device.name == "cuda":
        assert t.safe_cuda_empty_cache() is False
        assert t.memory_snapshot().devices == {}
    t.release(tensor, thorough=True)  # At most an error in the report.
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert tensor.numel() and device.holds(tensor, 1)
assert model.model(device.inputs(model.model)).isfinite().all()
""",
    )
