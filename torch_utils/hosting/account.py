"""The memory of a hosted model, as budgets count it."""

from __future__ import annotations

from torch_utils._release.counting import Inventory
from torch_utils.hosting.blocks import Blocks, blocks_of
from torch_utils.hosting.tenancy import Tenancy
from torch_utils.hosting.tenant import Tenant

__all__ = ["Account"]


class Account:
    """The memory of a host's model: what it has, will have, and has left with callers.

    Args:
        tenancy: The state of the host.
        sizes: The declared size, by device; empty to measure it.

    Attributes:
        declared: The declared memory.
        last: The memory of the last load, or before the last sleep.
    """

    def __init__(self, tenancy: Tenancy, sizes: dict[str, int]) -> None:
        self.declared: Blocks = blocks_of(tenancy.name, sizes)
        self._tenancy = tenancy
        self.start_over()

    def start_over(self) -> None:
        """Count nothing, in a new host or in a forked child."""
        self.last: Blocks = {}
        self.unloaded: list[Inventory] = []  # models, parts of which may be in use

    def measure(self) -> None:
        """Measure the model again, which may have grown or moved, unless it is in a transition."""
        tenant = self._tenancy.tenant
        if tenant is not None and self._tenancy.transition is None:
            tenant.measure()

    def of(self, tenant: Tenant) -> Blocks:
        """Return the memory of a tenant: when it was last measured, or declared."""
        return tenant.blocks() if tenant.is_asleep else self.declared or tenant.blocks()

    def expected(self) -> Blocks:
        """Return what a load or a wake will take; what of it still exists will be shared."""
        tenant, name = self._tenancy.tenant, self._tenancy.name
        alive = {**self.remains(), **(tenant.blocks() if tenant is not None else {})}
        return self.declared or {
            key if key in alive else (name, key): block for key, block in self.last.items()
        }

    def used(self) -> Blocks | None:
        """Return the used or admitted memory; None for a model that is neither there nor loading.

        A model that waits for room has both: the pieces that exist count once.
        """
        tenant, transition = self._tenancy.tenant, self._tenancy.transition
        admitted = None if transition is None else transition.admitted
        if tenant is None:
            return admitted
        return {**self.of(tenant), **(admitted or {})}

    def remains(self) -> Blocks:
        """Return the memory of unloaded models that callers still use."""
        self.unloaded = [one for one in self.unloaded if one.blocks()]
        return {key: block for one in self.unloaded for key, block in one.blocks().items()}
