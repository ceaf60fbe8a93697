"""What older versions of torch cannot do: tests of that are skipped there, by the reason."""

from __future__ import annotations

import pytest
import torch

from torch_utils._releasing.weak_storages import StorageReader

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_fast_notes = pytest.mark.skipif(
    not StorageReader(torch).is_fast,
    reason=f"torch {torch.__version__} has storages noted one by one, as objects",
)
