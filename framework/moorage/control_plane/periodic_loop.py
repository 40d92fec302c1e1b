# SPDX-License-Identifier: Apache-2.0
"""Repeats work of a role in a separate thread."""

from __future__ import annotations

from collections.abc import Callable

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.control_plane.process import Platform

__all__ = ["PeriodicLoop", "run_logged"]

LOG = logging.getLogger(__name__)


class PeriodicLoop:
    """Calls a function again and again in a thread of its own; an error is told in the log and ends nothing.

    :param first: seconds before the first call, ``seconds`` unless said.
    :param wake: calls the function sooner when it is set; the loop clears it.
    :param gather: seconds from the setting of ``wake`` to the call.
    """

    def __init__(
        self,
        platform: Platform,
        name: str,
        work: Callable[[], object],
        seconds: float,
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
        self._wake.set()
        self._thread.join(patience)

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


def run_logged(name: str, work: Callable[[], object]) -> None:
    """Call it; an error is told in the log, by its own words where it says that something is away."""
    try:
        with plugin_isolation.isolate_plugin_call(name):
            work()
    except errors.Unavailable as error:
        LOG.warning("%s is put off: %s", name, error.message)
    except Exception:
        LOG.exception("%s failed.", name)
