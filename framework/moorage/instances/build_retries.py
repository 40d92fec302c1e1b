# SPDX-License-Identifier: Apache-2.0
"""Places an instance on another node when its build failed, or when its agent went down before it began the build.

The agent whose build failed leaves the instance ``building``, with the claim on its node, and addresses the operation to the
schedulers. A scheduler ranks the nodes again without those that were tried. One transaction then moves the claim, writes the new
host and addresses the operation to it. Its condition is the token of the operation: of several schedulers, and an agent that is
back, one succeeds. ``pending["retries"]`` bounds the tries; ``pending["tried"]`` says what was tried, and why it failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import AllocationChange, AllocationLedger, AllocationStore, ClaimOutcome
from moorage.clock import Clock
from moorage.context import acting_for, from_text
from moorage.db import Database
from moorage.instances.availability import Availability
from moorage.instances.create import BUILD, NodeNames, check_neighbours, pending_holds, record_placement
from moorage.instances.interface import Instance, InstanceStore
from moorage.instances.move_requests import spec_of
from moorage.instances.observed_claims import ObservedClaimer
from moorage.instances.providers import claim_of_node
from moorage.observers.interface import InstanceFailed, ObserverEvent
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import ClaimResult, Holds, RequestSpec
from moorage.scheduling.placement import Selection
from moorage.scheduling.scheduler import Scheduler
from moorage.work.interface import ANY_SCHEDULER, Operation
from moorage.work.operations import SqlOperationStore

__all__ = ["BuildRetries", "RetryClaimer", "RetryStores"]

LOG = logging.getLogger(__name__)
_PAGE = 500
#: Seconds after which an instance that could not be placed elsewhere is tried again.
_PAUSE = 10.0
#: How often, and with how many seconds in between, no other node must be found before an instance gets the status error. The
#: view of a scheduler may be late, and a node may be unavailable for a moment.
_LOOKS, _BETWEEN = 3, 2.0
_AGENT_DOWN = "the agent went down before it began the build"


@dataclass(frozen=True, slots=True)
class RetryStores:
    """What a retry reads and writes."""

    database: Database
    store: AllocationStore
    instances: InstanceStore
    workers: SqlOperationStore
    node_names: NodeNames
    groups: GroupStore
    availability: Availability


@dataclass(frozen=True, slots=True)
class RetryClaimer:
    """A Claimer (see :mod:`moorage.scheduling.interface`) that moves the claim of an instance that is being built.

    :param worker: the operation as it was read; the claim fails with Conflict when another service has taken or changed it since.
    :param pending: of the instance from now on, without the limits.
    """

    stores: RetryStores
    instance: Instance
    worker: Operation
    pending: Mapping[str, Any]

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Take the resources there, release those of the failed try and address the operation, in one transaction."""
        stores = self.stores
        to = {"host": host, "node": stores.node_names.node_name(node_uuid), "node_uuid": node_uuid}
        pending = {**self.pending, **({"limits": dict(spec.limits)} if spec.limits else {})}
        # Those of the failed try.
        pending.pop("holds", None)

        def record(transaction: Any, held: Holds) -> None:
            stores.availability.check(transaction, node_uuid, host)
            check_neighbours(transaction, stores.groups, stores.instances, spec, node_uuid)
            token = _take_over(
                stores,
                transaction,
                self.instance,
                self.worker,
                host,
                {**to, "pending": {**pending, **pending_holds(spec, held)}},
            )
            record_placement(transaction, spec, BUILD, to["node"], token)

        def take(held: Mapping[str, Mapping[str, int]]) -> ClaimOutcome:
            if not isinstance(stores.store, AllocationLedger):
                raise errors.ConfigError(
                    "The allocation store cannot move claims, so no build is tried again; use sql."
                )
            change = AllocationChange(
                self.instance.uuid,
                held,
                project=spec.project_id,
                user=spec.user_id,
                consumer_type="INSTANCE",
                residents={self.instance.node_uuid: None, node_uuid: spec.residents},
            )
            return stores.store.replace([change], lambda transaction: record(transaction, held))[0]

        _, holds = claim_of_node(node_uuid, spec.flavor.resources, spec.propose, take)
        return ClaimResult(node_uuid, holds=holds)

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """None: a retry is never repeated, since its condition holds once."""
        return None

    def release(self, instance_uuid: str) -> None:
        """Nothing is held that was not recorded."""


def _take_over(
    stores: RetryStores,
    transaction: Any,
    instance: Instance,
    worker: Operation,
    host: str,
    changes: Mapping[str, Any],
) -> int:
    """Take the operation from whom it was addressed to, and change the instance; the new token.

    :raises Conflict: the operation or the instance has changed since it was read.
    """
    uuid = instance.uuid
    token = stores.workers.readdress(transaction, worker, host)
    if not stores.instances.change(transaction, uuid, token, changes, expected=("building",), fence=instance.fence):
        raise errors.Conflict(f"The build of instance {uuid} has changed meanwhile; another service goes on with it.")
    return token


