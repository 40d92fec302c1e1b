# SPDX-License-Identifier: Apache-2.0
"""Actual state: compares what the driver sees with what the store says, and starts again what ended.

Rows are read first, then the driver is asked: an instance that the store calls active was running when it was read, so what the
driver does not see has ended since, or is in an operation by now. An operation writes its row before it touches the workload, and
each write here is on the condition that the row is as it was read. So only instances in no operation are judged.

A workload that ended is started again where the flavor's extra spec ``compute:restart`` says so (``on-failure``: when it failed;
``always``), after a delay that doubles, ``[compute] restart_limit`` times. Otherwise the instance becomes ``stopped``, with the
reason where it failed. It keeps its resources. An instance that nobody has seen running yet (``unknown``) is not judged when it is
absent: it may be on another host. An instance whose resize is not confirmed stays ``resized``, whatever is seen of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.control_plane.interface import AgentTools
from moorage.drivers.interface import ComputeDriver, DriverError, NodeReport, Observed, PowerControl, WorkloadState
from moorage.instances.moves import RESIZED
from moorage_plugins.compute.instances import Compared, ComputeInstances, compared
from moorage_plugins.compute.resize_confirmation import DueResizes
from moorage_plugins.compute.unknown_workloads import UnknownWorkloads

__all__ = ["GONE", "LATE", "RESTARTS", "ActualStates", "restart_policy"]

LOG = logging.getLogger(__name__)
_POLICY = "compute:restart"
_POLICIES = ("never", "on-failure", "always")
_RUNNING = WorkloadState.RUNNING.value
#: The driver knows nothing of it.
GONE = "gone"
#: What ended with an error.
_FAILED = (WorkloadState.FAILED.value, GONE)
#: The longest delay before a restart, in seconds.
_LONGEST_DELAY = 300.0
#: Characters of a fault.
_LONGEST_FAULT = 1000
#: Restarts of one host that run at the same time.
RESTARTS = 4
#: Seconds after which the log says that a comparison or a start has not ended.
LATE = 120.0
#: The pause after a comparison: so many times its duration, and at most so many seconds. Without a pause, an agent with very many
#: instances would do little else. A comparison keeps a processor busy that requests on the same machine need, too.
_REST, _LONGEST_REST = 99, 60.0


def restart_policy(extra_specs: Mapping[str, str]) -> str:
    """What a flavor says of restarts: never, on-failure or always.

    :raises DriverError: it says something else.
    """
    policy = extra_specs.get(_POLICY, "never")
    if policy not in _POLICIES:
        raise DriverError(f"{_POLICY} of the flavor is {policy!r}; it must be one of {', '.join(_POLICIES)}")
    return policy


def _runs_as_it_should(row: Any, seen: Observed | None) -> bool:
    """Returns whether the instance runs as its row says, so that the comparison has nothing to write or start."""
    return (
        seen is not None
        and seen.state is WorkloadState.RUNNING
        and row.actual_state == _RUNNING
        and row.status not in (RESIZED, "stopped")
    )


@dataclass(eq=False, slots=True)
class _Call:
    """A call of the driver that is under way."""

    what: str
    #: What cannot be done until it ends.
    harm: str
    began: float
    logged: bool = False


class ActualStates:
    """Compares the instances of one host; called by one thread at a time.

    :param run: runs a start of a workload beside the comparison: it may take as long as the driver wants.
    """

    def __init__(self, tools: AgentTools, driver: ComputeDriver, run: Callable[[Callable[[], object]], object]) -> None:
        self._tools = tools
        self._driver = driver
        self._host = tools.identity.host
        self._section = tools.conf.compute
        self._run = run
        self._lock = threads.lock()
        #: The workloads that are being started, by instance and token: an instance may be replaced while the start hangs.
        self._starting: set[tuple[str, int]] = set()
        self._calls: set[_Call] = set()
        self._rests_until = -math.inf
        self._resizes = DueResizes(tools)

    def is_due(self) -> bool:
        """Returns whether the next comparison may begin. After a long comparison it may not for up to 60 seconds."""
        return self._tools.clock.monotonic() >= self._rests_until

    def compare(self, unknown: UnknownWorkloads | None = None) -> None:
        """Compares all instances of the host; one read, one call of the driver, and a write for each instance that changed.

        Then confirms the resizes whose time is over. Writes, too, what a driver of whole machines saw of the nodes.

        :param unknown: removes the workloads that have no instance on this host; None leaves them.
        """
        began = self._tools.clock.monotonic()
        try:
            self._compare(unknown)
        finally:
            ended = self._tools.clock.monotonic()
            self._rests_until = ended + min(_REST * (ended - began), _LONGEST_REST)

    def _compare(self, unknown: UnknownWorkloads | None) -> None:
        # Another store has nowhere to keep what is seen of instances.
        instances = self._tools.instances if isinstance(self._tools.instances, ComputeInstances) else None
        # Read first: a start that ends during the comparison still counts as under way.
        with self._lock:
            starting = frozenset(self._starting)
        rows = instances.to_compare(self._host) if instances is not None else ()
        driver = self._driver if isinstance(self._driver, NodeReport) else None
        if not rows and driver is None and unknown is None:
            return
        known: Set[str] = frozenset()
        if unknown is not None:
            known = {row.uuid for row in rows} if instances is not None else self._placed()
        write_nodes = self._tools.observe_nodes() if driver is not None else None
        try:
            with self._watched(
                f"The comparison of what runs on host {self._host}", "nothing that ended there is seen or started again"
            ):
                found = self._driver.inspect()
        except DriverError as error:
            LOG.warning("It cannot be seen what runs on host %s: %s", self._host, error)
            return
        if instances is not None:
            closer = [compared(row) for row in rows if not _runs_as_it_should(row, found.get(row.uuid))]
            self._judge_all(instances, closer, found, starting)
            self._resizes.confirm(closer, found)
        if driver is not None and write_nodes is not None:
            write_nodes(driver.nodes())
        if unknown is not None:
            # An instance in an operation is not among the known ones, and is looked up.
            unknown.remove_found(found, known)

    def _placed(self) -> Set[str]:
        """Returns the uuids of this host's instances, from a store that keeps no actual states."""
        return {record.uuid for record in self._tools.instances.by_hosts([self._host])}

    def _judge_all(
        self,
        instances: ComputeInstances,
        rows: Sequence[Compared],
        found: Mapping[str, Observed],
        starting: Set[tuple[str, int]],
    ) -> None:
        for row in rows:
            seen = found.get(row.uuid)
            if seen is not None:
                begun = (row.uuid, seen.token) in starting
            else:
                # A driver may take away what it starts, for a moment.
                begun = row.actual_state == "unknown" or any(uuid == row.uuid for uuid, _ in starting)
            if not begun:
                self._judge(instances, row, seen)

    def log_late(self) -> None:
        """Logs, once each, comparisons and starts that the driver has not ended in time. Called at each sweep of the agent."""
        with self._lock:
            calls = [each for each in self._calls if not each.logged]
        now = self._tools.clock.monotonic()
        for call in calls:
            if now - call.began > LATE:
                call.logged = True
                LOG.warning(
                    "%s has taken more than %.0f seconds. Until it ends, %s. See what the compute driver waits for.",
                    call.what, LATE, call.harm,
                )  # fmt: skip

    @contextlib.contextmanager
    def _watched(self, what: str, harm: str) -> Iterator[None]:
        call = _Call(what, harm, self._tools.clock.monotonic())
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def _judge(self, instances: ComputeInstances, row: Compared, seen: Observed | None) -> None:
        """Writes what was seen, or begins to start the instance again."""
        state, detail = (
            (GONE, "The driver of its host knows nothing of it.") if seen is None else (seen.state.value, seen.detail)
        )
        if state == _RUNNING:
            if row.actual_state != _RUNNING or row.status == "stopped":
                self._write(instances, row, state, detail, status="active", fault="", restarts=row.restarts)
            return
        if row.status == "stopped" and row.actual_state == state:
            return
        count = row.restarts
        if row.actual_state == _RUNNING and row.seconds >= self._section.restart_window:
            count = 0
        if not self._restarts(row, seen, state, count):
            if row.status == RESIZED and row.actual_state == state:
                return
            again = f" It was started again {count} times before." if count else ""
            fault = f"{detail}{again}" if state in _FAILED else ""
            if seen is None and (before := self._fault(row.uuid)):
                # Why a rebuild or resize failed says more than that nothing is there since.
                fault = f"{fault} Its last operation failed: {before}"[:_LONGEST_FAULT]
            self._write(instances, row, state, detail, status="stopped", fault=fault, restarts=count)
        elif row.actual_state != state:
            # Told at once; started after its delay.
            self._write(instances, row, state, detail, status="active", fault="", restarts=count)
        elif seen is not None and row.seconds >= min(self._section.restart_delay * 2**count, _LONGEST_DELAY):
            self._restart(instances, row, seen)

    def _fault(self, uuid: str) -> str:
        try:
            return str(self._tools.instances.get(uuid).fault)
        except errors.NotFound:
            return ""

    def _restarts(self, row: Compared, seen: Observed | None, state: str, count: int) -> bool:
        """Returns whether an instance that runs no more is to be started again."""
        if seen is None or row.status not in ("active", RESIZED) or count >= self._section.restart_limit:
            return False
        if state == WorkloadState.STOPPED.value or not isinstance(self._driver, PowerControl):
            return False
        try:
            instance = self._tools.instances.get(row.uuid)
            policy = restart_policy(instance.request.get("extra_specs") or {})
        except (errors.NotFound, DriverError):
            return False
        return policy == "always" or (policy == "on-failure" and state in _FAILED)

    def _restart(self, instances: ComputeInstances, row: Compared, seen: Observed) -> None:
        """Counts the restart, then does it: an agent that is killed in between has lost one of them."""
        count = row.restarts + 1
        with self._lock:
            if len(self._starting) >= RESTARTS:
                return
        if not self._write(instances, row, seen.state.value, seen.detail, status="active", fault="", restarts=count):
            return
        LOG.info("Instance %s is started again, for the time number %d: %s", row.uuid, count, seen.detail)
        with self._lock:
            self._starting.add((row.uuid, seen.token))
        self._run(functools.partial(self._start, row.uuid, seen.token, row.fence))

    def _start(self, uuid: str, token: int, order: int) -> None:
        driver: Any = self._driver
        try:
            with self._watched(
                f"The start of instance {uuid} on host {self._host}",
                f"one instance fewer than {RESTARTS} is started again there at the same time",
            ):
                # The fence: an operation that has begun since has a higher order.
                driver.start(uuid, token, order)
        except DriverError as error:
            LOG.warning("Instance %s cannot be started again: %s", uuid, error)
        finally:
            with self._lock:
                self._starting.discard((uuid, token))

    def _write(
        self,
        instances: ComputeInstances,
        row: Compared,
        state: str,
        detail: str,
        *,
        status: str,
        fault: str,
        restarts: int,
    ) -> bool:
        status = RESIZED if row.status == RESIZED else status
        written = self._tools.database.run(
            lambda tx: instances.observe(
                tx, self._host, row, state, detail, status=status, fault=fault, restarts=restarts
            )
        )
        if written and state != _RUNNING and row.actual_state == _RUNNING:
            LOG.warning("Instance %s runs no more: %s", row.uuid, detail or state)
        return bool(written)
