"""The bookkeeping of one model, without threads and with a clock of its own."""

from __future__ import annotations

import pytest

from torch_utils import TorchUtilsError
from torch_utils.hosting.tenancy import Holder, Tenancy


def loaded(keep_alive_s=10.0) -> Tenancy:
    tenancy = Tenancy(keep_alive_s)
    tenancy.start_loading()
    tenancy.loaded({"host": 5, "cuda:0": -1}, now=0)
    return tenancy


HOLDER = Holder("here", 1, 0)


def test_clock_starts_when_the_last_lease_ends() -> None:
    """Not with the first that ends, and not with an end that was told twice."""
    tenancy = loaded()
    assert tenancy.expires_at() == 10
    tenancy.lend(1, HOLDER)
    tenancy.lend(2, HOLDER)
    assert tenancy.expires_at() is None
    assert tenancy.give_back(1, now=20)
    assert tenancy.expires_at() is None
    assert tenancy.give_back(2, now=30)
    assert tenancy.expires_at() == 40
    assert not tenancy.give_back(2, now=35)
    assert tenancy.expires_at() == 40


def test_waiting_keeps_it() -> None:
    """Whoever wants it gets it before it expires; if they give up, the clock goes on."""
    tenancy = loaded()
    tenancy.wanted.add(1)
    assert tenancy.expires_at() is None
    tenancy.no_longer_wanted(1, now=3)
    assert tenancy.expires_at() == 10


def test_kept_for_ever_and_not_at_all() -> None:
    """-1 and 0; one that nobody has had yet is not what 0 is about."""
    assert loaded(None).expires_at() is None
    tenancy = loaded(0)
    assert tenancy.expires_at() is None
    tenancy.lend(1, HOLDER)
    tenancy.give_back(1, now=7)
    assert tenancy.expires_at() == 7


def test_never_unloaded_under_a_lease() -> None:
    """The bookkeeping itself refuses, whoever asks."""
    tenancy = loaded()
    tenancy.lend(1, HOLDER)
    assert not tenancy.can_unload()
    with pytest.raises(TorchUtilsError, match="lent"):
        tenancy.start_unloading()
    tenancy.lost()  # Its process has ended: nobody has it any more.
    assert (tenancy.state, tenancy.leases, tenancy.nbytes) == ("unloaded", {}, 0)


def test_closing() -> None:
    """Nothing is lent or loaded any more, and the last lease's end is the model's."""
    tenancy = loaded(None)
    tenancy.lend(1, HOLDER)
    tenancy.close()
    with pytest.raises(TorchUtilsError):
        tenancy.lend(2, HOLDER)
    tenancy.give_back(1, now=4)
    assert tenancy.expires_at() == 4
    tenancy.start_unloading()
    tenancy.unloaded()
    assert tenancy.state == "closed"
    with pytest.raises(TorchUtilsError):
        tenancy.start_loading()


@pytest.mark.parametrize("step", ["loaded", "load_failed", "unloaded", "start_unloading", "lost"])
def test_steps_out_of_order(step: str) -> None:
    """Refused, with the state that it is in."""
    arguments = {"loaded": ({}, 0), "load_failed": (None,)}.get(step, ())
    with pytest.raises(TorchUtilsError, match="unloaded cannot become"):
        getattr(Tenancy(None), step)(*arguments)


def test_status() -> None:
    """What each figure is."""
    status = loaded().status("it", now=4)
    assert (status.name, status.state, status.nbytes, status.loads) == ("it", "loaded", 5, 1)
    assert (status.idle_s, status.expires_in_s) == (4, 6)
    tenancy = Tenancy(1.0)
    tenancy.start_loading()
    tenancy.load_failed(error := OSError("no"))
    status = tenancy.status("it", now=4)
    assert (status.state, status.last_error, status.idle_s) == ("unloaded", error, None)
