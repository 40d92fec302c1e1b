# SPDX-License-Identifier: Apache-2.0
"""The compute service's part in the agent: does the operations of one host (:mod:`moorage_plugins.compute.operations`).

:class:`moorage.work.work_loop.WorkLoop` takes the operations, renews their leases and finishes them; :class:`InstanceWork` says
what they do on the hypervisor and what is written. Operations are of instances, or of the sources of moves (``DEPARTURE``),
whose host removes what a move left there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.allocation.interface import AllocationChange, AllocationLedger, ClaimRelease, Expect
from moorage.bounded_pool import BoundedPool
from moorage.context import acting_for
from moorage.control_plane.interface import AgentTools, LoopService
from moorage.db import now
from moorage.drivers.interface import (
    COMPUTE_DRIVERS,
    ComputeDriver,
    Console,
    DriverError,
    DriverTools,
    HostResources,
    LiveMigration,
    Migration,
    PowerControl,
    SelfFencing,
    UsageReport,
)
from moorage.instances.interface import (
    DEPARTURE,
    Instance,
    InstanceWrite,
    claims_after_leaving,
    departed_consumer,
    holds_of,
    move_consumer,
)
from moorage.instances.moves import ACTIVATE, TRANSFER, acting_host, kept_source, may_commit
from moorage.read_only import replaced
from moorage.rpc.server import rpc_method
from moorage.services.interface import (
    GETS_HOLDS,
    TAKES_TOLD_BUILDS,
    TAKES_TOLD_DELETION_SETS,
    TAKES_TOLD_DELETIONS,
    TAKES_TOLD_SETS,
)
from moorage.work.interface import ANY_SCHEDULER, Lease
from moorage.work.job import Job, Work
from moorage_plugins.compute.actual_state import RESTARTS, ActualStates
from moorage_plugins.compute.operations import OPERATIONS, POWER, Done, Held, event_of, reverting
from moorage_plugins.compute.questions import Questions
from moorage_plugins.compute.self_fence import SelfFence
from moorage_plugins.compute.unknown_workloads import UnknownWorkloads, belongs_here, newest_token

__all__ = ["ComputeAgent", "InstanceWork"]

LOG = logging.getLogger(__name__)
TYPE = "instance"
#: Builds of which the agent remembers what their messages said. Of more that wait it reads the rows.
_TOLD = 1000
_NOW = sa.select(now())
#: The first comparison after so many sweeps removes instances that moved away, in case the message about them was lost.
_UNKNOWN_INSTANCES = 12
#: How many seconds the end of an agent waits for the comparison that runs.
_LAST_COMPARISON = 5.0

#: What schedulers and the API must know of a driver, by the name after the service's.
_POWERS: Mapping[str, Callable[[type[ComputeDriver]], bool]] = {
    "commands": lambda driver: driver.runs_commands,
    "migrate": lambda driver: issubclass(driver, Migration),
    "live_migrate": lambda driver: issubclass(driver, LiveMigration),
    "power": lambda driver: issubclass(driver, PowerControl),
    "console": lambda driver: issubclass(driver, Console),
    "usage": lambda driver: issubclass(driver, UsageReport),
}

Batch = Sequence[tuple[Job[Done], Done]]


class ComputeAgent(LoopService):
    """Does operations on the instances of one host."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    @classmethod
    def powers(cls, conf: cfg.ConfigOpts) -> Sequence[str]:
        """What the configured driver can do, and the powers that every compute agent of this version has."""
        driver = COMPUTE_DRIVERS.load(conf.compute.driver).plugin
        # The first one is no power. Without it, an agent whose driver has none would look like one of an earlier version.
        told = [TAKES_TOLD_BUILDS, TAKES_TOLD_SETS, TAKES_TOLD_DELETIONS, TAKES_TOLD_DELETION_SETS]
        return [
            "compute.powers",
            GETS_HOLDS,
            *told,
            *(f"compute.{power}" for power, can in _POWERS.items() if can(driver)),
        ]

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        section = tools.conf.compute
        self._driver = COMPUTE_DRIVERS.load(section.driver).build(
            DriverTools(tools.conf, tools.clock, tools.identity.host, tools.machines)
        )
        #: For the comparison, and beside it for the starts that it begins: a driver may take its time for each.
        self._pool = BoundedPool("comparison of workloads", tools.clock, 1 + RESTARTS)
        self._actual = ActualStates(tools, self._driver, self._begin)
        #: Set when the last comparison has returned.
        self._compared = threads.event()
        self._compared.set()
        self._questions = Questions(self._driver, tools.clock)
        self._self_fence = SelfFence(tools, self._driver) if isinstance(self._driver, SelfFencing) else None
        #: Sweeps since the last comparison that removed instances that moved away.
        self._sweeps = 0
        self._unknown = UnknownWorkloads(tools, self._driver)
        self._lock = threads.lock()
        #: Whether a report to the schedulers waits for the finishing thread, and whether of all instances. None: none waits.
        self._report_all: bool | None = None
        self._work = InstanceWork(tools, self._driver)
        self.loop = tools.work_loop(
            "compute",
            self._work,
            operations=int(section.operations),
            batch=int(section.batch),
            # No more than a batch waits for the hypervisor.
            ahead=int(section.batch),
            queue=int(section.queue),
        )

    @override
    def host_resources(self) -> HostResources:
        return self._driver.resources()

    @override
    def start(self) -> None:
        """Destroys what has left this host, then begins the lease of a host that fences itself, and serves.

        :raises Unavailable: something that has left may run here still: it cannot be seen, or not be destroyed.
        """
        host = self._tools.identity.host
        records = self._tools.instances.by_hosts([host])
        try:
            stuck = self._unknown.remove_all({record.uuid for record in records})
        except DriverError as error:
            raise errors.Unavailable(
                f"It cannot be seen what runs on host {host}, so its agent takes no work: {error}"
            ) from error
        for uuid, failed in stuck.items():
            if self._unknown.has_left(uuid):
                raise errors.Unavailable(
                    f"Instance {uuid} has left host {host}, and what is left of it there cannot be destroyed, so the agent of the "
                    f"host takes no work: {failed}"
                ) from failed
        # What was evacuated is gone by now: a lease that is renewed would let it go on.
        if self._self_fence is not None:
            self._self_fence.start()
        self._tools.reporter.host_started(records)
        super().start()

    @override
    def sweep(self) -> None:
        """Takes operations whose message was lost, compares what runs, and now and then removes instances that moved away."""
        super().sweep()
        self._sweeps += 1
        if self._compared.is_set() and self._actual.is_due():
            unknown = None
            if self._sweeps >= _UNKNOWN_INSTANCES:
                self._sweeps, unknown = 0, self._unknown
            ended = threads.event()
            self._pool.start(functools.partial(self._actual.compare, unknown), ended)
            self._compared = ended
        self._actual.log_late()

    @override
    def stop(self) -> None:
        super().stop()
        # A comparison that goes on would ask a store and a driver that its caller may close now. One that hangs is left.
        self._tools.clock.wait(self._compared, _LAST_COMPARISON)
        self._pool.close()
        self._questions.close()

    def _begin(self, work: Callable[[], object]) -> None:
        # A closed pool takes no work: the agent ends, and the next one starts the workload.
        with contextlib.suppress(RuntimeError):
            self._pool.start(work)

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

    @rpc_method
    def build_instance(
        self,
        instance_uuid: str,
        token: int = 0,
        instance: Mapping[str, Any] | None = None,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Builds an instance, or several.

        :param token: of the operation, if it is the first one of the instance; ``instance``: as it was written with the operation.
        :param others: of more instances, each with these three arguments.
        """
        for each in others:
            self.build_instance(each["instance_uuid"], each["token"], each["instance"])
        if token and instance is not None:
            self._work.told(instance_uuid, token, instance)
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
    def delete_instance(self, instance_uuid: str, token: int = 0, others: Sequence[Mapping[str, Any]] = ()) -> None:
        """Deletes an instance, or several.

        :param token: of the operation.
        :param others: of more instances, each with these two arguments.
        """
        for each in others:
            self.delete_instance(each["instance_uuid"], each["token"])
        if token:
            self._work.told(instance_uuid, token)
        self.loop.ask(TYPE, instance_uuid)

    @rpc_method
    def console_of_instance(self, instance_uuid: str, lines: int) -> str:
        """Returns the last lines that an instance wrote."""
        return self._questions.console(instance_uuid, lines)

    @rpc_method
    def usage_of_instance(self, instance_uuid: str) -> dict[str, float]:
        """What an instance uses now."""
        return self._questions.usage(instance_uuid)

    def _tell(self) -> None:
        """Tells schedulers the instances of this host."""
        with self._lock:
            everything, self._report_all = self._report_all, None
        tools, host = self._tools, self._tools.identity.host
        if everything:
            tools.reporter.host_started(tools.instances.by_hosts([host]))
        else:
            tools.reporter.sync(tools.instances.flavors_on(host))

    def _look(self, uuid: str) -> None:
        """Compares an instance with its row; only this agent can remove what the instance left here."""
        tools = self._tools
        try:
            instance = tools.instances.get(uuid)
        except errors.NotFound:
            self._driver.destroy(uuid, newest_token(self._driver, uuid))
            tools.reporter.deleted([uuid])
            return
        if instance.host == tools.identity.host and instance.status == "error":
            # A scheduler gave up its build; it occupies nothing.
            tools.reporter.deleted([uuid])
            self._unknown.remove(uuid, newest_token(self._driver, uuid))
        elif instance.host == tools.identity.host:
            tools.reporter.created([instance])
        elif self._unknown.remove(uuid, newest_token(self._driver, uuid)):
            tools.reporter.live_migrated(instance, source=True)


class InstanceWork(Work[Done]):
    """What operations on instances do on the hypervisor, and what their ends write."""

    types = (TYPE, DEPARTURE)

    def __init__(self, tools: AgentTools, driver: ComputeDriver) -> None:
        super().__init__(tools.database, tools.workers, tools.identity)
        self._tools = tools
        self._driver = driver
        #: What messages said of operations that wait: their tokens, and the instances that were written with them, if they said so.
        self._told: dict[str, tuple[int, Instance | None]] = {}
        self._lock = threads.lock()

    def told(self, uuid: str, token: int, instance: Mapping[str, Any] | None = None) -> None:
        """Remembers what a message says of an operation until it is taken. Any thread may call it; it never waits.

        :param instance: as it was written with the operation; None: it is read when the operation is taken.
        """
        try:
            found = None if instance is None else Instance(**instance)
        except TypeError as error:
            # A later version may say more. The row is read.
            LOG.debug("What a message says of instance %s is not understood: %s", uuid, error)
            return
        if found is not None and found.uuid != uuid:
            LOG.warning("A message about instance %s brings instance %s; the row is read.", uuid, found.uuid)
            return
        with self._lock:
            self._told[uuid] = token, found
            while len(self._told) > _TOLD:
                # Its instance is read, if it still waits at all.
                del self._told[next(iter(self._told))]

    @override
    def told_of(self, resource_type: str, resource_ids: Sequence[str]) -> Mapping[str, tuple[int, Instance | None]]:
        if resource_type != TYPE:
            return {}
        with self._lock:
            return {uuid: self._told.pop(uuid) for uuid in resource_ids if uuid in self._told}

    @override
    def begin_told(
        self, transaction: Any, resource_type: str, told: Mapping[str, tuple[int, Instance | None]]
    ) -> Sequence[Job[Done]]:
        """Takes operations that still have the tokens that messages said, so that their instances are as the messages said."""
        tokens = {uuid: token for uuid, (token, _) in told.items()}
        begun = self.store.begin_many(transaction, resource_type, tokens, self.identity)
        instances = {uuid: told[uuid][1] for uuid in begun}
        if unknown := sorted(uuid for uuid, each in instances.items() if each is None):
            instances |= {each.uuid: each for each in self._tools.instances.find(unknown, transaction)}
        return [Job([held], instances[uuid]) for uuid, held in begun.items()]

    @override
    def take(self, resource_type: str, resource_ids: Sequence[str]) -> Sequence[Job[Done]]:
        """Takes operations together with their instances, as they are in that transaction; None for one that is gone."""
        if resource_type != TYPE:
            return [Job([held]) for held in self.store.take_many(resource_type, resource_ids, self.identity).values()]
        instances: dict[str, Instance] = {}

        def read(transaction: Any, leases: Mapping[str, Lease]) -> None:
            # Only a later owner of an operation can write its instance from here on, and the finish is fenced against that.
            # A transaction that lost a race runs again.
            instances.clear()
            instances.update({each.uuid: each for each in self._tools.instances.find(sorted(leases), transaction)})

        taken = self.store.take_many(resource_type, resource_ids, self.identity, read)
        return [Job([held], instances.get(uuid)) for uuid, held in taken.items()]

    @override
    def do(self, job: Job[Done]) -> Done:
        held, instance = job.lease, job.item
        if held.resource_type == DEPARTURE:
            return self._let_go(held.resource_id, held)
        if instance is None:
            self._driver.destroy(held.resource_id, held.token)
            return Done(held, None, None, (held.resource_id, move_consumer(held.resource_id)), tell="deleted")
        operation = OPERATIONS.get(held.operation)
        if operation is None:
            raise errors.InvalidInput(f"This agent does not know how to {held.operation} an instance; upgrade it.")
        host = acting_host(held.operation, instance.host, instance.pending)
        if host != self._tools.identity.host:
            # It was taken by the message of an earlier operation, which an operation of another host has replaced since.
            raise errors.Conflict(f"The {held.operation} of instance {held.resource_id} is {host}'s to do.")
        done = operation(
            Held(
                held, instance, self._driver, self._holds(held, instance),
                functools.partial(holds_of, self._tools.store, instance.uuid),
                float(self._tools.conf.compute.resize_confirm_after),
            )
        )  # fmt: skip
        if done.made and done.changes is not None and (fault := done.changes.get("fault")):
            try:
                self._driver.destroy(held.resource_id, held.token)
            except DriverError as error:
                # Its end would release the claim of what may still run.
                raise errors.Unavailable(
                    f"The {held.operation} of instance {held.resource_id} failed ({fault}), and what it left cannot be destroyed: "
                    f"{error}"
                ) from error
        return done

    def _let_go(self, uuid: str, held: Lease) -> Done:
        """Removes what a move left on this host. The end of the operation releases the resources on this host."""
        try:
            # The token first: this agent may stand still for so long that the instance comes back with a later one.
            token = newest_token(self._driver, uuid)
            if not belongs_here(self._tools, uuid):
                self._driver.destroy(uuid, token)
        except DriverError as error:
            raise errors.Unavailable(
                f"Instance {uuid}, which has moved away, cannot be destroyed here: {error}"
            ) from error
        return Done(held, None, None, (departed_consumer(uuid),), tell="left")

    def _holds(self, held: Lease, instance: Instance) -> Mapping[str, Mapping[str, int]]:
        """Returns provider -> class -> units that the instance holds; empty: all of the node's own provider, or not needed."""
        found: Mapping[str, Mapping[str, int]] | None = instance.pending.get("holds")
        if found is None and held.operation == "rebuild":
            found = holds_of(self._tools.store, instance.uuid)
        return found or {}

    def _discard(self, held: Lease) -> None:
        """Removes from the hypervisor what this try left; what cannot be removed goes with the next start."""
        try:
            self._driver.destroy(held.resource_id, held.token)
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
        return _changes_claims(result)

    @override
    def commit(self, batch: Batch, write: Callable[[Any], None]) -> None:
        first = batch[0][1] if len(batch) == 1 else None
        owner = None if first is None else first.instance
        if first is None or owner is None or not _changes_claims(first):
            self.database.run(write)
            return
        ledger = self._tools.store
        if not isinstance(ledger, AllocationLedger):
            raise errors.ConfigError(
                "The allocation store can neither move nor resize instances. Write [allocation] store = sql."
            )
        uuid = first.held.resource_id
        residents = dict.fromkeys(first.leaves(uuid if first.holds is not None else move_consumer(uuid)))
        if first.holds is None:
            # A move was reverted: what it held on its destination stays held until that host's agent has let go.
            changes = [
                AllocationChange(
                    departed_consumer(uuid), owner.pending["holds"], Expect.NOTHING, owner.project_id, owner.user_id,
                    consumer_type="MIGRATION_SOURCE", residents=residents, counts_with=uuid,
                )
            ]  # fmt: skip
        elif first.left:
            # The revert of a resize: both places change hands.
            departed = Expect.ANYTHING if kept_source(owner.pending) else Expect.NOTHING
            changes = claims_after_leaving(ledger, owner, first.holds, residents, departed=departed)
        else:
            changes = [
                AllocationChange(
                    uuid, first.holds, project=owner.project_id, user=owner.user_id, consumer_type="INSTANCE",
                    residents=residents,
                )
            ]  # fmt: skip
        ledger.replace([*changes, *(AllocationChange(each, {}) for each in first.releases)], write)

    @override
    def finish(self, transaction: Any, job: Job[Done], result: Done) -> None:
        self._write_result(transaction, job, result)
        for each in _releases(job, result):
            self._tools.release(each.consumer, transaction, residents=each.residents)

    @override
    def finish_many(self, transaction: Any, batch: Batch) -> None:
        """Writes what only changes or removes instances, and gives claims back, in statements for sets."""
        writes = []
        for job, result in batch:
            if not _is_simple(result):
                with acting_for(job.context):
                    self._write_result(transaction, job, result)
            elif result.instance is not None:
                writes.append(InstanceWrite(job.lease.resource_id, job.lease.token, result.changes, job.context))
        if not self._tools.instances.write_many(transaction, writes):
            raise errors.Fenced("One of several instances was written by a later operation, or removed.")
        self._tools.store.release_many([each for one in batch for each in _releases(*one)], transaction)

    def _write_result(self, transaction: Any, job: Job[Done], result: Done) -> None:
        """Writes the instance and the operations that follow."""
        instances, held = self._tools.instances, result.held
        if result.instance is not None:
            if result.changes is None:
                written = instances.remove(transaction, held.resource_id, held.token)
            else:
                changes = _stamped(transaction, result.changes)
                written = instances.change(transaction, held.resource_id, held.token, changes)
            if not written:
                raise errors.Fenced(f"Instance {held.resource_id} was written by a later operation, or removed.")
        create = self.store.create
        if result.goes_on is not None:
            operation, host = result.goes_on
            only_if = may_commit(host) if operation == ACTIVATE else None
            create(
                transaction, TYPE, held.resource_id, operation, held.status, target_host=host, only_if=only_if,
                project_id=held.project_id,
            )  # fmt: skip
        if leaves := result.drops or (result.left if not result.keeps else ""):
            create(
                transaction, DEPARTURE, held.resource_id, "let_go", "leaving", target_host=leaves,
                project_id=held.project_id,
            )  # fmt: skip

    @override
    def failed(self, job: Job[Done], error: Exception) -> Done | None:
        """The move of an instance ends when its commit is refused, for example because its destination was declared dead."""
        held, instance = job.lease, job.item
        if held.operation != TRANSFER or instance is None or not isinstance(error, errors.Conflict):
            return None
        mine = instance.host == self._tools.identity.host
        return reverting(held, instance, f"The move cannot be committed: {error.message}") if mine else None

    @override
    def is_written(self, job: Job[Done], result: Done) -> bool:
        """Only the commit of this operation writes its token into the instance's row, or removes the row that has the token."""
        try:
            fence = self._tools.instances.get(job.lease.resource_id).fence
        except errors.NotFound:
            return result.changes is None
        return result.changes is not None and fence == job.lease.token

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
            # Observers have no event for power operations. The journal records these; observers get those that failed.
            silent = done.goes_on or (done.held.operation in POWER and done.changes and not done.changes["fault"])
            if done.held.resource_type == TYPE and not silent:
                with acting_for(job.context):
                    self._tools.tell(event_of(done, self._tools.identity.host))
        self._report([done for _, done in written])

    def _report(self, written: Sequence[Done]) -> None:
        reporter = self._tools.reporter
        told: dict[str, list[Done]] = {}
        for each in written:
            told.setdefault(each.tell, []).append(each)
            for host, method in _messages(each):
                self._tools.cast(host, method, each.held.resource_id)
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


def _messages(result: Done) -> Iterator[tuple[str, str]]:
    """Which agents are asked to do something, and what."""
    _, next_host = result.goes_on or ("", "")
    for host, method in (
        (next_host, "operate_instance"),
        (result.drops or ("" if result.keeps else result.left), "let_go_instance"),
        (result.looks, "look_at_instance"),
    ):
        if host not in ("", ANY_SCHEDULER):
            yield host, method


def _changes_claims(result: Done) -> bool:
    """Returns whether claims change hands, and do not only go."""
    return result.holds is not None or bool(result.left)


def _is_simple(result: Done) -> bool:
    """Returns whether the end of an operation writes nothing but the row of its instance, and gives claims back."""
    kept = kept_source((result.changes or {}).get("pending") or {})
    return not (_changes_claims(result) or result.goes_on or result.drops or kept)


def _releases(job: Job[Done], result: Done) -> Sequence[ClaimRelease]:
    """Returns the claims that go, where none change hands."""
    if _changes_claims(result):
        return ()
    return [ClaimRelease(each, result.leaves(each), job.context) for each in result.releases]


def _stamped(transaction: Any, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields to write. A resize that is not confirmed says since when, by the clock of the database."""
    kept = kept_source(changes.get("pending") or {})
    if not kept:
        return changes
    since = transaction.execute(_NOW).scalar()
    return {**changes, "pending": {**changes["pending"], "kept": {**kept, "since": since}}}


def _now(done: Done) -> Instance:
    """Returns the instance as it was written."""
    if done.instance is None or done.changes is None:
        raise TypeError("an instance that is gone is told by its uuid")
    return replaced(done.instance, **done.changes)
