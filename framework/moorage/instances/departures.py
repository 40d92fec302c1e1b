# SPDX-License-Identifier: Apache-2.0
"""Changes the claims of an instance that leaves its host: its destination's become its own, its source's wait for the source."""

from __future__ import annotations

from collections.abc import Mapping

from moorage.allocation.interface import AllocationChange, AllocationLedger, ConsumerHolding, Expect
from moorage.instances.interface import Instance, departed_consumer

__all__ = ["claims_after_leaving"]


def claims_after_leaving(
    ledger: AllocationLedger,
    instance: Instance,
    holds: Mapping[str, Mapping[str, int]],
    residents: Mapping[str, int | None],
    *,
    departed: Expect = Expect.NOTHING,
) -> list[AllocationChange]:
    """Returns the changes by which an instance holds ``holds``, and ``departed_consumer`` what the instance held before.

    One read of the ledger. The changes are refused if the instance's claim was changed since.

    :param residents: as in :class:`moorage.allocation.interface.AllocationChange`.
    :param departed: whether the source of an earlier move may hold something, which is given back.
    """
    project, user = instance.project_id, instance.user_id
    source = ledger.consumer(instance.uuid)
    # A client of Placement may have deleted the consumer. The first change creates it again, with its owner and type.
    expected = Expect.ANYTHING if source is None else source.consumer.generation
    changes = [
        AllocationChange(instance.uuid, holds, expected, project, user, consumer_type="INSTANCE", residents=residents)
    ]
    if source is not None:
        kept, consumer = _resources(source), departed_consumer(instance.uuid)
        changes.append(
            AllocationChange(
                consumer, kept, departed, project, user, consumer_type="MIGRATION_SOURCE", counts_with=instance.uuid
            )
        )
    return changes


def _resources(holding: ConsumerHolding) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for item in holding.allocations:
        found.setdefault(item.provider, {})[item.resource_class] = item.used
    return found
