# SPDX-License-Identifier: Apache-2.0
"""One run of one task by one member: claims and handles each object that the member owns.

The parts are called by :mod:`moorage.coordination.runner` with threads, and by a simulator without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, plugin_isolation, randomness, threads
from moorage.clock import Clock
from moorage.coordination.interface import PeriodicTask, TaskLease
from moorage.coordination.ring_manager import InFlight, RingManager, RingSnapshot
from moorage.coordination.task_store import Run
from moorage.coordination.tick_leases import AHEAD, TickLease, TickLeaseStore
from moorage.extensions import origin_of
from moorage.ring import POSITION_COUNT, position_of

__all__ = ["PARTS", "Backoff", "AcquiredTick", "OwnsAll", "RingOwnership", "Ownership", "TaskRun", "TickContext"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_BACKOFF = 64
_REMEDY = "Repair the task, or take it out of [periodic] enabled_tasks."
#: The handlings of a spread task begin at so many moments between two ticks.
PARTS = 20


class Ownership(Protocol):
    """What a member may work on."""

    @property
    def token(self) -> int:
        """What its writes carry."""

    @property
    def member(self) -> str:
        """Who it is."""

    def select(self, task: PeriodicTask) -> Sequence[str]:
        """Returns the ids of its objects; one query."""

    def holds(self) -> bool:
        """Returns whether it may go on; costs nothing."""

    def working(self) -> InFlight:
        """Around each handling; gives False when it may not begin."""


class RingOwnership:
    """The part of a ring that is this member's, for as long as it certainly is a member and the ring stands."""

    def __init__(self, keeper: RingManager, snapshot: RingSnapshot) -> None:
        self._keeper = keeper
        self._snapshot = snapshot
        self.token = snapshot.token
        self.member = snapshot.me.decode()

    def select(self, task: PeriodicTask) -> Sequence[str]:
        """See :class:`Ownership`. What was fetched by ranges is compared exactly all the same.

        Positions of another hash function than the ring's say nothing of it: then everything is listed.
        """
        known = task.positions == self._snapshot.ring.hash_function
        found = task.objects_in(self._snapshot.ranges()) if known else None
        return self._snapshot.subset(list(task.list_objects() if found is None else found))

    def holds(self) -> bool:
        """See :class:`Ownership`."""
        return self._keeper.is_current(self._snapshot)

    def working(self) -> InFlight:
        """See :class:`Ownership`."""
        return self._keeper.working(self._snapshot)


class OwnsAll:
    """All objects, for engines without coordination: each of them handles everything, the old way."""

    def __init__(self, member: str, token: int) -> None:
        self.member = member
        self.token = token

    def select(self, task: PeriodicTask) -> Sequence[str]:
        """See :class:`Ownership`."""
        return list(task.list_objects())

    def holds(self) -> bool:
        """See :class:`Ownership`."""
        return True

    def working(self) -> InFlight:
        """See :class:`Ownership`."""
        return InFlight(True, lambda: None)


@dataclass(frozen=True, slots=True)
class TickContext:
    """Which tick an object is at; all in microseconds of the database's clock.

    A tick is named by the moment that it begins, so names rise when the spacing is changed too.

    :param moment: now. :param spacing: between two ticks.
    :param spread: whether objects have phases, by their positions on the ring.
    :param requested: the name of a tick that an operator asked for, for all objects; 0: the regular one.
    """

    moment: int
    spacing: int
    spread: bool = False
    hash_function: str = "md5"
    requested: int = 0

    def of(self, object_id: str) -> int:
        """Returns the tick that the object is at."""
        if self.requested:
            return self.requested
        phase = 0
        if self.spread:
            part = position_of(object_id, self.hash_function) * PARTS // POSITION_COUNT
            phase = self.spacing * part // PARTS
        return (self.moment - phase) // self.spacing * self.spacing + phase


