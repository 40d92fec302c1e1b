# SPDX-License-Identifier: Apache-2.0
"""Sends events to observers. An observer can harm neither the sender nor another observer.

Each observer has a bounded queue and a thread. Telling is putting into queues: it never waits, and never raises. One more thread
looks whether any of them hangs.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from oslo_log import log as logging

from moorage import plugin_isolation, threads
from moorage.clock import Clock
from moorage.extensions import Loaded
from moorage.hang_detector import HangDetector
from moorage.observers.interface import Notice, Observer, ObserverEvent, ProcessIdentity

__all__ = ["ObserverHub", "ObserverSettings", "Told"]

LOG = logging.getLogger(__name__)

#: Seconds without a notice after which an observer is asked to write what it has collected.
_IDLE = 0.5
#: Seconds between two complaints about one observer that falls behind.
_COMPLAINTS = 60.0
#: Seconds that an observer which a reload has replaced may take to end.
_REPLACED = 5.0


@dataclass(frozen=True, slots=True)
class ObserverSettings:
    """See the options of ``[observers]``."""

    queue: int = 1000
    max_errors: int = 10
    deadline: float = 30.0


@dataclass(frozen=True, slots=True)
class Told:
    """Counts the events for one observer: delivered, dropped, failed. ``off``: why it gets no more; empty while it gets them."""

    told: int
    dropped: int
    errors: int
    off: str


class _Lane:
    """One observer with its queue and thread."""

    def __init__(self, loaded: Loaded[Observer], observer: Observer, clock: Clock, settings: ObserverSettings) -> None:
        self.name = loaded.name
        self.who = f"The observer '{loaded.name}' ({loaded.group}, of {loaded.distribution} {loaded.version})"
        self._observer = observer
        self._kinds = observer.kinds
        self._clock = clock
        self._settings = settings
        self._detector = HangDetector(clock, settings.deadline)
        self._waiting: threads.Queue[Notice | None] = threads.queue(settings.queue)
        #: The number of the call that runs, and when it began; None while none runs.
        self._running: tuple[int, float] | None = None
        self._calls = 0
        self._told = self._dropped = self._errors = 0
        #: Errors since it last succeeded, by method.
        self._in_a_row: Counter[str] = Counter()
        self._complained = float("-inf")
        self._off = ""
        self._lock = threads.lock()
        self._ended = threads.event()
        self._thread = threads.thread(self._run, name=f"observer-{loaded.name}")
        self._thread.start()

    def put(self, event: ObserverEvent, source: ProcessIdentity, sequence: int, at: float) -> None:
        if self._kinds is not None and event.kind not in self._kinds:
            return
        if self._off:
            with self._lock:
                self._dropped += 1
            return
        try:
            self._waiting.put_nowait(Notice(event, source, sequence, at, self._dropped))
        except threads.Full:
            self._fell_behind()

    def counts(self) -> Told:
        return Told(self._told, self._dropped, self._errors, self._off)

    def close(self) -> None:
        """Tell what waits, then end; does not wait for that."""
        while True:
            try:
                self._waiting.put_nowait(None)
                return
            except threads.Full:
                try:
                    self._waiting.get_nowait()
                    with self._lock:
                        self._dropped += 1
                except threads.Empty:
                    continue

    def join(self, seconds: float) -> bool:
        return self._ended.wait(max(0.0, seconds))

    # -- what hurts -----------------------------------------------------------------------------------------------

    def look_whether_it_hangs(self) -> None:
        """Switch the observer off when its present call hangs. Called by one thread, every ``HangDetector.pause`` seconds."""
        if not self._detector.look(self._running):
            return
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._switch_off(f"has not returned for more than {self._settings.deadline:g} seconds", where)

    def _fell_behind(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            self._dropped += 1
            if now - self._complained < _COMPLAINTS:
                return
            self._complained = now
        LOG.warning("%s falls behind: %d of its events were dropped so far.", self.who, self._dropped)

    def _failed(self, method: str, error: BaseException) -> None:
        self._errors += 1
        self._in_a_row[method] += 1
        LOG.error("%s raised %s in %s: %s", self.who, type(error).__name__, method, error, exc_info=error)
        if self._in_a_row[method] >= self._settings.max_errors:
            self._switch_off(f"raised {self._in_a_row[method]} times in a row")

    def _switch_off(self, why: str, where: str = "") -> None:
        with self._lock:
            if self._off:
                return
            self._off = why
        LOG.error(
            "%s %s, and receives no more events. Repair it, or take it out of [observers] enabled; a reload tries it again.%s",
            self.who, why, f" It is here:\n{where}" if where else "",
        )  # fmt: skip

    # -- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        collected = False
        while not self._off:
            try:
                notice = self._waiting.get(timeout=_IDLE if collected else None)
            except threads.Empty:
                collected = False
                self._call("flush")
                continue
            if notice is None:
                break
            collected = True
            if self._call("observe", notice):
                self._told += 1
        self._call("close")
        self._ended.set()

    def _call(self, method: str, *arguments: Notice) -> bool:
        self._calls += 1
        self._running = self._calls, self._clock.monotonic()
        try:
            with plugin_isolation.isolate_plugin_call(self.who):
                getattr(self._observer, method)(*arguments)
        except Exception as error:  # noqa: BLE001  (whatever a plugin may raise)
            self._failed(method, error)
            return False
        finally:
            self._running = None
        self._in_a_row[method] = 0
        return True


class ObserverHub:
    """Tells the observers of one process. Safe for use by several threads; without observers telling costs nothing.

    :param source: the process that sends the events.
    """

    def __init__(self, source: ProcessIdentity, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lanes: tuple[_Lane, ...] = ()
        #: Ends who looks at the lanes.
        self._unwatched = threads.event()

    def use(
        self, observers: Sequence[tuple[Loaded[Observer], Observer]], settings: ObserverSettings | None = None
    ) -> None:
        """Replaces the observers. The present ones get a few seconds to end."""
        old, chosen = self._lanes, settings or ObserverSettings()
        self._lanes = tuple(_Lane(loaded, observer, self._clock, chosen) for loaded, observer in observers)
        self._unwatched.set()
        self._unwatched = threads.event()
        if self._lanes:
            watched = (self._lanes, HangDetector(self._clock, chosen.deadline).pause, self._unwatched)
            threads.thread(self._watch, name="observers-watch", args=watched).start()
        _end(old, self._clock, _REPLACED)

    def tell(self, event: ObserverEvent) -> None:
        """It has happened. Never waits, never raises; some microseconds for each observer."""
        lanes = self._lanes
        if not lanes:
            return
        sequence, at = next(self._numbers), self._clock.wall()
        for lane in lanes:
            lane.put(event, self._source, sequence, at)

    def counts(self) -> dict[str, Told]:
        """What became of the notices, by the observer's name."""
        return {lane.name: lane.counts() for lane in self._lanes}

    def close(self, seconds: float) -> None:
        """Delivers queued events and stops. Observers that have not ended by then are abandoned, and named in the log."""
        lanes, self._lanes = self._lanes, ()
        _end(lanes, self._clock, seconds)
        self._unwatched.set()

    def _watch(self, lanes: Sequence[_Lane], pause: float, unwatched: threads.Event) -> None:
        while not self._clock.wait(unwatched, pause):
            for lane in lanes:
                lane.look_whether_it_hangs()


def _end(lanes: Sequence[_Lane], clock: Clock, seconds: float) -> None:
    for lane in lanes:
        lane.close()
    end = clock.monotonic() + seconds
    for lane in lanes:
        if not lane.join(end - clock.monotonic()):
            LOG.warning("%s has not ended within %g seconds and is left behind.", lane.who, seconds)
