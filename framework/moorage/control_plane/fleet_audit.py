# SPDX-License-Identifier: Apache-2.0
"""Compares tables with each other: nodes with their providers, instances with their allocations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.audit import Check, Finding
from moorage.allocation.interface import AllocationStore, ClaimRequest, ProviderUsage
from moorage.control_plane.enrolment import Enrolment
from moorage.db import Database
from moorage.fleet.nodes import NodeStore
from moorage.instances.interface import Instance, InstanceStore
from moorage.instances.move_requests import spec_of
from moorage.instances.providers import claim_of_node, read_providers
from moorage.scheduling.assignment import proposal
from moorage.scheduling.interface import Propose
from moorage.scheduling.resource_request import resource_request

__all__ = ["FleetAudit"]

_PAGE = 1000
#: Rows that the allocations of one page of instances have at most: a claim names at most 200 classes.
_ROWS = 200 * _PAGE


class _ChangedMeanwhileError(errors.Conflict):
    """What the audit found is not so any more."""


@dataclass(frozen=True, slots=True)
class FleetAudit:
    """Compares the fleet and the instances with the allocation store.

    :param step_rule: ``[allocation] step_size_rule``.
    """

    database: Database
    nodes: NodeStore
    store: AllocationStore
    instances: InstanceStore
    enrolment: Enrolment
    step_rule: str = "seed"

    def checks(self) -> Sequence[Check]:
        """Returns the checks, for :func:`moorage.allocation.audit.audit`."""
        return (self.providers_without_nodes, self.nodes_without_providers, self.instances_without_allocation)

    # -- nodes and providers --------------------------------------------------------------------------------------

    def providers_without_nodes(self, repair: bool) -> Iterator[Finding]:
        """Finds root providers that can host instances and have no node; with ``repair``, deletes the empty ones.

        Providers with inventories are reported only where there are nodes at all. Elsewhere the store serves Placement alone.
        """
        fleet = bool(self.nodes.list(limit=1))
        for page in self._usages():
            roots = {
                each.provider.uuid: each for each in page if each.provider.parent is None and each.provider.can_host
            }
            without = roots.keys() - self.nodes.existing(list(roots))
            for uuid in sorted(without):
                if fleet or not roots[uuid].provider.inventories:
                    yield from self._provider_without_node(roots[uuid], repair)

    def _provider_without_node(self, usage: ProviderUsage, repair: bool) -> Iterator[Finding]:
        row = usage.provider
        if not self.store.usages(providers=[row.uuid]) or self.nodes.existing([row.uuid]):
            return  # The node was removed, or enrolled, while the audit read.
        repaired = False
        message = f"Provider {row.name} has no node, and its name is taken."
        if row.inventories:
            message += (
                " It has inventories: it is left alone. If nothing uses it, delete it: "
                f"openstack resource provider delete {row.uuid}."
            )
        elif repair:
            try:
                repaired = self.database.run(lambda tx: self._delete_provider(tx, row.uuid))
            except errors.Conflict as error:
                message += f" It was not deleted: {error.message}"
        yield Finding("provider_without_node", message, provider=row.uuid, repaired=repaired)

    def _delete_provider(self, tx: sa.Connection, uuid: str) -> bool:
        done = self.store.delete_provider(uuid, tx)
        # A node of this uuid that was committed meanwhile is found by writing its row, whatever this transaction has read before.
        if self.nodes.touch(tx, [uuid]):
            raise _ChangedMeanwhileError(f"Node {uuid} was enrolled meanwhile.")
        return done

    def nodes_without_providers(self, repair: bool) -> Iterator[Finding]:
        """Finds nodes that have no provider; with ``repair``, makes providers without inventories."""
        for node in self.enrolment.nodes_without_provider():
            message = f"Node {node.name} has no provider, so nothing can be placed on it. Import it again to give it inventories."
            yield Finding(
                "node_without_provider",
                message,
                provider=node.uuid,
                repaired=repair and self.enrolment.make_provider(node.uuid),
            )

    def _usages(self) -> Iterator[Sequence[ProviderUsage]]:
        after = ""
        while page := self.store.usages(after=after, limit=_PAGE):
            yield page
            after = page[-1].provider.uuid

    # -- instances and allocations --------------------------------------------------------------------------------

    def instances_without_allocation(self, repair: bool) -> Iterator[Finding]:
        """Finds instances that occupy a node and hold nothing; with ``repair``, claims their resources again if they fit."""
        after = ""
        while page := self.instances.all(after=after, limit=_PAGE):
            after = page[-1].uuid
            uuids = [each.uuid for each in page]
            holding = {each.consumer for each in self.store.allocations(consumers=uuids, limit=_ROWS)}
            for uuid in uuids:
                if uuid not in holding and (instance := self._unclaimed(uuid)) is not None:
                    yield self._instance_without_allocation(instance, repair)

    def _unclaimed(self, uuid: str) -> Instance | None:
        """Returns the instance, if it still holds nothing: neither deleted nor changed between the two reads."""
        try:
            before = self.instances.get(uuid)
            if self.store.allocations(consumers=[uuid]) or not before.resources:
                return None
            after = self.instances.get(uuid)
        except errors.NotFound:
            return None
        return after if (after.fence, after.status) == (before.fence, before.status) else None

    def _instance_without_allocation(self, instance: Instance, repair: bool) -> Finding:
        wanted = ", ".join(f"{amount} {name}" for name, amount in sorted(instance.resources.items()))
        message = (
            f"Instance {instance.uuid} is {instance.status} on node {instance.node} and holds no allocation ({wanted})."
        )
        repaired = False
        if repair:
            try:
                self._claim_again(instance)
                repaired = True
            except errors.MoorageError as error:
                message += f" It was not claimed again: {error.message}"
        return Finding(
            "instance_without_allocation",
            message,
            provider=instance.node_uuid,
            consumer=instance.uuid,
            repaired=repaired,
        )

    def _claim_again(self, instance: Instance) -> None:
        claim_of_node(
            instance.node_uuid,
            instance.resources,
            self._proposal(instance),
            lambda held: self.store.claim(
                # The instance uses its resources already, whatever the limits of its project are.
                ClaimRequest(
                    instance.uuid,
                    held,
                    f"audit-{instance.fence}",
                    project=instance.project_id,
                    user=instance.user_id,
                    enforce_quota=False,
                ),
                lambda tx: self._still_there(tx, instance),
            ),
        )

    def _proposal(self, instance: Instance) -> Propose | None:
        """Of which providers of its node an instance may take; None: of the node's own one."""
        found = self.store.usages(providers=[instance.node_uuid])
        if not found:
            return None
        providers = read_providers(self.store, found, lambda uuid: bool(self.nodes.existing([uuid])))[
            instance.node_uuid
        ]
        return proposal(resource_request(spec_of(instance)), providers, {}, self.step_rule)

    def _still_there(self, tx: sa.Connection, instance: Instance) -> None:
        """Writes the instance's row in the transaction of the claim, so that the instance cannot go while it gets the claim."""
        expected = (instance.status,)
        if not self.instances.change(
            tx, instance.uuid, instance.fence, {"fault": instance.fault}, expected=expected, fence=instance.fence
        ):
            raise _ChangedMeanwhileError(
                f"Instance {instance.uuid} was changed or deleted meanwhile. Run the audit again."
            )