class Backoff:
    """Objects whose handling failed are left out of more and more ticks. Safe for use by several threads."""

    def __init__(self, first: float) -> None:
        self._first = first
        self._lock = threads.lock()
        #: Failures in a row, and the last tick that the object is left out of.
        self._failed: dict[str, tuple[int, int]] = {}

    def due(self, object_ids: Sequence[str], ticks: TickContext) -> list[str]:
        """Those that are not left out of their tick."""
        with self._lock:
            if not self._failed:
                return list(object_ids)
            # A tick that is longer off than any pause was named by a clock that has been set back since.
            latest = ticks.moment + (_LONGEST_BACKOFF + 1) * ticks.spacing
            return [each for each in object_ids if not ticks.of(each) <= self._failed.get(each, (0, -1))[1] <= latest]

    def failed(self, object_id: str, ticks: TickContext) -> None:
        """Its handling raised."""
        with self._lock:
            count, _ = self._failed.get(object_id, (0, 0))
            pause = min(_LONGEST_BACKOFF, round(self._first * 2 ** min(count, 10)))
            self._failed[object_id] = count + 1, ticks.of(object_id) + pause * ticks.spacing

    def keep(self, object_ids: Sequence[str]) -> None:
        """Forget what is not among the objects."""
        with self._lock:
            if self._failed:
                self._failed = {each: self._failed[each] for each in object_ids if each in self._failed}

    def handled(self, object_id: str) -> None:
        """Its handling ended well."""
        with self._lock:
            self._failed.pop(object_id, None)


@dataclass(frozen=True, slots=True)
class AcquiredTick:
    """An object that this member shall handle now."""

    claim: TickLease
    object_id: str


class TickTaskLease(TaskLease):
    """The lease that a handler gets."""

    __slots__ = ("_claim", "_claims", "_clock", "_deadline", "_share", "over")

    def __init__(
        self, claims: TickLeaseStore, claim: TickLease, object_id: str, share: Ownership, clock: Clock, timeout: float
    ) -> None:
        super().__init__(claims, claim.task, object_id, claim.tick, claim.token)
        self._claims = claims
        self._claim = claim
        self._share = share
        self._clock = clock
        self._deadline = clock.monotonic() + timeout
        self.over = False

    def give_up(self) -> None:
        """Abandons the handling: from now on it writes nothing."""
        self.over = True

    @override
    def check(self) -> None:
        if not self._share.holds():
            raise errors.Fenced(
                f"{self.object_id} of {self.task}: this member's share under token {self.token} is over; nothing was written."
            )
        if self.over or self._clock.monotonic() >= self._deadline:
            raise errors.Fenced(f"{self.object_id} of {self.task}: the handling took too long; nothing was written.")

    @override
    def end(self, transaction: Any) -> None:
        self.check()
        self._claims.end(transaction, self._claim, self.object_id)

    @override
    def confirm(self) -> None:
        """What happened since is most likely seen here; what happens from here on, by the row that was just changed."""
        self.check()


