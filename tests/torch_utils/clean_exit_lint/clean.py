"""Files with destructors that do no harm: nothing may be found in them."""

from __future__ import annotations

from .clean_guards import CLEAN_GUARDS
from .clean_others import CLEAN_OTHERS

CLEAN = {**CLEAN_GUARDS, **CLEAN_OTHERS}
