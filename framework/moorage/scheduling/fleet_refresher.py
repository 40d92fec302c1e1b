# SPDX-License-Identifier: Apache-2.0
"""How old a scheduler's view of the fleet's nodes may be, and who has it read again when."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock
from moorage.scheduling.constraints import could_fit_when_empty
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import ExcludedTargets, FleetSource, RequestSpec
from moorage.scheduling.snapshot import Snapshot

__all__ = ["FleetRefresher"]

LOG = logging.getLogger(__name__)

#: Before a refusal the view is read again. But no more than one part in so many of the time is spent on such readings, however many
#: requests are refused.
_REFUSAL_PART = 10
#: What was read within so many seconds is not stale.
_STALE = 1.0
#: Hosts whose instances are read before a refusal at most; the reading for the next refusal has the others.
_RECOUNTED = 500

#: Seconds between comparisons of all versions; they find what was committed more than a minute after it was written.
_COMPARISON = 600.0
#: An import tells of each of its pages: changes are read when there was none for so many seconds, or after the second number.
_QUIET, _GATHERED = 0.25, 2.0
#: Between two readings of changes lie so many times the seconds that the last one took. New nodes of a large fleet cost much.
_REST = 9
#: The longest rest, in seconds: one slow reading, of a store that was away, must not make the view old for minutes.
_LONGEST_REST = 30.0
#: A gentle reading rests after each step for so many times the seconds that the step took, and so many seconds at most. A scheduler
#: that is half busy with requests would not keep up with them while it reads a large fleet without rests.
_STEP_REST, _LONGEST_STEP_REST = 3, 0.5
#: Seconds after which a thread that waits for a gentle reading ends its rests.
_HURRY = 0.02


class FleetRefresher:
    """Reads the nodes into a view: one reading at a time, however many threads ask. Safe for use by several threads.

    After the first one, a reading costs what changed since the last one.

    :param recount: reads the instances of some hosts into the view. None: the view keeps no instances.
    """

    def __init__(
        self,
        view: FleetView,
        source: FleetSource,
        clock: Clock,
        recount: Callable[[Sequence[str]], object] | None = None,
    ) -> None:
        self._view = view
        self._source = source
        self._clock = clock
        self._recount = recount
        self._refreshing = threads.lock()
        #: The present reading is gentle, its last step began at this time, and a thread waits for it.
        self._gentle, self._step_began = False, -1e9
        self._hurried = threads.event()
        self._refreshed_at = self._recounted_at = -1e9
        #: The last host that was recounted.
        self._recounted_to = ""
        #: Seconds that the last reading for a request took. Periodic readings do not count: the first one has all nodes, and of a
        #: large fleet it takes some hundred times as long as those that follow.
        self._reading_took = 0.0
        #: The view has all that the source has read.
        self._whole = False
        self._compared_at = -1e9
        #: A node was found to be gone.
        self._outdated = False
        #: A node's providers refused what the view let them give.
        self._providers_outdated = False
        self._changed_at = -1e9
        #: Reads changes while there are some.
        self._catching_up: threads.Thread | None = None
        self._stopping = threads.event()
        #: When changes may be read next.
        self._rests_until = -1e9
        self._changing = threads.lock()
        self._observing = threads.lock()
        #: When the states that were applied last were read, from before the reading.
        self._observed_at = -1e9
        #: A claim has met an agent or a node that is unavailable, which the view does not know.
        self._states_outdated = False
        self._store_away = False

    def observe(self) -> None:
        """Read the states of agents and nodes and apply them to the view. A store that is away is logged once."""
        with self._observing:
            self._states_outdated = False
            began = self._clock.monotonic()
            try:
                self._view.set_unavailable(self._source.unavailable())
            except errors.Unavailable as error:
                level = LOG.debug if self._store_away else LOG.warning
                self._store_away = True
                level(
                    "The states of agents and nodes cannot be read now; the last known ones are used: %s", error.message
                )
            else:
                self._store_away, self._observed_at = False, began

    def apply_states(self, states: ExcludedTargets, read_at: float) -> None:
        """Apply states of agents and nodes that the caller has read, unless newer ones were applied meanwhile.

        :param read_at: a moment of the clock from before the reading.
        """
        with self._observing:
            if self._observed_at <= read_at:
                self._view.set_unavailable(states)
                self._observed_at = read_at

    def mark_states_outdated(self) -> None:
        """A claim was refused for the state of an agent or a node: read the states before nodes are ranked again."""
        self._states_outdated = True

    def refresh(self, *, older_than: float = 0.0, gently: bool = False) -> bool:
        """Read the nodes again, unless that was done within ``older_than`` seconds; True when it was done now.

        :param gently: rest between its steps, as long as no other thread waits for the reading.
        """
        return self._refresh(older_than, gently=gently) is not None

    def rest(self) -> None:
        """Waits between two steps, if the reading is gentle. The source calls this in the thread that reads."""
        if self._gentle:
            took = self._clock.monotonic() - self._step_began
            self._clock.wait(self._hurried, min(_STEP_REST * took, _LONGEST_STEP_REST))
            self._step_began = self._clock.monotonic()

    def _refresh_for_request(self, older_than: float, *, recount: bool = False) -> None:
        took = self._refresh(older_than, recount=recount)
        if took is not None:
            self._reading_took = took

    @contextlib.contextmanager
    def _alone(self, gently: bool) -> Iterator[None]:
        """Lets one thread read at a time. A thread that waits ends the rests of the reading that it waits for."""
        while not self._refreshing.acquire(timeout=_HURRY):
            self._hurried.set()
        try:
            self._hurried.clear()
            self._gentle, self._step_began = gently and not self._stopping.is_set(), self._clock.monotonic()
            yield
        finally:
            self._gentle = False
            self._refreshing.release()

    def _refresh(self, older_than: float, *, recount: bool = False, gently: bool = False) -> float | None:
        """Read the nodes again, unless that was done lately; how many seconds it took, None when it was not done.

        :param recount: also read the instances of hosts that use less by the store than by the instances of the view: the message
            that some are gone was lost, or is on its way.
        """
        asked_at = self._clock.monotonic()
        with self._alone(gently):
            last = self._recounted_at if recount else self._refreshed_at
            if last > asked_at - older_than or last > asked_at:
                return None
            began = self._clock.monotonic()
            self._outdated = self._providers_outdated = False
            self._read(began)
            self._refreshed_at = began
            if recount:
                self._recount_hosts()
                self._recounted_at = began
            took = self._clock.monotonic() - began
            # The states that were read with the nodes are as old as the beginning of the reading.
            self.observe()
            return took

    def _recount_hosts(self) -> None:
        if self._recount is None:
            return
        hosts = self._view.overcounted()
        # After the host where the last reading ended, so that each one has its turn.
        first = bisect.bisect_right(hosts, self._recounted_to)
        hosts = [*hosts[first:], *hosts[:first]][:_RECOUNTED]
        if hosts:
            self._recounted_to = hosts[-1]
            self._recount(hosts)

    def _read(self, began: float) -> None:
        """Bring the view in line with the store: by what changed, or by all nodes where the source cannot tell."""
        held = self._view.held()
        compare = began - self._compared_at >= _COMPARISON
        changes = self._source.changes(compare=compare) if self._whole else None
        # What was read and not taken over would be lost.
        self._whole = False
        if changes is None:
            self._view.set_nodes(sorted(self._source.nodes(), key=lambda node: node.uuid), held=held)
        else:
            self._view.change_nodes(changes, held=held)
        self._whole = True
        if compare or changes is None:
            self._compared_at = began

    def changed(self) -> None:
        """Nodes or services were changed: refusals wait for a reading that begins from now on. Returns at once.

        However many changes there are, one reading follows on the other, and the last one begins after the last change.
        """
        with self._changing:
            self._changed_at = self._clock.monotonic()
            if self._catching_up is None and not self._stopping.is_set():
                # Without a thread the periodic reading has the change, and so does the next refusal.
                self._catching_up = threads.try_start(self._catch_up, name="reading of the fleet")

    def stop(self) -> None:
        """Ends the thread that reads changed nodes, and waits for the reading that is in progress. No reading rests any more."""
        with self._changing:
            self._stopping.set()
            self._hurried.set()
            thread = self._catching_up
        if thread is not None:
            thread.join()

    def _catch_up(self) -> None:
        while True:
            self._wait(self._rests_until - self._clock.monotonic())
            self._gather()
            if self._stopping.is_set():
                return
            began = self._clock.monotonic()
            try:
                self.refresh()
            except errors.Unavailable as error:
                LOG.warning("The fleet has changed and cannot be read now; the next reading has it: %s", error.message)
            except Exception:
                LOG.exception("The fleet has changed and could not be read.")
            else:
                ended = self._clock.monotonic()
                self._rests_until = ended + min(_LONGEST_REST, _REST * (ended - began))
                with self._changing:
                    if self._refreshed_at < self._changed_at:
                        continue
            with self._changing:
                self._catching_up = None
                return

    def _gather(self) -> None:
        """Wait until nothing has changed for a moment."""
        until = self._clock.monotonic() + _GATHERED
        seen = -1e9
        while seen != self._changed_at and self._clock.monotonic() < until and not self._stopping.is_set():
            seen = self._changed_at
            self._wait(_QUIET)

    def _wait(self, seconds: float) -> None:
        self._clock.wait(self._stopping, max(0.0, seconds))

    def mark_outdated(self) -> None:
        """A node was found to be gone: what was removed is known to be gone before others are ranked again."""
        self._outdated = True

    def mark_providers_outdated(self) -> None:
        """A node's providers refused a claim: what they have is read before nodes are ranked again."""
        self._providers_outdated = True

    def before_ranking(self) -> None:
        """Read again what is known to be outdated."""
        if self._outdated:
            self.refresh_if_stale()
        if self._providers_outdated:
            self._refresh_for_request(_REFUSAL_PART * self._reading_took)
        if self._states_outdated:
            self.observe()

    def refresh_if_stale(self) -> None:
        """Something does not agree with the view: read it again, unless that was done a moment ago."""
        self.refresh(older_than=_STALE)

    def before_refusal(self, fleet: Snapshot, spec: RequestSpec) -> None:
        """Read the fleet again before a request is refused, unless that cannot help or was done lately; doubt foreign use anyway.

        A fleet that refuses is full, so many requests come here: they must not keep a scheduler reading all the time.
        """
        age = _REFUSAL_PART * self._reading_took
        if self._changed_at > self._refreshed_at:
            age = self._clock.monotonic() - self._changed_at
        elif not fleet.size:
            age = 0.0
        elif not spec.rebuild and not could_fit_when_empty(fleet, spec):
            return
        self._refresh_for_request(age, recount=True)
        self._view.limit_foreign()
