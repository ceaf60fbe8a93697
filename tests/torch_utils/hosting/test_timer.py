"""The one timer thread: it is not there when a process forks, and comes back."""

from __future__ import annotations

import pytest

from programs import assert_clean, run

FORKS = """
import os, threading, time
counts = []
os.register_at_fork(before=lambda: counts.append(len(os.listdir("/proc/self/task"))))
from torch_utils import ModelHost  # Its own callbacks come first, for it registered them later.
from torch_utils.hosting.timer import TIMER
class Model:
    def close(self): print("closed", flush=True)
host = ModelHost(Model, keep_alive={keep_alive})
with host.lease(): pass
{before}
for _ in range(3):
    pid = os.fork() if {forks} else counts.append(len(os.listdir("/proc/self/task"))) or 0
    if pid == 0 and {forks}:
        os._exit(threading.active_count() - 1)
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
print(*counts)
while host.status().state != "unloaded" and {keep_alive} < 60:
    time.sleep(0.01)
host.close()
"""


@pytest.mark.parametrize(
    ("forks", "keep_alive", "before", "counts"),
    [
        (True, 300, "", "1 1 1"),
        (True, 0.3, "", "1 1 1"),
        (
            True,
            300,
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "2 2 2",
        ),
        (False, 300, "", "2 2 2"),
    ],
    ids=["sleeps", "comes back", "control: another thread", "control: no fork"],
)
def test_is_not_there_in_a_fork(forks: bool, keep_alive: float, before: str, counts: str) -> None:
    """Python warns of forks of a process with threads, from 3.12 on; afterwards it goes on."""
    program = FORKS.format(forks=forks, keep_alive=keep_alive, before=before)
    result = run(program, options=("-W", "ignore::DeprecationWarning"))
    assert_clean(result)
    assert counts in result.stdout
    assert result.stdout.count("closed") == 1


def test_fork_out_of_the_timer() -> None:
    """A model that forks while it is unloaded, by the timer: nobody waits for himself."""
    result = run(
        """
import os
from torch_utils import ModelHost
from watching import wait_for
class Model:
    def close(self):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
host = ModelHost(Model, keep_alive=0.01)
for _ in range(3):
    with host.lease(): pass
    wait_for(lambda: host.status().state == "unloaded")
host.close()
""",
        options=("-W", "ignore::DeprecationWarning"),
    )
    assert_clean(result)
