"""torch absent, broken, without a driver, after a fork, and tensors of every kind."""

from __future__ import annotations

from textwrap import dedent

from tests.torch_utils.hazards.row import LIGHT, Row

START = """
import sys, types
from tests.torch_utils.hazards.stand_ins import boom, check, torch_with
"""
CHECKS = """
check()
x = make(check)
"""
BROKEN = {
    "49 torch blocked": "sys.modules['torch'] = None",
    "49 torch half-imported": """
        torch_with(None)
        sys.modules["torch"].__spec__ = types.SimpleNamespace(_initializing=True)
    """,
    "49 torch.cuda is None": "torch_with(None)",
    "49 is_available raises": """
        torch_with(types.SimpleNamespace(is_available=boom, is_initialized=boom))
    """,
}
WITHOUT_DRIVER = """
import torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
from tests.torch_utils.hazards.stand_ins import check
"""
WITH_TORCH = {
    "51 cleanup initialises no device": """
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
    "52 forked child after CUDA was used": """
        import os, sys, torch
        torch.cuda.is_initialized = lambda: os.getpid() == parent
        parent = os.getpid()
        x = make()
        if os.fork() == 0:
            import torch_utils as t
            assert not t.safe_cuda_empty_cache()
            sys.exit(0)
        assert os.wait()[1] == 0
    """,
    "53 parent checks CUDA, then forks": """
        import os, sys, torch_utils as t
        t.is_cuda_available()
        x = make()
        if os.fork() == 0:
            t.is_cuda_available()
            y = make()
            sys.exit(0)
        assert os.wait()[1] == 0
    """,
    "54 tensors of every kind are held": """
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
    *(
        Row(name, f"{START}{dedent(block)}{CHECKS}", subjects=LIGHT, control=False)
        for name, block in BROKEN.items()
    ),
    Row(
        "50 CUDA build without a driver",
        WITHOUT_DRIVER + CHECKS,
        needs_torch=True,
        subjects=LIGHT,
        control=False,
    ),
    *(Row(name, block, needs_torch=True, control=False) for name, block in WITH_TORCH.items()),
]
