"""Files with destructors that cannot work: each with the rules, and lines, that have to be found.

A line that has to be found ends with ``# <- rule``, or with several of them.
"""

from __future__ import annotations

from .dirty_others import DIRTY_OTHERS
from .dirty_reached import DIRTY_REACHED
from .dirty_states import DIRTY_STATES

DIRTY = {**DIRTY_REACHED, **DIRTY_STATES, **DIRTY_OTHERS}

NEEDS_312 = {
    "type parameters": """
class A[T]:
    def __init__(self, make):
        self.value: T = make()
    def __del__(self):
        self.value.close()  # <- half-built
type Pair[T] = tuple[T, T]
""",
}
