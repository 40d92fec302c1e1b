# SPDX-License-Identifier: Apache-2.0
"""Runs the periodic tasks of one member: finds the due tasks, and runs each in a separate thread.

A task never overlaps itself: while it sweeps, its ticks are missed, and coalesce into the next one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, plugin_isolation, randomness, threads
from moorage.bounded_pool import BoundedPool
from moorage.clock import Clock
from moorage.coordination.interface import PeriodicTask
from moorage.coordination.task_run import (
    PARTS,
    AcquiredTick,
    Backoff,
    Ownership,
    TaskRun,
    TickContext,
)
from moorage.coordination.task_store import Control, TaskStore
from moorage.coordination.tick_leases import TickLeaseStore
from moorage.db import MICROSECONDS
from moorage.extensions import origin_of

__all__ = ["Runner", "Settings", "TaskRunner", "spacing_of"]

LOG = logging.getLogger(__name__)

#: A request is heeded for so many microseconds at least, and for two ticks.
_REQUEST_LASTS = 600 * MICROSECONDS
#: Claims of objects that are gone are kept so long: microseconds, and ticks.
_CLAIMS_LAST = 86400 * MICROSECONDS
_CLAIMS_LAST_TICKS = 10
_PRUNE_EVERY = 3600.0
#: Handlings of one task that may hang, beyond its concurrency, before nothing more is begun.
_HANGING = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How one task is run; durations in seconds, see the options."""

    spacing: float
    timeout: float
    concurrency: int
    spread: bool = False
    jitter: float = 0.0
    batch: int = 500
    error_backoff: float = 1.0
    hash_function: str = "md5"

    @classmethod
    def of(cls, name: str, task: PeriodicTask, conf: cfg.ConfigOpts) -> Settings:
        """What the task says of itself, and the configuration that goes before it."""
        section = conf.periodic
        return cls(
            spacing_of(name, task.spacing, conf),
            float(section.timeout.get(name, task.timeout)),
            int(float(section.concurrency.get(name, task.concurrency))),
            task.spread,
            section.jitter,
            section.claim_batch,
            section.error_backoff,
            conf.coordination.hash_function,
        )


def spacing_of(name: str, default: float, conf: cfg.ConfigOpts) -> float:
    """Seconds between two ticks of a task."""
    return float(conf.periodic.spacing.get(name, default))


