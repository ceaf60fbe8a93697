"""torch absent, without a driver, after a fork, and tensors of every kind."""

from tests.torch_utils.hazards.row import LIGHT, Row

CHECKS = """
import torch_utils
def check(t=torch_utils):
    assert t.is_cuda_available() is False
    assert t.get_optimal_device() == "cpu"
    assert t.safe_cuda_empty_cache() is False
    assert not t.get_device_info()["cuda_available"]
check()
x = make(check)
"""
BLOCKED = """
import sys
sys.modules["torch"] = None
"""
WITHOUT_DRIVER = """
import torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
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
    "parent uses and checks CUDA, then forks": """
        import os, sys, torch, torch_utils as t
        torch.cuda.is_initialized = lambda: os.getpid() == parent
        parent = os.getpid()
        t.is_cuda_available()
        x = make()
        if os.fork() == 0:
            assert not t.safe_cuda_empty_cache()
            t.is_cuda_available()
            y = make()
            sys.exit(0)
        assert os.wait()[1] == 0
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
    Row("torch blocked", BLOCKED + CHECKS, subjects=LIGHT, control=False),
    Row(
        "CUDA build without a driver",
        WITHOUT_DRIVER + CHECKS,
        needs_torch=True,
        subjects=LIGHT,
        control=False,
    ),
    *(Row(name, block, needs_torch=True, control=False) for name, block in WITH_TORCH.items()),
]
