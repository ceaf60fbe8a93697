"""Tests of `live_memory`: what it counts, whom it names, and that it changes nothing."""

# torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, assignment, attr-defined, index, misc"

import gc
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import LiveEntry, LiveMemory, live_memory

APP = SimpleNamespace()
HERE = f"the variable 'APP' of module {__name__}"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    vars(APP).clear()


def entry(memory: LiveMemory, what: str) -> LiveEntry:
    (found,) = [one for one in memory.entries if one.what == what]
    return found


class Encoder(nn.Sequential):
    """A model of this test only."""


def test_storages_are_grouped_by_owner_with_the_path_to_it() -> None:
    before = live_memory(least_bytes=1)
    APP.state = SimpleNamespace(encoder=[Encoder(nn.Linear(100, 100), nn.Linear(100, 3))])
    APP.outputs = [torch.ones(32, 512) for _ in range(128)]
    new = live_memory(least_bytes=1).since(before)
    model, outputs = entry(new, "Encoder"), entry(new, "128 tensors (32, 512) float32")
    assert new.entries[0] == outputs
    assert (model.nbytes, model.storages, model.device) == (4 * (100 * 103 + 103), 4, "host")
    assert model.holders == (f"{HERE}: APP.state.encoder[0]",)
    assert outputs.nbytes == 128 * 4 * 32 * 512
    assert outputs.holders[0].startswith(f"{HERE}: APP.outputs[")
    assert new.total_bytes == {"host": model.nbytes + outputs.nbytes}
    assert json.dumps(model.as_dict())
    text, table = str(new), new._repr_html_()
    assert "  8.4 MB on host: 128 tensors (32, 512) float32, held by the variable 'APP'" in text
    assert "<td>8.4 MB<td>host<td>128 tensors (32, 512) float32" in table


@pytest.mark.xdist_group("optimizers")  # Their imports are slow.
def test_gradients_and_states_of_optimizers_have_owners() -> None:
    before = live_memory(least_bytes=1)
    APP.model = Encoder(nn.Linear(10, 10, bias=False))
    APP.optimizer = torch.optim.Adam(APP.model.parameters())
    APP.model(torch.ones(10)).sum().backward()
    APP.optimizer.step()
    new = live_memory(least_bytes=1).since(before)
    assert entry(new, "Encoder").nbytes == 2 * 400, "with its gradient"
    state = entry(new, "Adam (its state)")
    assert state.nbytes == 2 * 400 + 4
    assert state.holders == (f"{HERE}: APP.optimizer",)


def test_views_count_with_their_storage_and_shared_memory_once() -> None:
    before = live_memory(least_bytes=1)
    APP.view = torch.ones(1000)[:1]
    with torch.inference_mode():
        APP.inference = torch.ones(2000)[:1]
    APP.both = [tensor := torch.ones(30), tensor[1:], tensor.detach()]
    del tensor
    new = live_memory(least_bytes=1).since(before)
    assert new.total_bytes == {"host": 4000 + 8000 + 120}
    assert sorted(one.storages for one in new.entries) == [1, 1, 1]


def test_small_entries_and_other_devices_count_in_the_total_only() -> None:
    APP.small = torch.ones(10)
    everything, large = live_memory(least_bytes=1), live_memory(least_bytes=1 << 40)
    assert large.entries == ()
    assert large.total_bytes == everything.total_bytes
    assert live_memory(device="cpu", least_bytes=1).total_bytes == everything.total_bytes
    assert live_memory(device=torch.device("cpu")).total_bytes == everything.total_bytes
    assert live_memory(device="cuda").total_bytes == {}
    meta, sparse = torch.ones(99, device="meta"), torch.eye(3).to_sparse()
    assert live_memory(least_bytes=1).total_bytes["host"] > everything.total_bytes["host"]
    del meta, sparse
    with pytest.raises(TypeError, match=r"device must be a string such as .* got 0"):
        live_memory(device=0)


def test_census_keeps_nothing_alive_and_leaves_no_objects_for_storages() -> None:
    APP.model = Encoder(nn.Linear(10, 10))
    APP.loss = APP.model(torch.ones(10)).sum()
    storages = weak(APP.model)
    kinds = [torch.UntypedStorage]
    before = sum(type(one) in kinds for one in gc.get_objects())
    memory = live_memory(least_bytes=1)
    assert sum(type(one) in kinds for one in gc.get_objects()) == before
    assert HERE in str(memory)
    with without_collector():
        vars(APP).clear()
        assert gone(storages)


def test_census_runs_no_code_of_foreign_objects() -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            asked.append("==")
            return cls is other

        __hash__ = type.__hash__

    class Curious(nn.Module, metaclass=Meta):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattr__(name)

        @property
        def __class__(self) -> Any:
            asked.append("class")
            return dict

    asked: list[str] = []
    module = Curious()
    module.register_buffer("table", torch.ones(123))
    APP.module = module
    del APP.module
    before = live_memory(least_bytes=1)
    APP.module = module
    module.table = torch.ones(456)
    asked.clear()
    memory = live_memory(least_bytes=1).since(before)
    assert f"{HERE}: APP.module" in str(memory)
    assert asked == []


def test_census_collects_no_garbage_and_works_without_torch() -> None:
    with without_collector(), garbage_collections() as generations:
        str(live_memory(least_bytes=1))
    assert generations == []
    program = """
    import sys
    from torch_utils import live_memory, no_growth
    memory = live_memory()
    assert (memory.entries, memory.total_bytes) == ((), {})
    assert str(memory) == "no tensors in 0 storages"
    with no_growth():
        pass
    assert "torch" not in sys.modules
    """
    assert_clean(run(program))


def test_sum_is_that_of_all_tensors() -> None:
    """Against a plain walk over the heap."""
    APP.things = [torch.ones(7), Encoder(nn.Linear(3, 3)), torch.ones(9)[2:]]
    gc.collect()
    sizes = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.layout == torch.strided:
            try:
                storage = one.untyped_storage()
                if storage.data_ptr():
                    sizes[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue
    assert live_memory().total_bytes["host"] == sum(sizes.values())
    assert sys.getrefcount(APP.things[0]) < 10