class TaskRunner:
    """One task of one member.

    :param share: gives what the member may work on now, or None; may raise Unavailable.
    :param member: a name of the member that stays, for its jitter.
    """

    def __init__(
        self,
        name: str,
        task: PeriodicTask,
        settings: Settings,
        claims: TickLeaseStore,
        store: TaskStore,
        share: Callable[[], Ownership | None],
        clock: Clock,
        *,
        member: str = "",
    ) -> None:
        self.name = name
        self._task = task
        self._settings = settings
        self._claims = claims
        self._store = store
        self._share = share
        self._clock = clock
        self._spacing = max(1, round(settings.spacing * MICROSECONDS))
        self._jitter = round(settings.jitter * self._spacing * _fraction(f"{member}/{name}"))
        self._backoff = Backoff(settings.error_backoff)
        self._last_slot: int | None = None
        self._last_token: int | None = None
        self._last_moment = 0
        #: The request that was heeded, and the ring that it was heeded under.
        self._heeded = 0
        self._heeded_token: int | None = None
        self._stopping = threads.event()
        self._pool = BoundedPool(f"task-{name}", clock, settings.concurrency, spare=_HANGING)
        self._pruned_at = float("-inf")

    def due(self, moment: int, control: Control | None) -> TickContext | None:
        """What to sweep for at this moment (microseconds of the database's clock), or None.

        Says the same again until :meth:`swept` was called for it.
        """
        settings = self._settings
        if control is not None and self._asked(moment, control):
            return TickContext(
                moment, self._spacing, settings.spread, settings.hash_function, requested=control.requested_at
            )
        if control is not None and control.paused:
            return None
        if self._slot(moment) == self._last_slot and not self._ring_changed():
            return None
        return TickContext(moment, self._spacing, settings.spread, settings.hash_function)

    def swept(self, ticks: TickContext, sweep: TaskRun) -> None:
        """Remember that it was done. What the ring cut short is done again at once, under the new one."""
        if sweep.stale:
            return
        if ticks.requested:
            self._heeded, self._heeded_token = ticks.requested, sweep.share.token
        else:
            self._last_slot = self._slot(ticks.moment)
            self._last_token = sweep.share.token
            self._last_moment = ticks.moment if sweep.complete else 0

    def sweep(self, ticks: TickContext, only: str = "") -> bool:
        """Sweep now; False when the member has no share at present."""
        share = self._share()
        if share is None:
            return False
        settings = self._settings
        sweep = TaskRun(
            self.name,
            self._task,
            share,
            self._claims,
            ticks,
            self._clock,
            backoff=self._backoff,
            timeout=settings.timeout,
            batch=settings.batch,
            only=only,
            stopping=self._stopping.is_set,
            since=self._since(ticks, share),
        )
        sweep.begin()
        try:
            for claim, object_ids in sweep.batches():
                # Claim nothing that cannot begin: it would wait for the next tick without a word.
                stuck = self._pool.stuck
                claimed = [] if stuck else sweep.claim(claim, object_ids)
                left = self._pool.for_each(
                    claimed, sweep.handle, settings.timeout, functools.partial(self._overdue, sweep)
                )
                if stuck or left or self._pool.stuck:
                    LOG.error("All threads of task %s hang in handlings; it handles nothing until one ends.", self.name)
                    sweep.abandon("all threads hang in handlings", len(left))
                    break
                if sweep.stale:
                    break
        except errors.MoorageError as error:
            LOG.warning("The sweep of %s is cut short: %s", self.name, error.message)
            sweep.unavailable(error)
        self.swept(ticks, sweep)
        self._store.record(sweep.run())
        self._prune(ticks.moment)
        return True

    def _overdue(self, sweep: TaskRun, claimed: AcquiredTick) -> None:
        LOG.error(
            "The handling of %s by %s has not ended within %g seconds; it is left alone, and cannot write any more. Repair the "
            "task, or take it out of [periodic] enabled_tasks.",
            claimed.object_id, origin_of(self._task), self._settings.timeout,
        )  # fmt: skip
        sweep.give_up(claimed, f"not within {self._settings.timeout:g} seconds")

    def _asked(self, moment: int, control: Control) -> bool:
        """Returns whether an operator's request is open: not swept for yet, or not under the ring that is now."""
        if not control.requested_at or moment - control.requested_at >= max(_REQUEST_LASTS, 2 * self._spacing):
            return False
        if control.requested_at != self._heeded:
            return control.requested_at > self._heeded
        return self._moved(self._heeded_token)

    def end(self) -> None:
        """Begin no handling any more; a sweep that runs is cut short."""
        self._stopping.set()

    def _since(self, ticks: TickContext, share: Ownership) -> int:
        """Of a spread task each part of a tick has its own objects: the others would be claimed in vain, one by one."""
        same = self._settings.spread and not ticks.requested and share.token == self._last_token
        # By a clock that was set back nothing was swept for yet.
        return self._last_moment if same and self._last_moment <= ticks.moment else 0

    def _slot(self, moment: int) -> int:
        return (moment - self._jitter) // (self._spacing // (PARTS if self._settings.spread else 1) or 1)

    def _ring_changed(self) -> bool:
        """What came to this member with a new ring may not have been handled at this tick: look at once."""
        return self._last_token is None or self._moved(self._last_token)

    def _moved(self, token: int | None) -> bool:
        try:
            share = self._share()
        except errors.Unavailable:
            return False
        return share is not None and share.token != token

    def _prune(self, moment: int) -> None:
        if self._clock.monotonic() - self._pruned_at < _PRUNE_EVERY:
            return
        self._pruned_at = self._clock.monotonic()
        self._claims.prune(self.name, moment - max(_CLAIMS_LAST, _CLAIMS_LAST_TICKS * self._spacing))


