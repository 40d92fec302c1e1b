# SPDX-License-Identifier: Apache-2.0
"""The compute service's part in the agent: does the operations of one host (:mod:`moorage_plugins.compute.operations`).

:class:`moorage.work.loop.WorkLoop` takes the operations, renews their leases and finishes them; :class:`InstanceWork` says what
they do on the hypervisor and what is written. Operations are of instances, or of the sources of moves (``DEPARTURE``), whose host
removes what a move left there.

An instance whose build fails is handed to a scheduler, which places it on another node. After the last try it gets the status
``error`` and the fault's text, and its claim is released: it occupies nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.allocation.interface import AllocationChange, ConsumerHolding, Expect
from moorage.context import anonymous
from moorage.control_plane.interface import AgentService, AgentTools
from moorage.instances.interface import (
    DEPARTURE,
    Instance,
    departed_consumer,
    move_consumer,
)
from moorage.rpc.server import rpc_method
from moorage.work.interface import ANY_SCHEDULER, Lease
from moorage.work.job import Job, Work
from moorage.work.loop import WorkLoop
from moorage_plugins.compute.driver import DriverError, SimulatedDriver
from moorage_plugins.compute.operations import MOVES, OPERATIONS, Done, Held, event_of

__all__ = ["ComputeAgent", "InstanceWork"]

LOG = logging.getLogger(__name__)
TYPE = "instance"
#: A sweep out of so many looks for instances that moved away, in case the message about them was lost.
_UNKNOWN_INSTANCES = 12

Batch = Sequence[tuple[Job[Done], Done]]


class ComputeAgent(AgentService):
    """Does operations on the instances of one host."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        section = tools.conf.compute
        self._driver = SimulatedDriver(
            Path(tools.conf.control_plane.state_dir) / "hypervisors" / tools.identity.host,
            tools.clock,
            build_delay=section.build_delay,
            destroy_delay=section.destroy_delay,
            fail_builds=section.fail_builds,
        )
        self._sweeps = 0
        self._lock = threads.lock()
        #: Whether a report to the schedulers waits for the finishing thread, and whether of all instances. None: none waits.
        self._report_all: bool | None = None
        self.loop = WorkLoop(
            "compute",
            InstanceWork(tools, self._driver),
            tools.clock,
            operations=int(section.operations),
            batch=int(section.batch),
            # No more than a batch waits for the hypervisor.
            ahead=int(section.batch),
            queue=int(section.queue),
        )

    @override
    def endpoints(self) -> Sequence[object]:
        return (self,)

    @override
    def start(self) -> None:
        records = self._tools.instances.by_hosts([self._tools.identity.host])
        self._remove_unknown_instances({record.uuid for record in records})
        self._tools.reporter.host_started(records)
        self.loop.start()
        self.sweep()

    @override
    def sweep(self) -> None:
        """Takes operations whose message was lost, and now and then removes instances that moved away."""
        self.loop.sweep()
        self._sweeps += 1
        if self._sweeps % _UNKNOWN_INSTANCES == 0:
            records = self._tools.instances.by_hosts([self._tools.identity.host])
            self._remove_unknown_instances({each.uuid for each in records})

    @override
    def tell_instances(self, *, everything: bool) -> None:
        """Has the finishing thread tell schedulers the instances of this host, once however often it is asked meanwhile."""
        if not self._tools.reporter.enabled:
            return
        with self._lock:
            waits = self._report_all is not None
            self._report_all = everything or bool(self._report_all)
        if not waits:
            self.loop.in_order(self._tell)

    @override
    def stop(self) -> None:
        """Ends what is being done on the hypervisor; what only waits is left for the next epoch."""
        self.loop.stop()

    @rpc_method
    def build_instance(self, instance_uuid: str) -> None:
        """Builds an instance."""
        self.loop.ask(TYPE, instance_uuid)

    @rpc_method
    def operate_instance(self, instance_uuid: str) -> None:
        """Does what is recorded for an instance, which is on this host or comes to it."""
        self.loop.ask(TYPE, instance_uuid)

    @rpc_method
    def look_at_instance(self, instance_uuid: str) -> None:
        """Removes an instance that has left this host, or tells schedulers that it has not."""
        self.loop.in_order(functools.partial(self._look, instance_uuid))

    @rpc_method
    def let_go_instance(self, instance_uuid: str) -> None:
        """Removes what is left here of an instance that has moved away."""
        self.loop.ask(DEPARTURE, instance_uuid)

    @rpc_method
    def delete_instance(self, instance_uuid: str) -> None:
        """Deletes an instance."""
        self.loop.ask(TYPE, instance_uuid)

    def _remove_unknown_instances(self, known: Set[str]) -> None:
        """Destroys what runs here and belongs elsewhere: left by a try that was taken over, or by an instance that moved away."""
        for uuid, token in self._driver.running().items():
            if uuid not in known:
                self._remove_unknown_instance(uuid, token)

    def _remove_unknown_instance(self, uuid: str, token: int) -> bool:
        tools = self._tools
        host = tools.identity.host
        try:
            if tools.instances.get(uuid).host == host:
                return False
            operation = tools.workers.get(TYPE, uuid)
            if operation is not None and operation.addressed_to == host:
                return False
            LOG.info("Instance %s is on this host no more; what it left is destroyed.", uuid)
        except errors.NotFound:
            LOG.warning("Instance %s runs here but does not exist; it is destroyed.", uuid)
        self._driver.destroy(uuid, newest=token)
        return True

    def _tell(self) -> None:
        """Tells schedulers the instances of this host."""
        with self._lock:
            everything, self._report_all = self._report_all, None
        records = self._tools.instances.by_hosts([self._tools.identity.host])
        if everything:
            self._tools.reporter.host_started(records)
        else:
            self._tools.reporter.sync(records)

    def _look(self, uuid: str) -> None:
        """Compares an instance with its row; only this agent can remove what the instance left here."""
        tools = self._tools
        try:
            instance = tools.instances.get(uuid)
        except errors.NotFound:
            self._driver.destroy(uuid, newest=self._driver.running().get(uuid, 0))
            tools.reporter.deleted([uuid])
            return
        if instance.host == tools.identity.host and instance.status == "error":
            # A scheduler gave up its build; it occupies nothing.
            tools.reporter.deleted([uuid])
        elif instance.host == tools.identity.host:
            tools.reporter.created([instance])
        elif self._remove_unknown_instance(uuid, self._driver.running().get(uuid, 0)):
            tools.reporter.live_migrated(instance, source=True)


