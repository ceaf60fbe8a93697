"""Ordinary programs on the device: memory comes back, and what stays computes the right values.

No test believes the library's own reports. Models have random weights.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.threads import in_threads
from tests.torch_utils.gpu.device import MB, needs
from torch_utils import (
    ModelPool,
    SafePyTorchCleanup,
    get_device_info,
    measure,
    memory_snapshot,
    release,
    safe_cuda_empty_cache,
)


@contextlib.contextmanager
def all_memory_back(device: Any) -> Iterator[None]:
    """Assert that the block leaves as much memory reserved as there was."""
    before = device.reserved_bytes()
    yield
    device.empty_caches()
    held = device.reserved_bytes() - before
    assert held == 0, f"{held} bytes are not back"


@needs("transformers", "sentence_transformers", "tokenizers", "safetensors", "numpy")
def test_encoders_return_the_vectors_of_the_cpu(device: Any, tmp_path: Path) -> None:
    """An embedding model does, also after it was loaded again."""
    import transformers
    from sentence_transformers import SentenceTransformer

    from rag_demo import EmbeddingModel
    from tests.support.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path)
    texts = ["give memory back", "paris"]

    def embed(where: str) -> Any:
        with SafePyTorchCleanup(thorough=True) as scope:
            model = scope.manage(SentenceTransformer(str(folder), device=where))
            device.watch(*model.parameters())
            return model.encode(texts, normalize_embeddings=True)

    expected = embed("cpu")
    with all_memory_back(device):
        assert abs(embed(device.torch_name) - expected).max() < 1e-4
        pipeline = transformers.pipeline(
            "feature-extraction", model=str(tmp_path / "transformer"), device=device.torch_name
        )
        device.watch(*pipeline.model.parameters())
        assert len(pipeline(texts)) == 2
        release(pipeline, thorough=True)
    with all_memory_back(device):
        with EmbeddingModel(folder, device=device.torch_name, dtype="float32") as model:
            for _ in range(2):
                model.load_model()
                assert abs(model.embed_documents(texts) - expected).max() < 1e-4
                model.unload_model()
                assert not model.is_loaded
            release(thorough=True)  # The workspaces of cuBLAS.


def test_pool_keeps_its_budget(device: Any) -> None:
    with all_memory_back(device):
        before = device.reserved_bytes()
        with ModelPool(budget_bytes={device.place: int(2.5 * device.model_bytes)}) as pool:
            for name in "abc":
                pool.add(name, device.model)
            for name in "abcab":
                with pool.lease(name) as model:
                    assert model(device.inputs(model)).isfinite().all()
                del model
                safe_cuda_empty_cache()
                assert device.reserved_bytes() - before < 2.6 * device.model_bytes


def test_four_threads_release_on_four_streams(device: Any) -> None:
    def work(number: float) -> None:
        for _ in range(3):
            with device.other_stream() as stream:
                tensor = device.tensor(device.large_bytes // 8, number)
                device.keep_busy()
                result = tensor * 2
                release(tensor)
                other = device.tensor(device.large_bytes // 8, -1.0)
                if stream is not None:
                    stream.synchronize()
                assert device.holds(result, 2 * number)
                release(result, other)

    with all_memory_back(device):
        assert in_threads(*(partial(work, 1.0 + n) for n in range(4))) == [None] * 4


@pytest.mark.alone
def test_measure_waits_for_queued_work(device: Any) -> None:
    """The clock of the host alone would show the time to queue it."""
    taken = measure(device.keep_busy, warmup=1, repeat=3, device=device.torch_name).median_s
    if device.name != "cuda":
        assert taken >= 0.001
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    start.record()
    device.keep_busy()
    end.record()
    queued_s = time.perf_counter() - started
    device.synchronize()
    true_s = start.elapsed_time(end) / 1e3
    assert taken > 0.8 * true_s > 2 * queued_s, (taken, true_s, queued_s)


@needs("prometheus_client")
def test_reports_and_metrics_describe_a_device_in_use(device: Any) -> None:
    """A device that this process has not used is not asked for its name."""
    import prometheus_client

    from torch_utils.prometheus import register

    registry = prometheus_client.CollectorRegistry()
    register(registry)
    tensor = device.tensor(device.large_bytes)
    text = prometheus_client.generate_latest(registry).decode()
    assert (f'device="{device.torch_name}"' in text) == (device.name == "cuda"), text
    if device.name == "cuda":
        assert get_device_info()["device_name"] == torch.cuda.get_device_name(0)
        reserved = memory_snapshot().devices[device.torch_name].reserved_bytes
        assert reserved == device.reserved_bytes() >= device.large_bytes
    release(tensor)


@needs("accelerate")
def test_dispatch_and_offload_of_accelerate(device: Any) -> None:
    """Its hooks hold the weights in other places."""
    import accelerate

    with all_memory_back(device), torch.no_grad():
        model = device.model(8 * MB)
        inputs = device.inputs(model)
        expected = model(inputs)
        device.watch(expected)
        dispatched = accelerate.dispatch_model(
            model, device_map={"": device.torch_name}, force_hooks=True
        )
        assert (dispatched(inputs) - expected).abs().max() < 1e-4
        release(dispatched, thorough=True)
        offloaded = accelerate.cpu_offload(
            torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))),
            execution_device=torch.device(device.torch_name),
        )
        assert offloaded(inputs[:, :64].contiguous()).isfinite().all()
        release(offloaded, inputs, expected, thorough=True)


@needs("tantivy", "Stemmer", "numpy")
def test_retriever_is_exact_and_returns_its_memory(device: Any) -> None:
    from rag_demo import PyTorchGPURetriever
    from tests.support.small_collections import Hashed, are_nearest, text_of

    documents = {str(number): f"{text_of(number)} {number}" for number in range(1000)}
    queries = ["alpha bravo", "delta 500", "a longer question"]
    for dtype in ("float32", "float16", "bfloat16"):
        with all_memory_back(device):
            with PyTorchGPURetriever(Hashed(), device=device.torch_name, dtype=dtype) as retriever:
                retriever.add([*documents.values()], ids=[*documents])
                found = retriever.search_batch(queries, 5, mode="dense")
                for query, results in zip(queries, found, strict=True):
                    assert are_nearest(results, documents, query, 5)
            release(thorough=True)  # The workspaces of cuBLAS.
