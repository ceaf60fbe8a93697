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


def is_slow(row: Row, subject: str, version: str) -> bool:
    """Whether a case is left to `make test-all`.

    `make test` keeps what can break in different ways: each row with the plain resource and
    with the retriever on this Python, those about hosts with a host, and the naive destructor,
    which is the control. The retriever's programs that cannot be forked, and so import torch
    each, are left out too.
    """
    if row in HOSTS:
        return version != HERE
    if subject == "retriever":
        return row.own_process or bool(row.options)
    return version != HERE or subject not in ("resource", "naive")
