# SPDX-License-Identifier: Apache-2.0
"""Runs calls of plugins, and handles those that raise, exit or hang.

A plugin that raises refuses the request, by an error that names the plugin. A plugin that would have ended the process
(sys.exit) is remembered like one that hangs. A call that exceeds its deadline counts as hung (:mod:`moorage.hang_detector`): the
stacks of all threads go to the log, the request gets 503, and the process ends, because a thread cannot be stopped. The
number of such failures is stored where the next process finds it. A plugin with too many of them is not run at all.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors, plugin_isolation
from moorage import threads as threads_module
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.clock import Clock
from moorage.context import anonymous
from moorage.hang_detector import LOOKS, HangDetector, Progress

__all__ = ["PluginRunner", "PluginFailureLog", "NamedPlugin", "CallSlot"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between the answer 503 and the end of the process, so that the answer gets out.
_LAST_WORDS = 0.5
#: Seconds without a request after which the thread that looks for hanging plugins ends.
_IDLE = 10.0


class NamedPlugin(Protocol):
    """What the guard must know of a plugin."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def group(self) -> str:
        """Its entry-point group."""

    @property
    def distribution(self) -> str:
        """Where it came from, for programs."""

    @property
    def who(self) -> str:
        """All of that and the version, for persons: ``plugin 'it' (moorage.filters, of acme 1.0)``."""

    @property
    def advisory(self) -> bool:
        """A request may go on without it."""


class PluginFailureLog(Protocol):
    """Remembers hangs and exits of plugins beyond the end of the process."""

    def record(self, plugin: str) -> None:
        """The plugin hung, or exited."""

    def count(self, plugin: str) -> int:
        """How often the plugin did within the window that counts. Answers from memory."""


class CallSlot:
    """What one thread is running, for who watches it; ``plugin`` is None while no plugin runs."""

    __slots__ = ("_before", "_ident", "_monotonic", "_running", "calls", "plugin", "since")

    def __init__(self, clock: Clock, running: dict[int, CallSlot]) -> None:
        self._monotonic = clock.monotonic
        self._running = running
        self.plugin: NamedPlugin | None = None
        self.since = 0.0
        self.calls = 0

    def __enter__(self) -> Self:
        self._ident = threads_module.identity()
        self._before = self._running.get(self._ident)
        self._running[self._ident] = self
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            del self._running[self._ident]
        else:
            self._running[self._ident] = self._before

    def begin(self, plugin: NamedPlugin) -> None:
        """The plugin is being called from now on."""
        self.since = self._monotonic()
        self.calls += 1
        self.plugin = plugin


