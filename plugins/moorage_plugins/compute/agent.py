# SPDX-License-Identifier: Apache-2.0
"""The compute service's part in the agent: does builds and deletions for one host.

Three stages, each in threads of its own: one takes what waits (up to ``batch``) with one transaction, ``operations`` of them work
on the hypervisor, one finishes what is done (up to ``batch``) with one transaction and then tells the schedulers, in the order of
the commits. What is held is renewed meanwhile. A message that was lost, doubled or came late changes nothing: the worker row
decides what there is to do.

An instance whose build fails gets the status ``error`` and the fault's text, and its claim is given back: it occupies nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.cleanup.interface import Lease
from moorage.control_plane.interface import AgentService, AgentTools, Instance
from moorage.rpc.server import rpc_method
from moorage_plugins.compute.driver import DriverError, SimulatedDriver

__all__ = ["ComputeAgent"]

LOG = logging.getLogger(__name__)
TYPE = "instance"
#: Seconds before a transaction is tried again that the store could not do.
_PAUSE = 0.5
#: Rows that a sweep reads at a time.
_PAGE = 500


@dataclass(frozen=True, slots=True)
class _Done:
    """An operation whose effect on the hypervisor is there: what the store shall say now.

    :param instance: None when there was no such row any more.
    :param status: None when the row shall go.
    """

    held: Lease
    instance: Instance | None
    status: str | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Tell:
    """Schedulers shall compare, or replace, what they believe of this host.

    It waits in the queue of what is done: so it is read after what was committed before has been told, and told before anything
    else is committed.
    """

    everything: bool


class ComputeAgent(AgentService):
    """Builds and deletes the instances of one host."""

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
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._held: dict[str, Lease] = {}
        # Room for what is taken and not finished: no more than a batch waits for the hypervisor.
        self._room = threading.Semaphore(self._batch + int(section.operations))
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done | _Tell | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._taker = threading.Thread(target=self._take, name="compute-take", daemon=True)
        self._operators = [
            threading.Thread(target=self._operate, name=f"compute-{number}", daemon=True)
            for number in range(section.operations)
        ]
        self._finisher = threading.Thread(target=self._finish, name="compute-finish", daemon=True)
        self._renewer = threading.Thread(target=self._renew, name="compute-renew", daemon=True)

    @override
    def endpoints(self) -> Sequence[object]:
        return (self,)

    @override
    def start(self) -> None:
        records = self._tools.instances.by_hosts([self._tools.identity.host])
        self._remove_strangers({record.uuid for record in records})
        self._tools.reporter.host_started(records)
        for thread in (self._renewer, self._finisher, *self._operators, self._taker):
            thread.start()
        self.sweep()

    @override
    def sweep(self) -> None:
        """Take up operations whose message was lost, and those of an earlier epoch or with an expired lease."""
        after = ""
        while True:
            page = self._tools.workers.pending(TYPE, self._tools.identity, after=after, limit=_PAGE)
            for worker in page:
                with self._lock:
                    # Held, and yet to be had: its lease could not be renewed. The store decides when it finishes.
                    held = worker.resource_id in self._held
                if not held:
                    self._ask(worker.resource_id)
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
        self._ended.set()
        self._renewer.join()

    @rpc_method
    def build_instance(self, instance_uuid: str) -> None:
        """There is an instance to build."""
        self._ask(instance_uuid)

    @rpc_method
    def delete_instance(self, instance_uuid: str) -> None:
        """There is an instance to delete."""
        self._ask(instance_uuid)

    def _ask(self, uuid: str) -> None:
        with self._lock:
            if uuid in self._waiting:
                return
            if len(self._waiting) >= self._limit:
                LOG.warning("%d operations wait already; that of %s will be found by the sweep.", self._limit, uuid)
                return
            self._waiting.add(uuid)
        self._asked.put(uuid)

    # -- taking ---------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        running = True
        while running:
            uuids, running = _drain(self._asked, self._batch)
            if self._stopping.is_set():
                return
            with self._lock:
                # From here on a new message for the same instance counts again: it may be of another operation.
                self._waiting.difference_update(uuids)
            for _ in uuids:
                self._room.acquire()
            taken: Mapping[str, Lease] = {}
            try:
                taken = self._tools.workers.take_many(TYPE, uuids, self._tools.identity)
            except errors.Unavailable as error:
                LOG.warning("%d operations are put off until the next sweep: %s", len(uuids), error.message)
            except Exception:
                LOG.exception("Operations on %s could not be taken.", ", ".join(uuids))
            if len(taken) < len(uuids):
                self._room.release(len(uuids) - len(taken))
            with self._lock:
                self._held.update(taken)
            for held in taken.values():
                self._taken.put(held)

    # -- the hypervisor -------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        while True:
            held = self._taken.get()
            if held is None:
                return
            if self._stopping.is_set():
                self._give_back(held, "the agent is stopping")
                continue
            try:
                self._done.put(self._do(held))
            except errors.MoorageError as error:
                self._give_back(held, error.message)
            except Exception as error:
                LOG.exception("The %s of instance %s failed.", held.operation, held.resource_id)
                self._give_back(held, f"{type(error).__name__}: {error}")

    def _do(self, held: Lease) -> _Done:
        try:
            instance = self._tools.instances.get(held.resource_id)
        except errors.NotFound:
            instance = None
        try:
            if instance is None or held.operation == "delete":
                self._driver.destroy(held.resource_id)
                return _Done(held, instance, None)
            self._driver.build(instance.uuid, held.token, instance.request.get("extra_specs", {}))
            return _Done(held, instance, "active")
        except DriverError as error:
            if instance is None or held.operation == "delete":
                raise errors.Unavailable(f"Instance {held.resource_id} cannot be destroyed: {error}") from error
            self._discard(held)
            return _Done(held, instance, "error", str(error))

    def _discard(self, held: Lease) -> None:
        """Remove from the hypervisor what this try left; what cannot be removed goes with the next start."""
        try:
            self._driver.discard(held.resource_id, held.token)
        except DriverError as error:
            LOG.warning("What the build of %s left is still there: %s", held.resource_id, error)

    def _remove_strangers(self, known: Set[str]) -> None:
        """Destroy what runs here and is in no row: left by a build that was taken over while it ran."""
        for uuid in self._driver.running().keys() - known:
            try:
                self._tools.instances.get(uuid)
            except errors.NotFound:
                LOG.warning("Instance %s runs here but does not exist; it is destroyed.", uuid)
                self._driver.destroy(uuid)

    def _give_back(self, held: Lease, reason: str) -> None:
        """The sweep of whoever may do it then takes it up. Raises nothing: what made the operation fail often fails here too."""
        try:
            held.give_back(reason)
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
            found: list[_Done | _Tell]
            found, running = _drain(self._done, self._batch)
            batch = [each for each in found if isinstance(each, _Done)]
            self._finish_batch(batch)
            self._tell([each for each in found if isinstance(each, _Tell)])

    def _finish_batch(self, batch: Sequence[_Done]) -> None:
        if batch:
            try:
                self._report(self._commit(batch))
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

    def _commit(self, batch: Sequence[_Done]) -> list[_Done]:
        """Write all in one transaction; those that were written. Waits for a store that is away, until the agent stops."""
        # Claims are given back in the order of their providers, so that two agents do not wait for each other.
        ordered = sorted(
            batch, key=lambda each: (each.instance.node_uuid if each.instance else "", each.held.resource_id)
        )
        while True:
            try:
                self._tools.database.run(lambda tx: self._write_all(tx, ordered))
                return ordered
            except errors.Fenced as error:
                if len(ordered) > 1:
                    # One of the batch was taken over: the others must not suffer for it.
                    return [written for each in ordered for written in self._commit([each])]
                LOG.warning("%s", error.message)
                if ordered[0].status == "active":
                    self._discard(ordered[0].held)
                return []
            except errors.Unavailable as error:
                LOG.warning("%d operations are done but not written yet: %s", len(ordered), error.message)
                if self._tools.clock.wait(self._stopping, _PAUSE):
                    # The next epoch does them again.
                    return []

    def _write_all(self, tx: Any, batch: Sequence[_Done]) -> None:
        for each in batch:
            self._write(tx, each)

    def _write(self, tx: Any, done: _Done) -> None:
        """The fenced writes of one operation and the end of its worker row."""
        tools, held = self._tools, done.held
        held.end(tx)
        if done.instance is not None:
            if done.status is None:
                written = tools.instances.remove(tx, held.resource_id, held.token)
            else:
                written = tools.instances.set_status(tx, held.resource_id, done.status, held.token, fault=done.fault)
            if not written:
                raise errors.Fenced(f"Instance {held.resource_id} was written by a later operation, or removed.")
        if done.status != "active":
            tools.release(held.resource_id, tx)

    def _report(self, written: Sequence[_Done]) -> None:
        """After the commit: tell every scheduler."""
        created = [each.instance for each in written if each.instance is not None and each.status == "active"]
        if created:
            self._tools.reporter.created(created)
        gone = [each.held.resource_id for each in written if each.status != "active"]
        if gone:
            self._tools.reporter.deleted(gone)

    def _forget(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            for held in leases:
                if self._held.get(held.resource_id) is held:
                    del self._held[held.resource_id]
        self._room.release(len(leases))

    # -- renewing -------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._tools.clock.wait(self._ended, self._tools.workers.lease_seconds / 3):
            with self._lock:
                held = list(self._held.values())
            try:
                lost = self._tools.workers.renew_many(held)
            except errors.Unavailable as error:
                LOG.warning("%d leases were not renewed: %s", len(held), error.message)
                continue
            except Exception:
                LOG.exception("%d leases were not renewed.", len(held))
                continue
            for each in lost:
                LOG.info(
                    "The %s of instance %s has been taken over, or has just ended.", each.operation, each.resource_id
                )


def _drain(source: queue.SimpleQueue[Any], limit: int) -> tuple[list[Any], bool]:
    """What waits in the queue, at least one and at most ``limit``; and whether to go on: None in the queue ends it."""
    found: list[Any] = []
    item = source.get()
    while item is not None:
        found.append(item)
        if len(found) == limit:
            return found, True
        try:
            item = source.get_nowait()
        except queue.Empty:
            return found, True
    return found, False
