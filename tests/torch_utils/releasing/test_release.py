"""Tests of release: memory, arguments, errors and garbage collections."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined"

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run_forked
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import CleanupReport, ReleasedError, Resource, release
from torch_utils._runtime import FALLBACKS

pytestmark = pytest.mark.usefixtures("frozen_heap")


def test_release_frees_a_module_held_by_variables() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False))
    model.card = {"model": model}
    storages = weak(model)
    other = model
    del other
    gc.collect()
    assert not any(s.expired() for s in storages), "the control: `del` of a reference frees nothing"
    with without_collector():
        report = release(model, collect="never")
    assert gone(storages), "also of a model in a cycle"
    assert (report.freed_bytes, report.still_held) == ({"host": 4 * (64 * 64 + 64 + 64 * 8)}, ())
    with pytest.raises(ReleasedError, match=r"this Sequential was released at .*test_release.py"):
        model(torch.ones(1, 64))
    assert release(model).freed_bytes == {}


def test_nested_release_reports_only_what_it_freed() -> None:
    class Owner(Resource):
        def __init__(self, size: int) -> None:
            self.model = nn.Linear(size, size, bias=False)

        def _release(self) -> None:
            reports.append(release(self.model, collect="full"))

    reports: list[CleanupReport] = []
    with garbage_collections() as seen:
        report = release([Owner(8), Owner(4)])
    assert sorted(each.freed_bytes["host"] for each in reports) == [64, 256]
    assert report.freed_bytes["host"] == 320
    assert seen.count(2) >= 2, "each asked for one"


def test_release_without_objects_returns_what_became_free() -> None:
    model = nn.Linear(4, 4)
    kept = model.weight
    report = release(model)
    assert "release() without arguments" in str(report)
    del kept
    gc.collect()
    for report in (release(), release(None, [], {})):
        assert (report.freed_bytes, report.still_held, report.errors) == ({}, (), ())
        assert "freed no tensors" in str(report)


def test_release_keeps_no_object_or_class_alive() -> None:
    class Model(nn.Linear):
        pass

    class Holder:
        model: nn.Module

    holder, tensors = Holder(), [torch.ones(2) for _ in range(300)]
    holder.model, tensors[0].note = Model(2, 2), [Model(2, 2)]
    instances = [weakref.ref(thing) for thing in (holder, holder.model, *tensors)]
    classes = [weakref.ref(kind) for kind in (Model, Holder)]
    with without_collector():
        assert release(holder, tensors, collect="never").errors == ()
        del holder
        tensors.clear()
        assert [ref() for ref in instances if ref() is not None] == []
    del Model, Holder
    gc.collect()
    assert [ref() for ref in classes] == [None, None]


def test_release_inside_autocast_frees_the_weights() -> None:
    """Autocast keeps copies of weights, whose graph refers to the weights."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = nn.Linear(4, 4)
        model(torch.ones(1, 4))
        storages = weak(model)
        release(model)
        assert gone(storages)


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*deprecated.*")
def test_packed_weights_cause_a_collection_because_they_cannot_be_counted() -> None:
    float_model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    try:
        model = torch.ao.quantization.quantize_dynamic(float_model, {nn.Linear})
    except RuntimeError as error:
        pytest.skip(f"this build of torch cannot quantize: {error}")
    with without_collector(), garbage_collections() as generations:
        assert release(model).errors == ()
    assert generations.count(2) == 1
    with without_collector(), garbage_collections() as generations:
        release(nn.Linear(64, 64))
    assert 2 not in generations


@pytest.mark.slow
def test_opaque_layouts_cause_a_collection_and_a_trim() -> None:
    program = """
    import torch, torch.utils.mkldnn
    from torch_utils import memory_snapshot, release
    release(torch.ones(8_000_000))  # raises glibc's threshold for mappings, as loaders do
    resident = []
    for _ in range(5):
        layers = [torch.nn.Linear(500, 500) for _ in range(60)]
        release(torch.utils.mkldnn.to_mkldnn(torch.nn.Sequential(*layers).eval()))
        resident.append(memory_snapshot().host.rss_bytes)
    assert resident[-1] - resident[0] < 30_000_000, resident
    """
    assert_clean(run_forked(program, quick_end=True))


WITHOUT_A_PRIVATE_NAME = """
import logging, sys, torch
from torch_utils import CleanupReport, ReleasedError, Resource, release
logging.getLogger("torch_utils").disabled = True  # Of errors that are in the report.

class Missing:
    def __get__(self, *instance):
        raise AttributeError("this torch does not have it")

name, fallback = sys.argv[1:]
owner, _, last = name.rpartition(".")
model = torch.nn.Linear(10, 10)
kept, weak = model.weight, model.bias.untyped_storage()._weak_ref()
tensor, listed = torch.ones(100), [torch.ones(2), torch.ones(2)]
view, is_gone = tensor[1:], torch.UntypedStorage._expired
if owner == "UntypedStorage":
    setattr(torch.UntypedStorage, last, Missing())
elif hasattr(torch._C, last):
    delattr(torch._C, last)

report = release(model, tensor, listed, thorough=True)
try:
    model(torch.ones(2, 10))
    raise AssertionError("was not released")
except ReleasedError:
    pass
assert is_gone(weak) and kept.numel() == 100 and kept.sum() == kept.sum() and view.sum() == 99
if "stay as they are" in fallback:
    assert [type(error) for error in report.errors] == [RuntimeError] * 3, report.errors
    assert all("left whole" in str(error) for error in report.errors), report.errors
    assert tensor.sum() == 100 and [t.sum() for t in listed] == [2, 2]
    assert report.still_held_bytes == 800 + 16, report
else:
    assert report.errors == ()
    assert [t.numel() for t in (tensor, *listed)] == [0] * 3
    # Held: the viewed tensor and the kept weight. Freed: the list and the bias.
    freed, held = ({}, 0) if fallback == "storages are not counted" else ({"host": 16 + 40}, 800)
    assert (report.freed_bytes, report.still_held_bytes) == (freed, held), report
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", FALLBACKS)
def test_missing_private_name_of_torch_falls_back(name: str) -> None:
    assert_clean(run_forked(WITHOUT_A_PRIVATE_NAME, name, FALLBACKS[name], quick_end=True))