@dataclass(slots=True)
class BuildRetries:
    """Finds builds that need another node, and places them; used by one thread.

    :param down: the hosts whose agents are down.
    :param placed: tells the agent of the new node, and the other schedulers.
    :param cast: has an agent look at an instance, after which it tells all schedulers.
    :param tell: tells observers of claims, and of an instance that could be built nowhere.
    """

    stores: RetryStores
    scheduler: Scheduler
    clock: Clock
    down: Callable[[], frozenset[str]]
    placed: Callable[[Sequence[Selection]], None]
    cast: Callable[[str, str, str], None]
    tell: Callable[[ObserverEvent], None]
    _not_before: dict[str, float] = field(default_factory=dict)
    #: How often no node was found for an instance.
    _refused: Counter[str] = field(default_factory=Counter)

    def found(self, transaction: Any) -> bool:
        """Returns whether operations wait for a scheduler, or for an agent that is down. One indexed statement."""
        kind = self.stores.instances.resource_type
        return bool(self.stores.workers.waiting(kind, self._names(), limit=1, transaction=transaction))

    def _names(self) -> list[str]:
        return [ANY_SCHEDULER, *sorted(self.down())]

    def tick(self) -> None:
        """Look once; one indexed statement when there is nothing to do."""
        now = self.clock.monotonic()
        self._not_before = {uuid: at for uuid, at in self._not_before.items() if at > now}
        names, after = self._names(), ""
        while True:
            page = self.stores.workers.waiting(self.stores.instances.resource_type, names, after=after, limit=_PAGE)
            for worker in page:
                # What an agent has begun may run there; it is left to that agent, or to cleanup.
                begun = worker.target_host != ANY_SCHEDULER and worker.attempts
                if worker.operation == BUILD and not begun and worker.resource_id not in self._not_before:
                    self._retry(worker)
            if len(page) < _PAGE:
                break
            after = page[-1].resource_id
        self._refused = Counter({uuid: times for uuid, times in self._refused.items() if uuid in self._not_before})

    def _retry(self, worker: Operation) -> None:
        try:
            instance = self.stores.instances.get(worker.resource_id)
            if instance.status == "building":
                with acting_for(from_text(worker.request)):
                    self._place(worker, instance)
        except (errors.NotFound, errors.Conflict) as error:
            LOG.debug("The build of %s is not tried again here: %s", worker.resource_id, error.message)
        except errors.MoorageError as error:
            LOG.warning("The build of %s cannot be tried again now: %s", worker.resource_id, error.message)
            self._not_before[worker.resource_id] = self.clock.monotonic() + _PAUSE

    def _place(self, worker: Operation, instance: Instance) -> None:
        pending = dict(instance.pending)
        failed = worker.target_host == ANY_SCHEDULER
        if not failed:
            if not pending.get("retries"):
                return
            tried = {
                "host": instance.host,
                "node": instance.node,
                "node_uuid": instance.node_uuid,
                "fault": _AGENT_DOWN,
            }
            pending |= {"retries": pending["retries"] - 1, "tried": [*pending.get("tried", ()), tried]}
        tried_nodes = tuple(each["node_uuid"] for each in pending["tried"])
        spec = spec_of(instance)
        spec = replace(
            spec,
            ignore_hosts=tuple(pending.get("ignore_hosts", ())),
            ignore_nodes=(*pending.get("ignore_nodes", ()), *tried_nodes),
        )
        claimer = ObservedClaimer(RetryClaimer(self.stores, instance, worker, pending), self.tell)
        try:
            chosen = self.scheduler.place(
                spec, str(pending["request_id"]), claimer=claimer, tried=tuple(pending["tried"])
            )
        except errors.NoValidHost:
            if not failed:
                raise
            self._refused[instance.uuid] += 1
            if self._refused[instance.uuid] < _LOOKS:
                self._not_before[instance.uuid] = self.clock.monotonic() + _BETWEEN
                return
            del self._refused[instance.uuid]
            self._give_up(worker, instance)
            return
        self._refused.pop(instance.uuid, None)
        LOG.info("Instance %s is built on node %s of %s now.", instance.uuid, chosen.record.node, chosen.record.host)
        self.placed([chosen])

    def _give_up(self, worker: Operation, instance: Instance) -> None:
        """No other node can take it: the instance gets the status error and the fault of its last try."""
        stores, uuid = self.stores, instance.uuid
        changes = {"status": "error", "fault": instance.fault, "pending": {}}

        def write(transaction: Any) -> None:
            token = _take_over(stores, transaction, instance, worker, "", changes)
            stores.workers.withdraw(transaction, stores.instances.resource_type, uuid, token)
            stores.store.release(uuid, transaction, residents=[instance.node_uuid])

        stores.database.run(write)
        # A scheduler may have read the instance while it was being built: the agent tells all of them that it is gone.
        self.cast(instance.host, "look_at_instance", uuid)
        self.tell(InstanceFailed(uuid, instance.host, BUILD, instance.fault))
