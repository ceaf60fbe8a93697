"""Tests of `live_memory`: what it counts, whom it names, and that it changes nothing."""

# mypy: disable-error-code="arg-type, misc"

import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import LiveEntry, LiveMemory, live_memory, no_growth


def entry(memory: LiveMemory, what: str) -> LiveEntry:
    (found,) = [one for one in memory.entries if one.what == what]
    return found


class Encoder(nn.Sequential):
    """A model of this test only."""


def test_storages_are_grouped_by_owner_with_the_path_to_it(app: Any) -> None:
    app.old = torch.ones(5)
    before = live_memory(least_bytes=1)
    app.state = SimpleNamespace(encoder=[Encoder(nn.Linear(100, 100), nn.Linear(100, 3))])
    app.outputs = [torch.ones(32, 512) for _ in range(128)]
    new = live_memory(least_bytes=1).since(before)
    model, outputs = entry(new, "Encoder"), entry(new, "128 tensors (32, 512) float32")
    assert new.entries == (outputs, model), "the largest first"
    assert (model.nbytes, model.storages, model.device) == (4 * (100 * 103 + 103), 4, "host")
    assert model.holders == ("the variable 'state' of module app: state.encoder[0]",)
    assert outputs.nbytes == 128 * 4 * 32 * 512
    assert outputs.holders[0].startswith("the variable 'outputs' of module app: outputs[")
    assert new.total_bytes == {"host": model.nbytes + outputs.nbytes}
    assert json.dumps(model.as_dict())
    assert f"  8.4 MB on host: {outputs.what}, held by the variable 'outputs'" in str(new)
    assert f"<td>8.4 MB<td>host<td>{outputs.what}" in new._repr_html_()


@pytest.mark.xdist_group("optimizers")  # Their imports are slow.
def test_gradients_and_states_of_optimizers_have_owners(app: Any) -> None:
    app.model = Encoder(nn.Linear(10, 10, bias=False))
    app.optimizer = torch.optim.Adam(app.model.parameters())
    app.model(torch.ones(10)).sum().backward()
    app.optimizer.step()
    memory = live_memory(least_bytes=1)
    assert entry(memory, "Encoder").nbytes == 2 * 400, "with its gradient"
    state = entry(memory, "Adam (its state)")
    assert state.nbytes == 2 * 400 + 4
    assert state.holders == ("the variable 'optimizer' of module app",)


def test_each_storage_counts_once_with_its_whole_size(app: Any) -> None:
    app.view = torch.ones(1000)[:1]
    with torch.inference_mode():
        app.inference = torch.ones(2000)[:1]
    app.both = [tensor := torch.ones(30), tensor[1:], tensor.detach()]
    app.meta = torch.ones(99, device="meta")
    del tensor
    memory = live_memory(least_bytes=1)
    assert memory.total_bytes == {"host": 4000 + 8000 + 120}
    assert sorted(one.storages for one in memory.entries) == [1, 1, 1]
    app.sparse = torch.eye(3).to_sparse()
    assert live_memory(least_bytes=1).total_bytes["host"] > 4000 + 8000 + 120


def test_small_entries_and_other_devices_count_in_the_total_only(app: Any) -> None:
    app.small = torch.ones(10)
    assert live_memory().entries == live_memory(device="cuda").entries == ()
    for device in (None, "cpu", torch.device("cpu")):
        assert live_memory(device=device).total_bytes == {"host": 40}
    assert live_memory(device="cuda").total_bytes == {}
    with pytest.raises(TypeError, match=r"device must be a string such as .* got 0"):
        live_memory(device=0)
    for use in (no_growth, live_memory):
        with pytest.raises(ValueError, match="torch knows no device 'cudda'"):
            use(device="cudda")


def test_census_keeps_nothing_alive_and_leaves_no_objects_for_storages(app: Any) -> None:
    def count_objects() -> int:
        return sum(type(one) is torch.UntypedStorage for one in gc.get_objects())

    app.model = Encoder(nn.Linear(10, 10))
    app.loss = app.model(torch.ones(10)).sum()
    storages = weak(app.model)
    before = count_objects()
    with without_collector(), garbage_collections() as generations:
        memory = live_memory(least_bytes=1)
        assert count_objects() == before
        assert "of module app" in str(memory)
        assert generations == []
        del app.model, app.loss
        assert gone(storages)


def test_census_runs_no_code_of_foreign_objects(app: Any) -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            calls.append("==")
            return cls is other

        __hash__ = type.__hash__

    class Curious(nn.Module, metaclass=Meta):
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return super().__getattr__(name)

        @property
        def __class__(self) -> Any:
            calls.append("class")
            return dict

    calls: list[str] = []
    app.module = Curious()
    app.module.register_buffer("table", torch.ones(123))
    calls.clear()
    memory = live_memory(least_bytes=1)
    assert "the variable 'module' of module app" in str(memory)
    assert calls == []


def test_census_works_without_torch() -> None:
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