class TaskRun:
    """See the module. ``begin`` first, then each of ``batches`` is claimed and what that returns handled.

    :param name: of the task. :param timeout: seconds that one handling may take.
    :param only: the one object that was asked for; empty: all.
    :param stopping: whether nothing more is to be begun.
    :param since: ticks up to this one were swept by the same member under the same ring.
    """

    def __init__(
        self,
        name: str,
        task: PeriodicTask,
        share: Ownership,
        claims: TickLeaseStore,
        ticks: TickContext,
        clock: Clock,
        *,
        backoff: Backoff,
        timeout: float,
        batch: int = 500,
        only: str = "",
        stopping: Callable[[], bool] = lambda: False,
        since: int = 0,
    ) -> None:
        self._name = name
        self._since = since
        self._stopping = stopping
        self._running: dict[str, tuple[InFlight, TickTaskLease]] = {}
        #: Given up before they had begun: their threads did not get to run.
        self._never: set[str] = set()
        self._task = task
        self.share = share
        self._claims = claims
        self._ticks = ticks
        self._clock = clock
        self._backoff = backoff
        self._timeout = timeout
        self._batch = batch
        self._only = only
        self._sweep = randomness.new_hex()
        self._began = clock.monotonic()
        self._lock = threads.lock()
        self._objects: list[str] = []
        self._counts = {"handled": 0, "acted": 0, "failed": 0, "fenced": 0, "lost": 0, "skipped": 0}
        self._owned = 0
        self._ended = "complete"
        self._problem = ""

    @property
    def complete(self) -> bool:
        """Whether everything of it was begun."""
        return self._ended == "complete"

    @property
    def stale(self) -> bool:
        """Whether it was cut short, because the ring changed or the membership is not certain any more."""
        return self._ended == "stale"

    def begin(self) -> None:
        """Find out what is mine; a task that cannot list its objects has failed, and there is nothing to do."""
        try:
            with plugin_isolation.isolate_plugin_call(origin_of(self._task)):
                mine = self.share.select(self._task)
        except Exception as error:
            LOG.exception(
                "The %s cannot list its objects; nothing of it is done at this tick. %s", origin_of(self._task), _REMEDY
            )
            self._ended, self._problem = "failed", plugin_isolation.format_exception(error)
            return
        self._owned = len(mine)
        if self._only:
            self._objects = [each for each in mine if each == self._only]
        else:
            self._backoff.keep(mine)
            at_tick = [each for each in mine if self._ticks.of(each) > self._since] if self._since else list(mine)
            self._objects = self._backoff.due(at_tick, self._ticks)
            self._counts["skipped"] = len(at_tick) - len(self._objects)

    def batches(self) -> Iterator[tuple[TickLease, Sequence[str]]]:
        """What is to be claimed: objects of one tick, not too many at once."""
        by_tick: dict[int, list[str]] = {}
        for each in self._objects:
            by_tick.setdefault(self._ticks.of(each), []).append(each)
        for tick, found in sorted(by_tick.items()):
            ahead = AHEAD + self._ticks.spacing
            claim = TickLease(self._name, tick, self.share.token, self.share.member, self._sweep, ahead)
            for start in range(0, len(found), self._batch):
                yield claim, found[start : start + self._batch]

    def claim(self, claim: TickLease, object_ids: Sequence[str]) -> list[AcquiredTick]:
        """Claims objects, and returns the claims that were won; none once the share is over.

        :raises StoreUnavailable: as the store.
        """
        if self._stopping() or not self.share.holds():
            self._cut_short()
            return []
        found = [AcquiredTick(claim, each) for each in self._claims.claim(claim, object_ids)]
        self._count("lost", len(object_ids) - len(found))
        return found

    def handle(self, claimed: AcquiredTick) -> None:
        """Handles one object, and logs what its handler raises."""
        working = self.share.working()
        with working as allowed:
            if self._stopping() or not allowed:
                self._cut_short()
                return
            lease = TickTaskLease(
                self._claims, claimed.claim, claimed.object_id, self.share, self._clock, self._timeout
            )
            with self._lock:
                if claimed.object_id in self._never:
                    return
                self._running[claimed.object_id] = working, lease
            try:
                with plugin_isolation.isolate_plugin_call(origin_of(self._task)):
                    acted = self._task.handle(claimed.object_id, lease)
            except errors.Fenced as error:
                LOG.info("%s", error.message)
                self._count("fenced")
            except Exception as error:
                LOG.exception(
                    "The %s could not handle %s, which is put off for longer and longer. %s",
                    origin_of(self._task), claimed.object_id, _REMEDY,
                )  # fmt: skip
                self.failed(claimed.object_id, plugin_isolation.format_exception(error))
            else:
                # The failure of an object that was given up meanwhile is recorded already.
                if not lease.over:
                    self._backoff.handled(claimed.object_id)
                    self._count("handled")
                    self._count("acted", bool(acted))
            finally:
                with self._lock:
                    self._running.pop(claimed.object_id, None)

    def give_up(self, claimed: AcquiredTick, problem: str) -> None:
        """Wait no longer for a handling: its lease is over, and the next ring need not wait for it either."""
        with self._lock:
            running = self._running.get(claimed.object_id)
            if running is None:
                self._never.add(claimed.object_id)
        self.failed(claimed.object_id, problem)
        if running is not None:
            working, lease = running
            lease.give_up()
            working.release()

    def abandon(self, problem: str, left: int) -> None:
        """Begin nothing more, for a reason that people should know; so many that were claimed were not begun."""
        self._count("failed", left)
        with self._lock:
            self._ended, self._problem = "failed", problem

    def failed(self, object_id: str, problem: str) -> None:
        """Count a failure, and put the object off."""
        self._backoff.failed(object_id, self._ticks)
        with self._lock:
            self._problem = self._problem or f"{object_id}: {problem}"
        self._count("failed")

    def unavailable(self, error: errors.MoorageError) -> None:
        """The store did not answer: what is left waits for the next tick."""
        with self._lock:
            self._ended, self._problem = "stale", error.message

    def run(self) -> Run:
        """What to remember of it."""
        milliseconds = round((self._clock.monotonic() - self._began) * 1000)
        with self._lock:
            return Run(
                self._name,
                self.share.member,
                self._ticks.requested or self._ticks.moment // self._ticks.spacing * self._ticks.spacing,
                self.share.token,
                self._ticks.moment,
                milliseconds,
                self._owned,
                ended=self._ended,
                problem=self._problem,
                **self._counts,
            )

    def _cut_short(self) -> None:
        with self._lock:
            self._ended = "stale"

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number
