"""All rows of the matrix, and which of them are run against which subject by which Python."""

from __future__ import annotations

from tests.support.other_pythons import other_pythons
from tests.torch_utils.hazards.callbacks import CALLBACKS
from tests.torch_utils.hazards.endings import ENDINGS
from tests.torch_utils.hazards.hosts import HOSTS
from tests.torch_utils.hazards.order import ORDER
from tests.torch_utils.hazards.places import PLACES
from tests.torch_utils.hazards.processes import PROCESSES
from tests.torch_utils.hazards.row import Row
from tests.torch_utils.hazards.torch_states import TORCH_STATES

THEMES = [PLACES, ENDINGS, ORDER, CALLBACKS, TORCH_STATES, PROCESSES, HOSTS]
ROWS = [row for theme in THEMES for row in theme]
HERE = "this Python"
Case = tuple[Row, str, str]  # the row, the subject and the Python


def _samples(subject: str) -> list[Row]:
    """Return the first two rows of each theme that make sense for a subject."""
    return [row for theme in THEMES for row in [r for r in theme if subject in r.subjects][:2]]


# A model is a resource whose program takes seconds, so only samples and the rows made for it run.
CASES: list[Case] = [
    (row, subject, HERE)
    for row in ROWS
    for subject in row.subjects
    if subject != "model" or row in _samples(subject) or row.needs_torch or len(row.subjects) < 3
]
CONTROLS: list[Case] = [(row, "naive", HERE) for row in ROWS if row.control]
# The other Pythons have no torch. There a resource stands for all: the other subjects are made of
# one, and only samples of them are run.
CASES += [
    (row, subject, version)
    for version in other_pythons()
    for subject in ("resource", "scope", "host")
    for row in (ROWS if subject == "resource" else _samples(subject))
    if subject in row.subjects and not row.needs_torch
]
# A program with torch costs seconds: of the rows that need no torch a retriever gets these two.
_WITH_RETRIEVER = [PLACES[0], ENDINGS[0]]


def is_slow(row: Row, subject: str, version: str) -> bool:
    """Whether a case is left to `make test-slow`.

    `make test` runs each row once on this Python: with a resource, or with a retriever where torch
    is needed, or with a host. `make test-slow` also runs the controls.
    """
    if version != HERE:
        return True
    if row in HOSTS or subject == "naive":
        return False
    is_forked = not row.own_process and not row.options
    wants_retriever = row.needs_torch or row in _WITH_RETRIEVER or "resource" not in row.subjects
    if wants_retriever and is_forked and "retriever" in row.subjects:
        return subject != "retriever" and not (subject == "resource" and row in _WITH_RETRIEVER)
    return subject != "resource"
