"""Which thread gives an object up, where several release it at the same time.

Only one counts it and gives it up; so what it held is in one report, and in one only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import compress, repeat
from operator import eq
from typing import Any

_CLAIMED: dict[int, Any] = {}
"""Who gives an object up, by the object's id; who claims it keeps it alive meanwhile."""

os.register_at_fork(after_in_child=_CLAIMED.clear)  # The child has none of the other threads.


def claim(things: Sequence[Any], caller: Any) -> list[bool]:
    """Claim some objects, in steps of C; says which of them nobody else has claimed."""
    owners = map(_CLAIMED.setdefault, map(id, things), repeat(caller))
    return list(map(eq, owners, repeat(caller)))


def drop_claims(things: Sequence[Any], caller: Any) -> None:
    """Let others claim them again."""
    keys = list(map(id, things))
    mine = map(eq, map(_CLAIMED.get, keys), repeat(caller))
    deque(map(_CLAIMED.pop, compress(keys, mine), repeat(None)), maxlen=0)
