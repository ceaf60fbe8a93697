"""Retrievers that must answer exactly, by name. The options are not frozen."""

from functools import partial
from typing import Any

import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever

OnCpu = partial(PyTorchGPURetriever, device="cpu")
KINDS: dict[str, Any] = {
    "default": OnCpu,
    "faiss": FaissRetriever,
    "bfloat16": partial(OnCpu, dtype="bfloat16"),
    "float16": partial(OnCpu, dtype="float16"),
}
QUICK = ["default", "faiss"]
"""Those that `make test` asks most; the others are for `make test-slow`."""
BOTH = pytest.mark.parametrize("kind", [OnCpu, FaissRetriever], ids=["torch", "faiss"])