class _HangWatch:
    """Looks for requests that hang in the threads of their callers.

    One thread looks at them after each pause. It sleeps while there are none, and ends if none comes within :data:`_IDLE` seconds.

    :param pause: seconds between two looks.
    """

    def __init__(self, clock: Clock, pause: float) -> None:
        self._clock = clock
        self._pause = pause
        #: By the number of the thread: whether its request hangs, and what is called then.
        self._requests: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}
        #: Counts requests, so that the thread knows whether there were any meanwhile.
        self._begun = 0
        self._sleeps = False
        self._wake = threads_module.event()
        #: Guards the start and the end of the thread.
        self._lock = threads_module.lock()
        self._thread: threads_module.Thread | None = None

    def begin(self, hangs: Callable[[], bool], hung: Callable[[], None]) -> bool:
        """Has the request of the calling thread watched until :meth:`end`. Returns False if no watching thread can be started.

        :param hangs: returns whether the request hangs; called once in each look.
        :param hung: called by the watching thread when the request hangs.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threads_module.try_start(self._run, name="watch over plugins")
            if self._thread is None:
                return False
            self._requests[threads_module.identity()] = hangs, hung
            self._begun += 1
        # The watching thread says that it sleeps before it looks for requests a last time.
        if self._sleeps:
            self._wake.set()
        return True

    def end(self) -> None:
        """Ends the watch over the request of the calling thread."""
        self._requests.pop(threads_module.identity(), None)

    def _run(self) -> None:
        while True:
            begun = self._begun
            self._clock.wait(self._wake, self._pause)
            self._wake.clear()
            self._look()
            if self._is_idle(begun) and not self._sleep():
                return

    def _is_idle(self, begun: int) -> bool:
        """Returns whether no request runs, and none has begun since the count of requests was ``begun``."""
        return begun == self._begun and not self._requests

    def _look(self) -> None:
        for thread, request in list(self._requests.items()):
            hangs, hung = request
            if hangs() and self._requests.get(thread) is request:
                del self._requests[thread]
                try:
                    hung()
                except Exception:
                    # The thread still has to watch the other requests.
                    LOG.exception("A request whose plugin hangs could not be answered.")

    def _sleep(self) -> bool:
        """Waits for the next request. Returns False if none came within :data:`_IDLE` seconds: this thread ends."""
        begun = self._begun
        self._sleeps = True
        if not self._requests:
            self._clock.wait(self._wake, _IDLE)
        self._sleeps = False
        with self._lock:
            if not self._is_idle(begun):
                return True
            self._thread = None
            return False


class PluginRunner:
    """Runs requests, and their plugins under a deadline.

    The thread of a request does it if another thread can answer in its place. Otherwise a thread of the runner does it.

    :param fatal: ends the process; called with the reason.
    """

    def __init__(
        self,
        clock: Clock,
        incidents: PluginFailureLog,
        fatal: Callable[[str], None],
        *,
        deadline: float,
        threshold: int,
        window: float,
        skip_advisory: bool,
        threads: int = 16,
    ) -> None:
        self._clock = clock
        self._incidents = incidents
        self._fatal = fatal
        self._deadline = deadline
        self._threshold = threshold
        self._window = window
        self._skip_advisory = skip_advisory
        self._pool = BoundedPool("select", clock, threads)
        #: What each thread runs, by its number.
        self._running: dict[int, CallSlot] = {}
        self._watch = _HangWatch(clock, deadline / LOOKS)
        self._unbroken: dict[int, float] = {}
        self._blaming = threads_module.lock()
        self._blamed: set[NamedPlugin] = set()

    def request(self, work: Callable[[], T], instead: Callable[[errors.MoorageError], None] | None = None) -> T:
        """Do a whole request; it may take any time, as long as no single plugin overruns its deadline.

        :param instead: answers the request in place of the calling thread. If it is given, the calling thread does the work itself,
            which saves two hand-overs between threads, a sixth of the time of a lone create. If a plugin hangs then, another thread
            calls ``instead`` with the PluginTimeout.
        :raises PluginTimeout: a plugin overran its deadline; the process is about to end.
        """
        called: list[NamedPlugin] = []

        def progress(thread: int) -> Progress:
            running = self._running.get(thread)
            plugin = running.plugin if running is not None else None
            if running is None or plugin is None:
                return None
            called[:] = [plugin]
            return (running, running.calls), running.since

        if instead is not None and self._begin_watch(progress, lambda: instead(self._hung(called[0]))):
            try:
                with plugin_isolation.isolate_plugin_call("select"):
                    return work()
            finally:
                self._watch.end()
        # What the caller's thread knows of its request, for logs and decisions.
        variables, context = contextvars.copy_context(), oslo_context.get_current() or anonymous()

        def work_of_request() -> T:
            context.update_store()
            return variables.run(work)

        try:
            return self._pool.call(work_of_request, self._deadline, progress)
        except Overdue as error:
            raise self._hung(called[0]) from error

    def _begin_watch(self, progress: Callable[[int], Progress], hung: Callable[[], None]) -> bool:
        """Has the plugins watched that the calling thread runs; see :meth:`_HangWatch.begin`."""
        detector, thread = HangDetector(self._clock, self._deadline), threads_module.identity()
        return self._watch.begin(lambda: detector.look(progress(thread)), hung)

    def slot(self) -> CallSlot:
        """Where this thread says which plugin it is calling; a context for one run of a pipeline."""
        return CallSlot(self._clock, self._running)

    def failed(self, plugin: NamedPlugin, error: Exception) -> None:
        """A plugin raised. Returns when the request may go on without it.

        :raises PluginFailed: it may not.
        """
        LOG.error("The %s raised.", plugin.who, exc_info=error)
        if isinstance(error, plugin_isolation.PluginExit):
            self._record(plugin)
        if plugin.advisory and self._skip_advisory:
            return
        raise errors.PluginFailed(
            f"The {plugin.who} raised {plugin_isolation.format_exception(error)}. "
            "The request was refused; repair the plugin or take it out of the configuration.",
            group=plugin.group,
            plugin=plugin.name,
            distribution=plugin.distribution,
        ) from error

    def check_breakers(self, plugins: Sequence[NamedPlugin]) -> None:
        """Refuse plugins when one of them hung or exited too often. Looks at most once a second, and reads no store.

        :param plugins: always the same object for the same plugins.
        :raises PluginTimeout: names it.
        """
        now = self._clock.monotonic()
        if now < self._unbroken.get(id(plugins), 0.0):
            return
        for plugin in plugins:
            self.check_breaker(plugin)
        self._unbroken = {id(plugins): now + 1.0}

    def check_breaker(self, plugin: NamedPlugin) -> None:
        """Refuse a plugin that hung or exited too often.

        :raises PluginTimeout: names it.
        """
        count = self._incidents.count(_key(plugin))
        if count >= self._threshold:
            raise errors.PluginTimeout(
                f"The {plugin.who} hung or exited {count} times in the last "
                f"{self._window:g} seconds and is not run any more. Take it out of the configuration and reload.",
                group=plugin.group,
                plugin=plugin.name,
                retry_after=self._window,
            )

    def close(self) -> None:
        """Take no more requests; does not wait for what hangs."""
        self._pool.close()

    def _hung(self, plugin: NamedPlugin) -> errors.PluginTimeout:
        reason = f"The {plugin.who} ran longer than {self._deadline:g} seconds and is taken for hung"
        with self._blaming:
            first = plugin not in self._blamed
            self._blamed.add(plugin)
        if first:
            self._tell(plugin, reason)
        return errors.PluginTimeout(
            reason + ". This scheduler is restarted; try again.",
            group=plugin.group,
            plugin=plugin.name,
            seconds=self._deadline,
        )

    def _tell(self, plugin: NamedPlugin, reason: str) -> None:
        """Once for each plugin, however many requests wait for it: the process ends anyway."""
        LOG.critical("%s. Stacks of all threads follow.", reason)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._record(plugin)
        if threads_module.try_start(lambda: self._end(reason), name="last-words") is None:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._clock.sleep(_LAST_WORDS)
        self._fatal(reason)

    def _record(self, plugin: NamedPlugin) -> None:
        self._unbroken.clear()
        try:
            self._incidents.record(_key(plugin))
        except errors.Unavailable as error:
            LOG.warning("That the %s hung or exited could not be recorded: %s", plugin.who, error.message)


def _key(plugin: NamedPlugin) -> str:
    """A filter and a weigher may have one name."""
    return f"{plugin.group}:{plugin.name}"
