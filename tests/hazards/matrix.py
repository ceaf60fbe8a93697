"""All rows of the matrix, and which of them are run against which subject by which Python."""

from __future__ import annotations

from hazards.callbacks import CALLBACKS
from hazards.endings import ENDINGS
from hazards.hosts import HOSTS
from hazards.order import ORDER
from hazards.places import PLACES
from hazards.processes import PROCESSES
from hazards.pythons import other_pythons
from hazards.row import Row
from hazards.runner import NEEDS_TORCH
from hazards.torch_states import TORCH_STATES

ROWS = [*PLACES, *ENDINGS, *ORDER, *CALLBACKS, *TORCH_STATES, *PROCESSES, *HOSTS]
HERE = "this Python"

# (row, subject, Python); naive destructors have no torch of their own to be tried with.
CASES = [
    (row, subject, HERE)
    for row in ROWS
    for subject in row.subjects
    if not (subject == "naive" and row.needs_torch)
]
# The other Pythons have no torch.
CASES += [
    (row, subject, version)
    for version in other_pythons()
    for row in ROWS
    for subject in row.subjects
    if not row.needs_torch and subject not in NEEDS_TORCH
]


# A retriever's program imports torch, and taking that apart again costs more than all the rest of
# it: of the rows that need no torch themselves it gets two.
_SAMPLES = [PLACES[0], ENDINGS[0]]


def is_slow(row: Row, subject: str, version: str) -> bool:
    """Whether a case is left to `make test-all`.

    `make test` keeps what can break in different ways, on this Python: each row with the plain
    resource, those that need torch with the retriever in its place, those about hosts with a
    host, and the naive destructor, which is the control. Of the retriever's programs those that
    cannot be forked, and so import torch each, are left out too.
    """
    if version != HERE:
        return True
    if row in HOSTS or subject == "naive":
        return False
    if is_quick_with_retriever(row):
        return subject != "retriever" and not (subject == "resource" and row in _SAMPLES)
    return subject != "resource"


def is_quick_with_retriever(row: Row) -> bool:
    """Whether a row is run with the retriever in `make test`."""
    is_forked = not row.own_process and not row.options
    is_chosen = row.needs_torch or row in _SAMPLES or "resource" not in row.subjects
    return is_chosen and is_forked and "retriever" in row.subjects
