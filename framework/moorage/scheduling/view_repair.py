# SPDX-License-Identifier: Apache-2.0
"""Mending what lost messages did to the view: the host is asked first, then the store.

A host that answers does so to every scheduler, with a number that puts its list among its other messages. One that does not
within the timeout (it is down, or of an older release) is read from the store, together with all others of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import InstanceSource

__all__ = ["ViewReconciler", "UntrackedHosts"]

LOG = logging.getLogger(__name__)
#: Hosts that are read from the store by one query.
_AT_ONCE = 500
#: Seconds for which a message may be late before it counts as lost.
_LATE = 2.0
_MISSED = float("-inf")


class ViewReconciler:
    """Looks after the hosts that the tracker has doubts about. Used by one thread; :meth:`tick` is called every second or so.

    :param ask: sends a message to a host's agent: ``report_instances`` (report all) or ``sync_instances`` (compare); raises
        TransportError if the message certainly did not arrive.
    """

    def __init__(
        self,
        tracker: InstanceTracker,
        source: InstanceSource,
        ask: Callable[[str, str], None],
        clock: Clock,
        *,
        timeout: float,
    ) -> None:
        self._tracker = tracker
        self._source = source
        self._ask = ask
        self._clock = clock
        self._timeout = timeout
        self._asked: dict[str, float] = {}

    @property
    def is_due(self) -> bool:
        """Whether :meth:`tick` has something to do. Costs nothing."""
        return bool(self._asked) or self._tracker.is_in_doubt

    def tick(self) -> None:
        """Ask, and read what did not answer.

        :raises Unavailable: the store cannot be read; what was to be read stays to be done.
        """
        stale = self._tracker.stale()
        now = self._clock.monotonic()
        self._asked = {host: at for host, at in self._asked.items() if host in stale}
        for host in stale.keys() - self._asked.keys():
            self._asked[host] = now if self._told(host, "report_instances") else _MISSED
        for host in self._tracker.take_missed(_LATE):
            if host not in stale:
                self._told(host, "sync_instances")
        overdue = sorted(host for host, at in self._asked.items() if at <= now - self._timeout)
        for start in range(0, len(overdue), _AT_ONCE):
            hosts = overdue[start : start + _AT_ONCE]
            self._tracker.reload_hosts(self._source, hosts)
            LOG.info("The instances of %d hosts that did not answer were read from the store.", len(hosts))

    def _told(self, host: str, method: str) -> bool:
        try:
            self._ask(host, method)
        except errors.TransportError as error:
            LOG.debug("Host %s was not asked to %s: %s", host, method, error)
            return False
        return True


class UntrackedHosts:
    """Keeps the instances of hosts that never spoke as new as the store, as requests need it. Safe for several threads.

    The seed's ``updated`` for rolling upgrades: an agent of an older release tells nothing, so what was loaded of its host is
    old. All such hosts are read by one query, which is believed for a while; a host that has spoken is trusted.

    :param max_age: seconds for which a reading is believed, from its beginning on; but always twice as long as it took, so that a
        store that is slow at the moment is not read for every request.
    """

    def __init__(self, tracker: InstanceTracker, source: InstanceSource, clock: Clock, *, max_age: float) -> None:
        self._tracker = tracker
        self._source = source
        self._clock = clock
        self._max_age = max_age
        self._lock = threads.lock()
        self._read_at = float("-inf")
        self._took = 0.0

    def loaded(self, at: float) -> None:
        """All instances have been read from the store, beginning at that monotonic time."""
        self._read_at, self._took = at, self._clock.monotonic() - at

    def freshen(self, hosts: Mapping[str, object]) -> bool:
        """Read the silent ones of the hosts unless that was done just now; True when it was done by this call.

        A caller that comes while it is being read waits for it: no answer may come from what is known to be old.

        :raises Unavailable: the store cannot be read.
        """
        if not self._tracker.silent(hosts):
            return False
        asked_at = self._clock.monotonic()
        with self._lock:
            if self._read_at > asked_at - max(self._max_age, 2 * self._took):
                return False
            silent = self._tracker.silent(hosts)
            began = self._clock.monotonic()
            self._tracker.reload_hosts(self._source, silent)
            self.loaded(began)
            return True
