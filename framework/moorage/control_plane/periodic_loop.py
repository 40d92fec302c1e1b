# SPDX-License-Identifier: Apache-2.0
"""Repeats the work of a role in a separate thread, and looks for the work of several loops at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.control_plane.process import Platform

__all__ = ["Look", "PeriodicLoop", "SharedLook", "run_logged"]

LOG = logging.getLogger(__name__)
#: Reads in the given transaction, as all reads of the thread do meanwhile. Returns what to call after it, which must not block.
#: Returns None when nothing is to be done.
Look = Callable[[Any], Callable[[], object] | None]
#: Seconds after which a loop that shall end is woken once more.
_LOOK_AGAIN = 0.2
#: Seconds by which a wait may end early.
_EARLY = 0.2


class PeriodicLoop:
    """Calls a function periodically in a thread of its own. Errors are logged, and end nothing.

    :param seconds: from the end of a call to the next one; None: it is called only when ``wake`` is set.
    :param first: seconds before the first call, ``seconds`` unless said.
    :param wake: calls the function sooner when it is set; the loop clears it.
    :param gather: seconds from the setting of ``wake`` to the call.
    """

    def __init__(
        self,
        platform: Platform,
        name: str,
        work: Callable[[], object],
        seconds: float | None,
        *,
        first: float | None = None,
        wake: threads.Event | None = None,
        gather: float = 0.0,
    ) -> None:
        self._clock = platform.clock
        self._name = name
        self._work = work
        self._seconds = seconds
        self._first = seconds if first is None else first
        self._wake = wake or threads.event()
        self._gather = gather
        self._stopped = False
        self._thread = threads.thread(self._run, name=name)
        self._thread.start()

    def stop(self, patience: float | None = None) -> None:
        """Call it no more; waits for a call that runs, ``patience`` seconds at most where that is given."""
        self._stopped = True
        left = math.inf if patience is None else patience
        while self._thread.is_alive() and left > 0:
            # Again and again: another loop that is woken by the same event may clear it before this one has seen it.
            self._wake.set()
            self._thread.join(min(left, _LOOK_AGAIN))
            left -= _LOOK_AGAIN

    def _run(self) -> None:
        seconds = self._first
        while True:
            if self._clock.wait(self._wake, seconds) and not self._stopped:
                self._clock.sleep(self._gather)
            self._wake.clear()
            # Not before: what stops the loop sets the event again after this.
            if self._stopped:
                return
            seconds = self._seconds
            run_logged(self._name, self._work)


class SharedLook:
    """Looks for the work of several loops in one read transaction, and wakes the loops that have work.

    A process without work wakes one thread and begins one transaction each time, however many loops it has.

    :param looks: what is looked for, by its name for the log, with the seconds between two looks.
    :param first: as for :class:`PeriodicLoop`.
    :ivar began: a moment of the clock from before the transaction of the present look.
    """

    def __init__(
        self, platform: Platform, looks: Mapping[str, tuple[float, Look]], *, first: float | None = None
    ) -> None:
        self._platform = platform
        self._database = platform.database
        self._clock = platform.clock
        self._looks = looks
        self._first = first
        self.began = self._clock.monotonic()
        self._due = dict.fromkeys(looks, self.began)
        self._loop: PeriodicLoop | None = None

    def start(self) -> None:
        """Starts the thread that looks. The constructor does not, because a look may read :attr:`began` of the finished object."""
        shortest = min(seconds for seconds, _ in self._looks.values())
        self._loop = PeriodicLoop(self._platform, "look for work", self.look, shortest, first=self._first)

    def look(self) -> None:
        """Look for everything that is due.

        :raises Unavailable: the store cannot be read.
        """
        self.began = self._clock.monotonic()
        due = [name for name, moment in self._due.items() if moment <= self.began]
        try:
            with self._database.shared_read() as transaction:
                found = [self._looks[name][1](transaction) for name in due]
        except (errors.StoreUnavailable, errors.StoreBusy):
            # All are due again when this is called next.
            raise
        except Exception:  # noqa: BLE001  (each is logged below)
            # One of the looks is at fault, and may have spoiled the transaction for the others.
            for name in due:
                self._put_off(name)
                run_logged(name, functools.partial(self._look_for, name))
            return
        for name in due:
            self._put_off(name)
        for name, follow in zip(due, found, strict=True):
            if follow is not None:
                run_logged(name, follow)

    def stop(self, patience: float | None = None) -> None:
        """Look no more."""
        if self._loop is not None:
            self._loop.stop(patience)

    def _put_off(self, name: str) -> None:
        # The next wait may end a little early.
        self._due[name] = self.began + self._looks[name][0] - _EARLY

    def _look_for(self, name: str) -> None:
        self.began = self._clock.monotonic()
        with self._database.shared_read() as transaction:
            follow = self._looks[name][1](transaction)
        if follow is not None:
            follow()


def run_logged(name: str, work: Callable[[], object]) -> None:
    """Calls a function and logs its errors: as a warning if something is unavailable, otherwise with a traceback."""
    try:
        with plugin_isolation.isolate_plugin_call(name):
            work()
    except errors.Unavailable as error:
        LOG.warning("%s is put off: %s", name, error.message)
    except Exception:
        LOG.exception("%s failed.", name)
