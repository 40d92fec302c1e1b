# SPDX-License-Identifier: Apache-2.0
"""Decides which periodic tasks an engine runs, and wires their rings and runners.

Which engine handles which object of a task is decided by :mod:`moorage.coordination.task_run`. What a role does every few seconds
for itself is a :class:`~moorage.control_plane.periodic_loop.PeriodicLoop` of that role.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging
from typing_extensions import override

from moorage import context, errors
from moorage.clock import Clock, SystemClock
from moorage.control_plane.factories import unconnected_database
from moorage.control_plane.periodic_loop import Look
from moorage.control_plane.process import Platform
from moorage.coordination import options
from moorage.coordination.interface import (
    BACKENDS,
    PERIODIC_TASKS,
    BackendCapability,
    CoordinationBackend,
    PeriodicTask,
    ServiceLives,
    TaskTools,
)
from moorage.coordination.loading import Factory, chosen, factory_from_config
from moorage.coordination.membership import MemberId, Membership, Timing
from moorage.coordination.ring_ledger import SqlRingLedger
from moorage.coordination.ring_manager import RingManager, RingSettings
from moorage.coordination.runner import Runner, Settings, TaskRunner
from moorage.coordination.task_run import Ownership, OwnsAll, RingOwnership
from moorage.coordination.task_store import TaskStore
from moorage.coordination.tick_leases import SqlTickLeases, TickLease, TickLeaseStore
from moorage.db import Database
from moorage.observers.interface import RingChanged
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.work.operations import SqlOperationStore

__all__ = [
    "ALWAYS",
    "RegisteredEngines",
    "NullServiceLives",
    "PeriodicWork",
    "check",
    "check_backend",
    "check_tasks",
    "enabled_tasks",
    "open_backend",
]

LOG = logging.getLogger(__name__)
#: What a backend must offer, since every engine is a process.
_NEEDED = BackendCapability.ACROSS_PROCESSES

#: Tasks that every engine has, enabled or not: without them rows would never be removed. They can be paused.
ALWAYS = ("expire_claims", "purge_idempotency_keys")


def enabled_tasks(conf: cfg.ConfigOpts) -> list[str]:
    """Returns the tasks that engines of this configuration run."""
    enabled = list(conf.periodic.enabled_tasks)
    always = (*ALWAYS, "read_quotas") if conf.quota.source else ALWAYS
    return enabled + [name for name in always if name not in enabled]


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse a configuration that no engine could start with.

    :raises ConfigError: options contradict each other, or a plugin cannot be used.
    """
    options.check(conf)
    check_tasks(conf)
    if conf.coordination.periodic_coordination_backend:
        BACKENDS.load(chosen(conf.coordination.periodic_coordination_backend)[0])


def check_tasks(conf: cfg.ConfigOpts) -> None:
    """Refuse tasks that cannot be used, and options for tasks that there are not.

    :raises ConfigError: says which, and what may have been meant.
    """
    PERIODIC_TASKS.load_all(enabled_tasks(conf))
    known = PERIODIC_TASKS.installed()
    for option in ("spacing", "timeout", "concurrency"):
        for name in getattr(conf.periodic, option):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant = f" {near[0]} was meant?" if near else ""
                raise errors.ConfigError(
                    f"[periodic] {option} names {name}, which is no installed periodic task.{meant}"
                )


def open_backend(
    conf: cfg.ConfigOpts, clock: Clock, database: Database, services: ServiceLives
) -> tuple[Factory, CoordinationBackend]:
    """Returns a function that makes clients of the backend, and a first one; neither connects.

    :raises ConfigError: the backend cannot be used as it is configured, or does not see the members of other processes.
    """
    factory = factory_from_config(conf, clock, database=database, services=services)
    probe = factory(lambda: None)
    if _NEEDED not in probe.capabilities:
        name, _ = chosen(conf.coordination.periodic_coordination_backend, conf.coordination.backend_url)
        raise errors.ConfigError(
            f"[coordination] periodic_coordination_backend chooses '{name}': members of other processes would not be seen, and "
            "every engine would take all the work for its own. Choose another backend."
        )
    return factory, probe


def check_backend(conf: cfg.ConfigOpts) -> None:
    """Refuse a backend of coordination that no engine could use; connects to nothing.

    :raises ConfigError: options contradict each other, or the backend cannot be used.
    """
    options.check(conf)
    section = conf.coordination
    if not section.periodic_coordination_backend:
        return
    BACKENDS.load(chosen(section.periodic_coordination_backend, section.backend_url)[0])
    with unconnected_database(conf) as database:
        if database is not None:
            open_backend(conf, SystemClock(), database, NullServiceLives(database))