class Runner:
    """All tasks of one member. :meth:`start` begins; :meth:`stop` waits for what is being handled.

    :param random: spreads the beginnings of engines that start together.
    """

    def __init__(
        self,
        tasks: Sequence[TaskRunner],
        store: TaskStore,
        clock: Clock,
        *,
        poll: float,
        initial_delay: float = 0.0,
        random: randomness.Random | None = None,
    ) -> None:
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._poll = poll
        chance = random or randomness.generator()
        self._delay = chance.uniform(0, initial_delay)
        self._begins_at: float | None = None
        self._stop = threads.event()
        self._busy: dict[str, threads.Thread] = {}
        self._latest = 0
        self._thread = threads.thread(self._run, name="periodic")

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look(self, transaction: Any) -> Callable[[], None] | None:
        """What the thread of :meth:`start` does again and again, for a thread of the caller.

        :returns: what begins the tasks that are due; call it after the transaction. None: nothing begins yet, or any more.
        """
        if self._begins_at is None:
            self._begins_at = self._clock.monotonic() + self._delay
        if self._stop.is_set() or self._clock.monotonic() < self._begins_at:
            return None
        return functools.partial(self._look, *self._store.look(transaction))

    def end(self) -> None:
        """Begin nothing more, in sweeps that run either; waits for nothing."""
        self._stop.set()
        for task in self._tasks:
            task.end()

    def stop(self, seconds: float = 30.0) -> None:
        """Begins nothing more, and waits for handlings to end. A handling that does not loses its share with the membership."""
        self.end()
        deadline = self._clock.monotonic() + seconds
        for thread in (self._thread, *self._busy.values()):
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _run(self) -> None:
        if self._clock.wait(self._stop, self._delay):
            return
        while True:
            try:
                with plugin_isolation.isolate_plugin_call():
                    self._look(*self._store.look())
            except errors.Unavailable as error:
                LOG.warning("Periodic tasks wait: %s", error.message)
            except Exception:
                LOG.exception("Periodic tasks cannot be looked at.")
            if self._clock.wait(self._stop, self._poll):
                return

    def _look(self, moment: int, controls: Mapping[str, Control]) -> None:
        if moment < self._latest - MICROSECONDS:
            LOG.warning(
                "The database's clock stepped back by %.0f seconds: ticks go on by its new time, so some work is done again.",
                (self._latest - moment) / MICROSECONDS,
            )
        self._latest = moment
        for task in self._tasks:
            running = self._busy.get(task.name)
            if running is not None and running.is_alive():
                continue
            control = controls.get(task.name)
            try:
                with plugin_isolation.isolate_plugin_call(task.name):
                    ticks = task.due(moment, control)
            except errors.MoorageError as error:
                LOG.warning("Whether %s is due is not known: %s", task.name, error.message)
                continue
            except Exception:
                # The other tasks' turn comes all the same.
                LOG.exception("Whether %s is due is not known.", task.name)
                continue
            if ticks is None:
                continue
            only = control.requested_object if control is not None and ticks.requested else ""
            thread = threads.try_start(self._sweep, name=f"sweep-{task.name}", args=(task, ticks, only))
            if thread is not None:
                self._busy[task.name] = thread

    @staticmethod
    def _sweep(task: TaskRunner, ticks: TickContext, only: str) -> None:
        try:
            with plugin_isolation.isolate_plugin_call(task.name):
                task.sweep(ticks, only)
        except errors.Unavailable as error:
            LOG.warning("The sweep of %s is put off: %s", task.name, error.message)
        except Exception:
            LOG.exception("The sweep of %s failed.", task.name)


def _fraction(text: str) -> float:
    """Returns a number from 0 to 1 that a text always gives."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32
