"""torch without a driver and without a device, and tensors of every kind."""

from tests.torch_utils.hazards.row import LIGHT, Row

WITHOUT_DRIVER = """
import torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
import torch_utils
def check(t=torch_utils):
    assert t.is_cuda_available() is False
    assert t.get_optimal_device() == "cpu"
    assert t.safe_cuda_empty_cache() is False
    assert not t.get_device_info()["cuda_available"]
check()
x = make(check)
"""
WITH_TORCH = {
    "cleanup initialises no device": """
        import torch
        def boom(*a):
            raise SystemExit("a context")
        torch.cuda._lazy_init = boom
        x = make()
        close(x)
        y = make()
        import atexit, torch_utils as t
        t.release(torch.ones(3), collect="full")
        atexit.register(lambda: t.release(torch.ones(3)))
    """,
    "tensors of every kind are held": """
        import numpy as np, torch
        x = make()
        leaf = torch.ones(9, requires_grad=True)
        with torch.inference_mode():
            inference = torch.ones(9)
        kept = [leaf, leaf * 2, inference, torch.from_numpy(np.ones(9))]
        kept += [torch.ones(9).share_memory_(), torch.ones(9)[2:]]
        import atexit, torch_utils as t
        t.release(kept[1:3])
        atexit.register(t.release, kept)
    """,
}

TORCH_STATES = [
    Row(
        "CUDA build without a driver",
        WITHOUT_DRIVER,
        needs_torch=True,
        subjects=LIGHT,
        control=False,
    ),
    *(Row(name, block, needs_torch=True, control=False) for name, block in WITH_TORCH.items()),
]