class NullServiceLives:
    """The lives of services, for a backend that only shall connect."""

    uuid, epoch = "", 0

    def __init__(self, database: Database) -> None:
        self._registry = ServiceRegistry(database, SystemClock())

    def valid_until(self) -> float:
        """Returns minus infinity: a process that only looks is never a member."""
        return float("-inf")

    def living(self, transaction: Any = None) -> frozenset[tuple[str, int]]:
        """All that have not ended."""
        return frozenset((each.uuid, each.epoch) for each in self._registry.list() if not each.stopped)


class _Lives:
    """The heartbeats of engines, as the database backend wants them."""

    def __init__(self, platform: Platform, down_time: float) -> None:
        self._platform = platform
        self._observer = LivenessObserver(platform.clock, down_time)
        self.uuid = platform.identity.uuid
        self.epoch = platform.identity.epoch

    def valid_until(self) -> float:
        return self._platform.valid_until()

    def living(self, transaction: Any = None) -> frozenset[tuple[str, int]]:
        rows = self._platform.registry.list(binary=self._platform.identity.binary, transaction=transaction)
        up = self._observer.observe(rows)
        return frozenset((row.uuid, row.epoch) for row in rows if up[row.uuid])


class RegisteredEngines:
    """Hosts and heartbeats of services, for the view of rings."""

    def __init__(self, registry: ServiceRegistry, observer: LivenessObserver) -> None:
        self._registry = registry
        self._observer = observer

    def of(self, services: Sequence[str]) -> Mapping[str, tuple[str, float]]:
        """Maps uuids of known services to (host, seconds since the heartbeat changed)."""
        wanted = frozenset(services)
        rows = [row for row in self._registry.list() if row.uuid in wanted]
        self._observer.observe(rows)
        return {row.uuid: (row.host, self._observer.silent_for(row.uuid)) for row in rows}


class _NoClaims(SqlTickLeases):
    """Without coordination every engine handles everything, so nothing is claimed."""

    @override
    def claim(self, claim: TickLease, object_ids: Sequence[str]) -> list[str]:
        return list(object_ids)

    @override
    def end(self, transaction: object, claim: TickLease, object_id: str) -> None:
        """There is nothing to end."""


class _Worker:
    """One member, with all that hangs on it."""

    def __init__(self, membership: Membership, keeper: RingManager, runner: Runner) -> None:
        self.membership = membership
        self.keeper = keeper
        self.runner = runner


def _look(
    membership: Membership, keeper: RingManager, began: Callable[[], float], transaction: Any
) -> Callable[[], None]:
    """Reads the ring in a transaction of the caller. Call the returned function afterwards: it renews the membership too."""
    try:
        act = keeper.look(began())
    except (errors.StoreUnavailable, errors.StoreBusy):
        raise
    except errors.Unavailable as error:
        # Perhaps the backend has to write, which it cannot do in this transaction.
        LOG.debug("The ring is looked at again after this transaction: %s", error.message)
        act = keeper.step_logged

    def follow() -> None:
        membership.step()
        if act is not None:
            act()

    return follow


