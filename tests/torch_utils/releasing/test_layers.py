"""Every layer type of torch.nn: after its release each use is one clear error, never garbage."""

from __future__ import annotations

import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import ReleasedError, release

# Arguments that make a small one, tried in this order.
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (),
    (2,),
    (2, 2),
    (2, 2, 2),
    (2, 2, 2, 2),
    (4, 2, 2, 2),
    (4, 4, [2, 4]),
    (nn.TransformerEncoderLayer(4, 2, 8), 1),
    (nn.TransformerDecoderLayer(4, 2, 8), 1),
)

SMALLER = {"Transformer": (4, 2, 1, 1, 8)}  # Without arguments it has 44 million weights.


def layers() -> dict[str, Any]:
    """Build one of each kind that takes small arguments."""
    made: dict[str, Any] = {}
    for name in sorted(dir(nn)):
        kind = getattr(nn, name)
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        for arguments in (SMALLER[name],) if name in SMALLER else ARGUMENTS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made[name] = kind(*arguments)
                break
            except Exception:  # Layers refuse arguments that are not theirs as they like.
                continue
    return made


LAYERS = layers()
INPUTS = [torch.ones(shape) for shape in ((2,), (1, 2), (1, 2, 2), (1, 2, 4, 4), (1, 2, 4, 4, 4))]


def test_nearly_all_kinds_are_covered() -> None:
    """The list is that of torch.nn, not a sample of it."""
    kinds = [
        n
        for n in dir(nn)
        if inspect.isclass(getattr(nn, n)) and issubclass(getattr(nn, n), nn.Module)
    ]
    assert len(LAYERS) > 0.95 * len(kinds), sorted(set(kinds) - set(LAYERS))


@pytest.mark.parametrize("name", LAYERS)
def test_released_layer_is_an_error(name: str) -> None:
    """Its memory is gone, and calling it raises whatever the input."""
    layer = LAYERS[name]
    held = itertools.chain(layer.parameters(), layer.buffers())
    storages = [
        StorageWeakRef(t.untyped_storage())
        for t in held
        if not isinstance(t, nn.parameter.UninitializedTensorMixin) and t.numel()
    ]
    release(layer, collect="never", trim_host=False)
    assert all(storage.expired() for storage in storages)
    for inputs in ([], *([i] for i in INPUTS), *([i, i] for i in INPUTS)):
        for use in (layer, layer.__call__):
            with pytest.raises(ReleasedError, match=f"this {name} was released"):
                use(*inputs)
    with pytest.raises(ReleasedError):
        layer.extra_repr()