class InstanceWork(Work[Done]):
    """What operations on instances do on the hypervisor, and what their ends write."""

    types = (TYPE, DEPARTURE)

    def __init__(self, tools: AgentTools, driver: SimulatedDriver) -> None:
        super().__init__(tools.database, tools.workers, tools.identity)
        self._tools = tools
        self._driver = driver

    @override
    def take(self, resource_type: str, resource_ids: Sequence[str]) -> Sequence[Job[Done]]:
        """Takes operations together with their instances, as they are in that transaction; None for one that is gone."""
        instances: dict[str, Instance] = {}

        def read(transaction: Any, leases: Mapping[str, Lease]) -> None:
            # Only a later owner of an operation can write its instance from here on, and the finish is fenced against that.
            instances.clear()
            found = self._tools.instances.find(sorted(leases), transaction)
            instances.update({each.uuid: each for each in found})

        also = read if resource_type == TYPE else None
        taken = self.store.take_many(resource_type, resource_ids, self.identity, also)
        return [Job([held], instances.get(uuid)) for uuid, held in taken.items()]

    @override
    def do(self, job: Job[Done]) -> Done:
        held, instance = job.lease, job.item
        if held.resource_type == DEPARTURE:
            return self._let_go(held.resource_id, held)
        if instance is None:
            self._driver.destroy(held.resource_id)
            return Done(held, None, None, (held.resource_id, move_consumer(held.resource_id)), tell="deleted")
        operation = OPERATIONS.get(held.operation)
        if operation is None:
            raise errors.InvalidInput(f"This agent does not know how to {held.operation} an instance; upgrade it.")
        host = instance.pending.get("host", instance.host) if held.operation in MOVES else instance.host
        if host != self._tools.identity.host:
            # It was taken by the message of an earlier operation, which an operation of another host has replaced since.
            raise errors.Conflict(f"The {held.operation} of instance {held.resource_id} is {host}'s to do.")
        done = operation(Held(held, instance, self._driver))
        if done.made and done.changes is not None and done.changes["fault"]:
            self._discard(held)
        return done

    def _let_go(self, uuid: str, held: Lease) -> Done:
        """Removes what a move left on this host. The end of the operation releases the resources on this host."""
        try:
            if not self._is_here(uuid):
                self._driver.destroy(uuid, newest=self._driver.running().get(uuid, 0))
        except DriverError as error:
            raise errors.Unavailable(
                f"Instance {uuid}, which has moved away, cannot be destroyed here: {error}"
            ) from error
        return Done(held, None, None, (departed_consumer(uuid),), tell="left")

    def _is_here(self, uuid: str) -> bool:
        try:
            return bool(self._tools.instances.get(uuid).host == self._tools.identity.host)
        except errors.NotFound:
            return False

    def _discard(self, held: Lease) -> None:
        """Removes from the hypervisor what this try left; what cannot be removed goes with the next start."""
        try:
            self._driver.discard(held.resource_id, held.token)
        except DriverError as error:
            LOG.warning("What the %s of %s left is still there: %s", held.operation, held.resource_id, error)

    # -- finishing --------------------------------------------------------------------------------------------------

    @override
    def order(self, job: Job[Done], result: Done) -> tuple[str, ...]:
        """Claims are released in the order of their providers, so that two agents do not wait for each other."""
        return (result.instance.node_uuid if result.instance else "", job.lease.resource_id)

    @override
    def is_alone(self, job: Job[Done], result: Done) -> bool:
        """The claims of a move change in a transaction that is the store's own."""
        return result.holds is not None

    @override
    def commit(self, batch: Batch, write: Callable[[Any], None]) -> None:
        (_, first), *others = batch
        owner = first.instance
        if first.holds is None or owner is None or others:
            self.database.run(write)
            return
        uuid = first.held.resource_id
        # A client of Placement may have deleted the consumer. This creates it again, with its owner and type.
        changes = [
            AllocationChange(
                uuid,
                first.holds,
                project=owner.project_id,
                user=owner.user_id,
                consumer_type="INSTANCE",
                residents=dict.fromkeys(first.leaves(uuid)),
            ),
            *(AllocationChange(each, {}) for each in first.releases),
        ]
        source = self._tools.store.consumer(uuid) if first.left else None
        if source is not None:
            kept = AllocationChange(
                departed_consumer(uuid), _resources(source), Expect.NOTHING, owner.project_id, owner.user_id,
                consumer_type="MIGRATION_SOURCE",
            )  # fmt: skip
            changes = [dataclasses.replace(changes[0], expected=source.consumer.generation), *changes[1:], kept]
        self._tools.store.replace(changes, write)

    @override
    def finish(self, transaction: Any, job: Job[Done], result: Done) -> None:
        instances, held = self._tools.instances, result.held
        if result.instance is not None:
            if result.changes is None:
                written = instances.remove(transaction, held.resource_id, held.token)
            else:
                written = instances.change(transaction, held.resource_id, held.token, result.changes)
            if not written:
                raise errors.Fenced(f"Instance {held.resource_id} was written by a later operation, or removed.")
        create = self.store.create
        if result.elsewhere:
            create(transaction, TYPE, held.resource_id, held.operation, held.status, addressed_to=ANY_SCHEDULER)
        if result.holds is None:
            for consumer in result.releases:
                self._tools.release(consumer, transaction, residents=result.leaves(consumer))
        elif result.left:
            # The source's host lets go of the instance.
            create(transaction, DEPARTURE, held.resource_id, "let_go", "leaving", addressed_to=result.left)

    @override
    def is_written(self, job: Job[Done], result: Done) -> bool:
        """Only the commit of this operation writes its token into the instance's row."""
        try:
            return self._tools.instances.get(job.lease.resource_id).fence == job.lease.token
        except errors.NotFound:
            return result.changes is None

    @override
    def overtaken(self, job: Job[Done], result: Done) -> Batch:
        if result.made and not job.unknown:
            # After an unknown outcome it may be the instance itself; a sweep removes it if it is not.
            self._discard(result.held)
        return ()

    @override
    def after_commit(self, written: Batch) -> None:
        """Tells observers, every scheduler, and the host that an instance has left."""
        for job, done in written:
            (job.context or anonymous()).update_store()
            if done.held.resource_type == TYPE and not done.elsewhere:
                self._tools.tell(event_of(done, self._tools.identity.host))
        anonymous().update_store()
        self._report([done for _, done in written])

    def _report(self, written: Sequence[Done]) -> None:
        reporter = self._tools.reporter
        told: dict[str, list[Done]] = {}
        for each in written:
            told.setdefault(each.tell, []).append(each)
            if each.left and each.left != self._tools.identity.host:
                method = "look_at_instance" if each.holds is None else "let_go_instance"
                self._tools.cast(each.left, method, each.held.resource_id)
        if created := told.pop("created", []):
            reporter.created([_now(each) for each in created])
        if gone := [*told.pop("deleted", []), *told.pop("left", [])]:
            reporter.deleted([each.held.resource_id for each in gone])
        for name, several in told.items():
            for each in several:
                if name == "shelved_offloaded":
                    reporter.shelved_offloaded(each.held.resource_id)
                elif name == "live_migrated":
                    reporter.live_migrated(_now(each), source=False)
                elif name:
                    getattr(reporter, name)(_now(each))


def _resources(holding: ConsumerHolding) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for item in holding.allocations:
        found.setdefault(item.provider, {})[item.resource_class] = item.used
    return found


def _now(done: Done) -> Instance:
    """The instance as it was written."""
    if done.instance is None or done.changes is None:
        raise TypeError("an instance that is gone is told by its uuid")
    return dataclasses.replace(done.instance, **done.changes)