class PeriodicWork:
    """Runs the tasks that the configuration enables; :meth:`start` is called once.

    :raises ConfigError: from ``start``: the configuration or a plugin cannot be used.
    :raises Unavailable: from ``start``: the backend does not answer, and ``startup_policy`` is ``fail``.
    """

    def __init__(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        self._platform = platform
        self._conf = conf
        self._store = TaskStore(platform.database, history=conf.periodic.history)
        self._workers: list[_Worker] = []
        self._alone: Runner | None = None
        #: Whether the members are in the database, so that a look reads the ring instead of a thread of its own.
        self._in_database = False

    def start(self) -> None:
        """Join, then begin to sweep."""
        check(self._conf)
        tasks = self._load_tasks()
        if not self._conf.coordination.periodic_coordination_backend:
            LOG.info("No coordination backend is chosen: this engine runs every periodic task for everything.")
            self._alone = self._runner(tasks, self._everything, _NoClaims(self._platform.database), "alone")
        else:
            self._join(tasks)

    def looks(self, began: Callable[[], float]) -> Iterator[tuple[str, float, Look]]:
        """Yields the looks of this engine: each one's name, the seconds between two calls, and the look itself.

        A look reads a ring whose members are in the database, or finds the periodic tasks that are due.

        :param began: returns a moment of the clock from before the transaction of the look that runs.
        """
        for number, worker in enumerate(self._workers if self._in_database else ()):
            yield (
                f"look at ring {number}",
                self._conf.coordination.poll_interval,
                functools.partial(_look, worker.membership, worker.keeper, began),
            )
        for number, runner in enumerate(self._runners()):
            yield f"look for periodic tasks {number}", self._conf.periodic.poll, runner.look

    def _runners(self) -> list[Runner]:
        return [worker.runner for worker in self._workers] + ([self._alone] if self._alone else [])

    def stop(self, drain_seconds: float) -> None:
        """Finishes the running handlers, then leaves the group, so that no member takes over an object in work."""
        runners = self._runners()
        deadline = self._platform.clock.monotonic() + drain_seconds
        for runner in runners:
            runner.end()
        for runner in runners:
            runner.stop(max(0.0, deadline - self._platform.clock.monotonic()))
        for worker in self._workers:
            worker.keeper.stop()
            worker.membership.stop()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _load_tasks(self) -> dict[str, PeriodicTask]:
        tools = TaskTools(
            conf=self._conf,
            clock=self._platform.clock,
            database=self._platform.database,
            sender=self._platform.sender,
            context=context.internal("engine"),
            services=self._platform,
            workers=SqlOperationStore(
                self._platform.database, lease_seconds=self._conf.cleanup.lease_seconds, clock=self._platform.clock
            ),
        )
        loaded = PERIODIC_TASKS.load_all(enabled_tasks(self._conf))
        return {each.name: each.build(tools) for each in loaded}

    def _join(self, tasks: dict[str, PeriodicTask]) -> None:
        conf, platform, section = self._conf, self._platform, self._conf.coordination
        lives = _Lives(platform, conf.services.service_down_time)
        factory, probe = open_backend(conf, platform.clock, platform.database, lives)
        self._in_database = BackendCapability.READS_DATABASE in probe.capabilities
        interval = section.heartbeat_timeout
        if self._in_database:
            # Each read of the ring renews the membership. The membership's own thread matters only while reads fail.
            interval = max(interval, conf.services.report_interval)
        for caution in probe.cautions:
            LOG.warning("[coordination] periodic_coordination_backend: %s.", caution)
        for number in range(conf.periodic.workers):
            base = MemberId(platform.identity.uuid, platform.identity.epoch, number, weight=section.weight)
            timing = Timing(interval, section.lease_margin, section.reset_after or section.session_timeout)
            membership = Membership(factory, section.group, base, platform.clock, timing)
            self._workers.append(self._worker(membership, tasks, number))
        for worker in self._workers:
            self._begin(worker.membership)
        for worker in self._workers:
            worker.membership.start()
            if not self._in_database:
                worker.keeper.start()

    def _begin(self, membership: Membership) -> None:
        try:
            membership.begin()
        except errors.Unavailable as error:
            if self._conf.coordination.startup_policy == "fail":
                for worker in self._workers:
                    worker.membership.stop()
                raise errors.Unavailable(
                    f"The coordination backend cannot be reached, so this engine does not start: {error.message} (With "
                    "[coordination] startup_policy = wait it would start, and wait.)"
                ) from error
            LOG.error("The coordination backend cannot be reached; no periodic task runs until then: %s", error.message)

    def _worker(self, membership: Membership, tasks: dict[str, PeriodicTask], number: int) -> _Worker:
        platform, section = self._platform, self._conf.coordination
        settings = RingSettings(
            section.hash_ring_replicas_count,
            section.hash_function,
            section.settle,
            section.handover == "drain",
            section.poll_interval,
        )
        keeper = RingManager(membership, SqlRingLedger(platform.database), section.group, platform.clock, settings)

        known = 0

        def share() -> Ownership | None:
            nonlocal known
            keeper.refresh()
            snapshot = keeper.current()
            if snapshot is not None and snapshot.token != known:
                known, me = snapshot.token, snapshot.me.decode("ascii")
                platform.tell(RingChanged(snapshot.group, snapshot.token, me, len(snapshot.members)))
            return None if snapshot is None else RingOwnership(keeper, snapshot)

        member = f"{platform.identity.uuid}/{number}"
        return _Worker(membership, keeper, self._runner(tasks, share, SqlTickLeases(platform.database), member))

    def _everything(self) -> Ownership:
        # Writes of the time with coordination carry its last token, so those without must not carry a smaller one.
        row, _ = SqlRingLedger(self._platform.database).read(self._conf.coordination.group)
        return OwnsAll(self._platform.name, 0 if row is None else row.token)

    def _runner(
        self, tasks: dict[str, PeriodicTask], share: Callable[[], Ownership | None], claims: TickLeaseStore, member: str
    ) -> Runner:
        conf, clock = self._conf, self._platform.clock
        runners = [
            TaskRunner(name, task, Settings.of(name, task, conf), claims, self._store, share, clock, member=member)
            for name, task in tasks.items()
        ]
        return Runner(runners, self._store, clock, poll=conf.periodic.poll, initial_delay=conf.periodic.initial_delay)
