# SPDX-License-Identifier: Apache-2.0
"""The compute service's part in the agent: does the operations of one host (:mod:`moorage_plugins.compute.operations`).

Three stages, each in threads of its own: one takes what waits (up to ``batch``) with one transaction, ``operations`` of them work
on the hypervisor, one finishes what is done (up to ``batch``) with one transaction and then tells the schedulers, in the order of
the commits. What is held is renewed meanwhile. A message that was lost, doubled or came late changes nothing: the worker row
decides what there is to do. Worker rows are of instances, or of the sources of moves (``DEPARTURE``), which let go of them.

An instance whose build fails is handed to a scheduler, which places it on another node. After the last try it gets the status
``error`` and the fault's text, and its claim is released: it occupies nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oslo_context import context as oslo_context
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.allocation.interface import AllocationChange, ConsumerHolding, Expect
from moorage.context import anonymous
from moorage.control_plane.interface import (
    ANY_SCHEDULER,
    DEPARTURE,
    AgentService,
    AgentTools,
    Instance,
    departed_consumer,
    move_consumer,
)
from moorage.rpc.server import incoming, rpc_method
from moorage.work.interface import Lease
from moorage_plugins.compute.driver import DriverError, SimulatedDriver
from moorage_plugins.compute.operations import MOVES, OPERATIONS, Done, Held, event_of

__all__ = ["ComputeAgent"]

LOG = logging.getLogger(__name__)
TYPE = "instance"
#: Resource type and uuid of a worker row.
_Key = tuple[str, str]
#: Seconds before a transaction is tried again that the store could not do.
_PAUSE = 0.5
#: Rows that a sweep reads at a time.
_PAGE = 500
#: What is left of instances that moved away is looked for once in so many sweeps, should the message have been lost.
_STRANGERS = 12


@dataclass(frozen=True, slots=True)
class _Tell:
    """Schedulers shall compare, or replace, what they believe of this host.

    It waits in the queue of what is done: so it is read after what was committed before has been told, and told before anything
    else is committed.
    """

    everything: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """An operation elsewhere has ended on an instance that is or was here. It waits where :class:`_Tell` does."""

    uuid: str


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
        self._batch = int(section.batch)
        self._limit = int(section.queue)
        self._lock = threads.lock()
        self._sweeps = 0
        self._waiting: set[_Key] = set()
        self._requests: dict[str, oslo_context.RequestContext] = {}
        self._leases = tools.workers.renewer("compute-renew")
        # Room for what is taken and not finished: no more than a batch waits for the hypervisor.
        self._room = threads.semaphore(self._batch + int(section.operations))
        self._asked: threads.Queue[_Key | None] = threads.queue()
        #: What was taken, each with its instance as it was then; None for one that is gone, and for departures.
        self._taken: threads.Queue[tuple[Lease, Instance | None] | None] = threads.queue()
        self._done: threads.Queue[Done | _Tell | _Look | None] = threads.queue()
        self._stopping = threads.event()
        self._taker = threads.thread(self._take, name="compute-take")
        self._operators = [
            threads.thread(self._operate, name=f"compute-{number}") for number in range(section.operations)
        ]
        self._finisher = threads.thread(self._finish, name="compute-finish")

    @override
    def endpoints(self) -> Sequence[object]:
        return (self,)

    @override
    def start(self) -> None:
        records = self._tools.instances.by_hosts([self._tools.identity.host])
        self._remove_strangers({record.uuid for record in records})
        self._tools.reporter.host_started(records)
        for thread in (self._finisher, *self._operators, self._taker):
            thread.start()
        self.sweep()

    @override
    def sweep(self) -> None:
        """Take up operations whose message was lost, and those of an earlier epoch or with an expired lease."""
        for of_type in (TYPE, DEPARTURE):
            self._sweep(of_type)
        self._sweeps += 1
        if self._sweeps % _STRANGERS == 0:
            self._remove_strangers({each.uuid for each in self._tools.instances.by_hosts([self._tools.identity.host])})

    def _sweep(self, of_type: str) -> None:
        after = ""
        while True:
            page = self._tools.workers.pending(of_type, self._tools.identity, after=after, limit=_PAGE)
            for worker in page:
                # Kept, and yet to be had: its lease could not be renewed. The store decides when it finishes.
                if not self._leases.keeps(of_type, worker.resource_id):
                    self._ask(worker.resource_id, of_type)
            if len(page) < _PAGE:
                return
            after = page[-1].resource_id

    @override
    def tell_instances(self, *, everything: bool) -> None:
        """The thread that finishes operations does it."""
        if self._tools.reporter.enabled:
            self._done.put(_Tell(everything))

    @override
    def stop(self) -> None:
        """End what is being done on the hypervisor; what only waits is left for the next epoch."""
        self._stopping.set()
        if not self._taker.ident:
            return
        self._asked.put(None)
        # The taker may wait for room, which the operators make.
        self._room.release(self._batch)
        self._taker.join()
        for _ in self._operators:
            self._taken.put(None)
        for thread in self._operators:
            thread.join()
        self._done.put(None)
        self._finisher.join()
        self._leases.stop()

    @rpc_method
    def build_instance(self, instance_uuid: str) -> None:
        """There is an instance to build."""
        self._ask(instance_uuid)

    @rpc_method
    def operate_instance(self, instance_uuid: str) -> None:
        """There is something else to do with an instance, which is or shall be here."""
        self._ask(instance_uuid)

    @rpc_method
    def look_at_instance(self, instance_uuid: str) -> None:
        """An instance of this host has moved, or has not."""
        self._done.put(_Look(instance_uuid))

    @rpc_method
    def let_go_instance(self, instance_uuid: str) -> None:
        """An instance has moved away from this host: remove what is left of it."""
        self._ask(instance_uuid, DEPARTURE)

    @rpc_method
    def delete_instance(self, instance_uuid: str) -> None:
        """There is an instance to delete."""
        self._ask(instance_uuid)

    def _ask(self, uuid: str, of_type: str = TYPE) -> None:
        key = (of_type, uuid)
        context = oslo_context.get_current() if incoming() is not None else None
        with self._lock:
            if context is not None:
                # Kept until the operation ends, so that its lines in the log have the id of the request.
                self._requests[uuid] = context
                while len(self._requests) > self._limit:
                    del self._requests[next(iter(self._requests))]
            if key in self._waiting:
                return
            if len(self._waiting) >= self._limit:
                LOG.warning("%d operations wait already; the sweep will find that of %s.", self._limit, uuid)
                return
            self._waiting.add(key)
        self._asked.put(key)

    # -- taking ---------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        running = True
        while running:
            keys, running = _drain(self._asked, self._batch)
            if self._stopping.is_set():
                return
            with self._lock:
                # From here on a new message for the same instance counts again: it may be of another operation.
                self._waiting.difference_update(keys)
            for _ in keys:
                self._room.acquire()
            for of_type in (TYPE, DEPARTURE):
                self._take_many(of_type, [uuid for each, uuid in keys if each == of_type])

    def _take_many(self, of_type: str, uuids: Sequence[str]) -> None:
        if not uuids:
            return
        taken: Mapping[str, Lease] = {}
        instances: dict[str, Instance] = {}

        def read(transaction: Any, leases: Mapping[str, Lease]) -> None:
            # Nobody else writes these instances, unless by taking the operations over: the finish is fenced against that.
            instances.clear()
            found = self._tools.instances.find(sorted(leases), transaction)
            instances.update({each.uuid: each for each in found})

        try:
            adopt = read if of_type == TYPE else None
            taken = self._tools.workers.take_many(of_type, uuids, self._tools.identity, adopt)
        except errors.Unavailable as error:
            LOG.warning("%d operations are put off until the next sweep: %s", len(uuids), error.message)
        except Exception:
            LOG.exception("Operations on %s could not be taken.", ", ".join(uuids))
        if len(taken) < len(uuids):
            self._room.release(len(uuids) - len(taken))
        self._leases.keep(taken.values())
        for uuid, held in taken.items():
            self._taken.put((held, instances.get(uuid)))

    # -- the hypervisor -------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        while True:
            item = self._taken.get()
            if item is None:
                return
            held, instance = item
            if self._stopping.is_set():
                self._give_back(held, "the agent is stopping")
                continue
            (self._requests.get(held.resource_id) or anonymous()).update_store()
            LOG.info("The %s of instance %s begins.", held.operation, held.resource_id)
            try:
                self._done.put(self._do(held, instance))
            except errors.MoorageError as error:
                self._give_back(held, error.message)
            except Exception as error:
                LOG.exception("The %s of instance %s failed.", held.operation, held.resource_id)
                self._give_back(held, f"{type(error).__name__}: {error}")

    def _do(self, held: Lease, instance: Instance | None) -> Done:
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
            # It was taken by the message of an earlier operation, which another host's has replaced since.
            raise errors.Conflict(f"The {held.operation} of instance {held.resource_id} is {host}'s to do.")
        done = operation(Held(held, instance, self._driver))
        if done.made and done.changes is not None and done.changes["fault"]:
            self._discard(held)
        return done

    def _let_go(self, uuid: str, held: Lease) -> Done:
        """Remove what a move left on this host. The end of the operation releases the resources on this host."""
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
        """Remove from the hypervisor what this try left; what cannot be removed goes with the next start."""
        try:
            self._driver.discard(held.resource_id, held.token)
        except DriverError as error:
            LOG.warning("What the %s of %s left is still there: %s", held.operation, held.resource_id, error)

    def _remove_strangers(self, known: Set[str]) -> None:
        """Destroy what runs here and is not of this host: left by a try that was taken over, or by what has moved away."""
        for uuid, token in self._driver.running().items():
            if uuid not in known:
                self._remove_stranger(uuid, token)

    def _remove_stranger(self, uuid: str, token: int) -> bool:
        tools = self._tools
        host = tools.identity.host
        try:
            if tools.instances.get(uuid).host == host:
                return False
            worker = tools.workers.get(TYPE, uuid)
            if worker is not None and worker.addressed_to == host:
                return False
            LOG.info("Instance %s is on this host no more; what it left is destroyed.", uuid)
        except errors.NotFound:
            LOG.warning("Instance %s runs here but does not exist; it is destroyed.", uuid)
        self._driver.destroy(uuid, newest=token)
        return True

    def _give_back(self, held: Lease, reason: str) -> None:
        """The sweep of whoever may do it then takes it up. Raises nothing: what made the operation fail often fails here too."""
        try:
            held.release(reason)
        except errors.Unavailable as error:
            LOG.warning("The operation on %s stays until its lease ends: %s", held.resource_id, error.message)
        except Exception:
            LOG.exception("The operation on %s stays until its lease ends.", held.resource_id)
        finally:
            self._forget([held])

    # -- finishing ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        running = True
        while running:
            found: list[Done | _Tell | _Look]
            found, running = _drain(self._done, self._batch)
            batch = [each for each in found if isinstance(each, Done)]
            self._finish_batch(batch)
            self._tell([each for each in found if isinstance(each, _Tell)])
            for each in found:
                if isinstance(each, _Look):
                    self._look(each.uuid)

    def _finish_batch(self, batch: Sequence[Done]) -> None:
        if batch:
            try:
                written = self._commit(batch)
                self._observe(written)
                self._report(written)
            except Exception as error:
                LOG.exception("Finished operations could not be written.")
                for each in batch:
                    self._give_back(each.held, f"{type(error).__name__}: {error}")
            else:
                self._forget([each.held for each in batch])

    def _tell(self, wanted: Sequence[_Tell]) -> None:
        """Once for however many asked."""
        if not wanted:
            return
        try:
            records = self._tools.instances.by_hosts([self._tools.identity.host])
            if any(each.everything for each in wanted):
                self._tools.reporter.host_started(records)
            else:
                self._tools.reporter.sync(records)
        except errors.Unavailable as error:
            LOG.warning("Schedulers cannot be told of the instances of this host now: %s", error.message)
        except Exception:
            LOG.exception("Schedulers were not told of the instances of this host.")

    def _look(self, uuid: str) -> None:
        """Of an instance that was moved from here only this agent can remove what it left."""
        tools = self._tools
        try:
            instance = tools.instances.get(uuid)
            if instance.host == tools.identity.host and instance.status == "error":
                # A scheduler gave up its build; it occupies nothing.
                tools.reporter.deleted([uuid])
            elif instance.host == tools.identity.host:
                tools.reporter.created([instance])
            elif self._remove_stranger(uuid, self._driver.running().get(uuid, 0)):
                tools.reporter.live_migrated(instance, source=True)
        except errors.NotFound:
            self._driver.destroy(uuid, newest=self._driver.running().get(uuid, 0))
            tools.reporter.deleted([uuid])
        except errors.Unavailable as error:
            LOG.warning("Instance %s cannot be looked at now: %s", uuid, error.message)
        except Exception:
            LOG.exception("What instance %s left could not be removed.", uuid)

    def _commit(self, batch: Sequence[Done], *, unknown: bool = False) -> list[Done]:
        """Write all in one transaction and return those that are written. Waits for a store that is away, until the agent stops.

        :param unknown: an earlier commit of this batch has an unknown outcome, so its rows may be written already.
        """
        # Claims are released in the order of their providers, so that two agents do not wait for each other.
        ordered = sorted(
            batch, key=lambda each: (each.instance.node_uuid if each.instance else "", each.held.resource_id)
        )
        moved = [each for each in ordered if each.holds is not None]
        if moved and len(ordered) > 1:
            # The claims of a move change in a transaction that is the store's own.
            kept = [each for each in ordered if each.holds is None]
            parts = (kept, *([each] for each in moved))
            return [written for part in parts if part for written in self._commit(part, unknown=unknown)]
        while True:
            try:
                if len(ordered) == 1 and unknown and self._is_written(ordered[0]):
                    return ordered
                self._write_together(ordered)
                return ordered
            except errors.Fenced as error:
                if len(ordered) > 1:
                    # One operation of the batch was taken over, or is written; each is now committed alone.
                    return [written for each in ordered for written in self._commit([each], unknown=unknown)]
                LOG.warning("%s", error.message)
                if ordered[0].made and not unknown:
                    # After an unknown outcome it may be the instance itself; the sweep removes it if it is not.
                    self._discard(ordered[0].held)
                return []
            except errors.Unavailable as error:
                LOG.warning("%d operations are done but not written yet: %s", len(ordered), error.message)
                unknown = unknown or error.details.get("outcome") == "unknown"
                if self._tools.clock.wait(self._stopping, _PAUSE):
                    # The next epoch does them again.
                    return []

    def _is_written(self, done: Done) -> bool:
        """Whether an earlier commit of this operation succeeded: only that writes its token into the instance's row."""
        try:
            return self._tools.instances.get(done.held.resource_id).fence == done.held.token
        except errors.NotFound:
            return done.changes is None

    def _write_together(self, batch: Sequence[Done]) -> None:
        (first, *others) = batch
        owner = first.instance
        if first.holds is None or owner is None or others:
            self._tools.database.run(lambda tx: self._write_all(tx, batch))
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
        if not first.left:
            self._tools.store.replace(changes, lambda tx: self._write_row(tx, first))
            return
        source = self._tools.store.consumer(uuid)
        if source is not None:
            kept = AllocationChange(
                departed_consumer(uuid), _resources(source), Expect.NOTHING, owner.project_id, owner.user_id,
                consumer_type="MIGRATION_SOURCE",
            )  # fmt: skip
            changes = [dataclasses.replace(changes[0], expected=source.consumer.generation), *changes[1:], kept]
        self._tools.store.replace(changes, lambda tx: self._write_move(tx, first))

    def _write_move(self, tx: Any, done: Done) -> None:
        """The end of a move from another host, and the operation by which that host lets go of the instance."""
        self._write_row(tx, done)
        self._tools.workers.create(tx, DEPARTURE, done.held.resource_id, "let_go", "leaving", addressed_to=done.left)

    def _write_all(self, tx: Any, batch: Sequence[Done]) -> None:
        for each in batch:
            self._write(tx, each)

    def _write(self, tx: Any, done: Done) -> None:
        self._write_row(tx, done)
        for consumer in done.releases:
            self._tools.release(consumer, tx, residents=done.leaves(consumer))

    def _write_row(self, tx: Any, done: Done) -> None:
        """The fenced write of one operation and the end of its worker row."""
        instances, held = self._tools.instances, done.held
        held.end(tx)
        if done.instance is None:
            return
        if done.changes is None:
            written = instances.remove(tx, held.resource_id, held.token)
        else:
            written = instances.change(tx, held.resource_id, held.token, done.changes)
        if not written:
            raise errors.Fenced(f"Instance {held.resource_id} was written by a later operation, or removed.")
        if done.elsewhere:
            self._tools.workers.create(
                tx, TYPE, held.resource_id, held.operation, held.status, addressed_to=ANY_SCHEDULER
            )

    def _observe(self, written: Sequence[Done]) -> None:
        for each in written:
            context = self._requests.pop(each.held.resource_id, None)
            (context or anonymous()).update_store()
            LOG.info("The %s of instance %s has ended.", each.held.operation, each.held.resource_id)
            if each.held.resource_type == TYPE and not each.elsewhere:
                self._tools.tell(event_of(each, self._tools.identity.host))

    def _report(self, written: Sequence[Done]) -> None:
        """After the commit: tell every scheduler, and the host that an instance has left."""
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

    def _forget(self, leases: Sequence[Lease]) -> None:
        self._leases.forget(leases)
        self._room.release(len(leases))


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


def _drain(source: threads.Queue[Any], limit: int) -> tuple[list[Any], bool]:
    """What waits in the queue, at least one and at most ``limit``; and whether to go on: None in the queue ends it."""
    found: list[Any] = []
    item = source.get()
    while item is not None:
        found.append(item)
        if len(found) == limit:
            return found, True
        try:
            item = source.get_nowait()
        except threads.Empty:
            return found, True
    return found, False
