# SPDX-License-Identifier: Apache-2.0
"""Keeps the instances in the view up to date by messages, which may be lost, doubled, late or out of order.

Each message has a number (service, epoch, sequence). A message that is newer than all others of its service is applied. A late
message is applied only to instances that no newer message was about: the tracker remembers the last message about each instance
for a while, also about deleted ones. A message without an origin is applied in the order of arrival.

Rows that are read from the store have no number. While the tracker reads the store, it notes the instances of arriving messages,
and the reading does not change these. Instances that this process is claiming stay in the view. An agent may have made its list of
instances before a claim that this process knows of. So a claim stays in the view for a few seconds although the list lacks it, and
a comparison that lacks only such claims agrees.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock, SystemClock
from moorage.read_only import EMPTY, FrozenDict, frozen_mapping
from moorage.rpc.interface import Origin
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.epochs import ConfirmedEpochs
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Holds, InstanceRecord, InstanceSource

__all__ = ["InstanceTracker", "record_from_json", "record_to_json"]

LOG = logging.getLogger(__name__)
#: Instances whose last message is remembered, at least.
_REMEMBERED = 20_000
_PAGE = 5_000
#: Seconds for which a claim stays in the view although the agent's list lacks it.
_GRACE = 5.0
#: Seconds for each instance of a host by which the next comparison is delayed: its cost grows with the number of instances.
_PACE = 0.0003
#: Claims that are remembered before old ones are removed.
_FEW_CLAIMED = 1000
#: All instances of a host, as a range of uuids.
_ALL: tuple[str, str | None] = ("", None)
_NONE: frozenset[str] = frozenset()
#: The number of a message has the service in its high bits, then the epoch, then the sequence.
_SERVICE_SHIFT, _EPOCH_SHIFT = 96, 48


class _Service:
    """Holds the host, the epoch and the highest message number of a sender."""

    __slots__ = ("base", "epoch", "highest", "host", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.base = number
        self.epoch = -1
        self.highest = 0
        self.host = ""


class InstanceTracker:
    """Applies messages, claims and readings of the store to a view. Safe for use by several threads.

    :param epochs: confirms the epochs of messages; None: every epoch is right.
    :param claiming: returns the uuids of the instances that this process is claiming.
    """

    def __init__(
        self,
        view: FleetView,
        clock: Clock | None = None,
        epochs: ConfirmedEpochs | None = None,
        claiming: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._view = view
        self._epochs = epochs
        self._claiming = claiming
        self._clock: Clock = clock or SystemClock()
        self._lock = threads.lock()
        self._services: dict[str, _Service] = {}
        #: The number of the last message about each instance, in two generations: the older one is dropped as a whole.
        self._said: dict[str, int] = {}
        self._said_before: dict[str, int] = {}
        #: Claims without a message of an agent, with the time when they became known.
        self._claimed: dict[str, float] = {}
        #: If there are more of them, old ones are removed.
        self._most_claimed = _FEW_CLAIMED
        self._readings: list[set[str]] = []
        self._spoke: set[str] = set()
        #: The hosts of the view, if each of them has sent a message.
        self._all_spoke: Mapping[str, object] | None = None
        self._stale: dict[str, float] = {}
        #: By host, the time of its next comparison (monotonic) and the claims that its last list lacked.
        self._lacked: dict[str, tuple[float, frozenset[str]]] = {}
        self._missed: dict[str, float] = {}
        self._late = False

    # -- what is known of hosts -----------------------------------------------------------------------------------

    def has_spoken(self, host: str) -> bool:
        """Returns whether the host has sent messages about its instances, so that the view of the host is up to date."""
        return host in self._spoke

    def silent(self, hosts: Mapping[str, object]) -> list[str]:
        """Returns the hosts that never sent a message. Their instances are as old as the last reading of the store.

        :param hosts: the view's hosts. The view returns one object until its hosts change, so the answer for it is kept once all
            of them have sent a message.
        """
        if hosts is self._all_spoke:
            return []
        found = sorted(hosts.keys() - self._spoke)
        if not found:
            self._all_spoke = hosts
        return found

    def stale_since(self, host: str) -> float | None:
        """Returns since when (monotonic seconds) the view is known to differ from the host; None: it does not."""
        return self._stale.get(host)

    def stale(self) -> dict[str, float]:
        """Returns all hosts from which the view is known to differ, and since when."""
        with self._lock:
            return dict(self._stale)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the view is known to differ from a host, or a message is missing or was refused. Costs nothing."""
        return bool(self._stale or self._missed or self._lacked) or (
            self._epochs is not None and self._epochs.has_refused
        )

    def take_missed(self, older_than: float) -> list[str]:
        """Returns the hosts whose agents should compare their instances with the view; each host is returned once.

        Either a message of the agent has been missing for ``older_than`` seconds, or the agent lacked claims and has sent no
        message about them since.
        """
        now = self._clock.monotonic()
        refused = self._epochs.take_confirmed() if self._epochs is not None else ()
        with self._lock:
            for host in refused:
                self._missed.setdefault(host, now - older_than)
            found = {host for host, since in self._missed.items() if since <= now - older_than}
            for host in found:
                del self._missed[host]
            for host in [host for host, (at, _) in self._lacked.items() if at <= now]:
                _, lacked = self._lacked.pop(host)
                if any(map(self._is_mere_claim, lacked)):
                    found.add(host)
        # In one order, so that a simulation can be repeated.
        return sorted(found)

    # -- readings of the store ------------------------------------------------------------------------------------

    def load(self, source: InstanceSource) -> int:
        """Reads all instances, page by page. Messages that arrive meanwhile win. Returns the number of instances."""
        count = 0
        with self._reading() as touched:
            for page in source.pages(_PAGE):
                with self._lock:
                    self._view.put_many([_own(each) for each in page if not touched or each.uuid not in touched])
                count += len(page)
        return count

    def reload_hosts(self, source: InstanceSource, hosts: Sequence[str]) -> None:
        """Reads the instances of hosts again, by one query. The view of these hosts is not stale then.

        Instances that are being claimed stay in the view.
        """
        with self._reading() as touched:
            # Before the store is read: a claim that ends meanwhile is in the reading, or has failed.
            claiming = self._claiming()
            records = source.by_hosts(hosts)
            of_host: dict[str, list[InstanceRecord]] = {host: [] for host in hosts}
            for record in records:
                of_host.setdefault(record.host, []).append(_own(record))
            with self._lock:
                spared = touched.union(claiming)
                for host, found in of_host.items():
                    given = {record.uuid for record in found}
                    self._stale.pop(host, None)
                    for uuid in self._view.of_host(host).keys() - given - spared:
                        self._drop(uuid)
                        self._remember(uuid, 0)
                    self._settle([record for record in found if record.uuid not in touched])

    @contextlib.contextmanager
    def _reading(self) -> Iterator[set[str]]:
        touched: set[str] = set()
        with self._lock:
            self._readings.append(touched)
        try:
            yield touched
        finally:
            with self._lock:
                self._readings = [each for each in self._readings if each is not touched]

    # -- messages -------------------------------------------------------------------------------------------------

    def update(
        self, host: str, records: Sequence[InstanceRecord], origin: Origin | None, *, replace: bool = False
    ) -> None:
        """Applies a message that instances are on a host; with ``replace``, that no others are."""
        if not self._believes(host, origin):
            return
        with self._lock:
            number = self._heard(host, origin)
            if number < 0:
                return
            if replace:
                self._stale.pop(host, None)
                self._missed.pop(host, None)
                self._replace(host, records, number)
            else:
                if self._late:
                    records = [record for record in records if not self._outdated(record.uuid, number)]
                self._put(records, number)

    def claimed(self, records: Sequence[InstanceRecord]) -> None:
        """Adds instances that another scheduler has claimed. Messages of agents win, also those of deletions."""
        with self._lock:
            for record in records:
                if self._last_word(record.uuid) is None and self._view.get(record.uuid) is None:
                    self._claim(record)

    def reserve(self, record: InstanceRecord) -> None:
        """Adds an instance that this process is claiming.

        If the instance is in the view already, it stays where it is: the claim is a repetition, or will be refused.
        """
        with self._lock:
            if record.uuid in self._claimed or self._view.get(record.uuid) is None:
                self._claim(record)

    def unreserve(self, record: InstanceRecord) -> None:
        """Removes an instance whose claim failed, unless a message about it has arrived since."""
        with self._lock:
            known = self._view.get(record.uuid)
            if known is None or (known.host, known.node) != (record.host, record.node):
                return
            if self._claimed.pop(record.uuid, None) is not None:
                self._touch(record.uuid)
                self._view.drop(record.uuid)

    def delete(self, host: str, uuids: str | Sequence[str], origin: Origin | None) -> None:
        """Applies a message that instances have left a host. Instances that another host has reported since stay there."""
        if not self._believes(host, origin):
            return
        with self._lock:
            number = self._heard(host, origin)
            if number < 0:
                return
            for uuid in (uuids,) if isinstance(uuids, str) else uuids:
                if self._late and self._outdated(uuid, number):
                    continue
                present = self._view.get(uuid)
                if present is None or present.host == host:
                    self._drop(uuid)
                    self._remember(uuid, number)
                elif not self._outdated(uuid, number):
                    # An earlier message of the host must not move it back.
                    self._remember(uuid, number)

    def sync(
        self,
        host: str,
        uuids: Sequence[str],
        digest: str | None,
        origin: Origin | None,
        between: tuple[str, str | None] = _ALL,
    ) -> bool:
        """Compares the view with a host's list. Returns whether they agree; :meth:`stale` has the hosts that differ.

        :param between: the list has the instances from the first uuid on and before the second one; None: up to the last one. A
            list of a part that agrees says nothing of the others: the host stays stale until it has been read from the store.
        """
        if not self._believes(host, origin):
            return True
        with self._lock:
            if self._heard(host, origin) < 0 or self._late:
                # A newer message of the host was applied.
                return True
            lacked = self._lacked_claims(host, uuids, digest, between)
            if lacked is None:
                self._stale.setdefault(host, self._clock.monotonic())
            elif between != _ALL:
                lacked |= self._lacked.get(host, (0.0, _NONE))[1]
            elif self._stale or self._missed or self._lacked:
                self._stale.pop(host, None)
                self._missed.pop(host, None)
                self._lacked.pop(host, None)
            if lacked:
                self._compare_later(host, lacked, len(uuids))
        if lacked is None:
            LOG.info("The view of host %s differs from its list of instances; the host is asked for all of them.", host)
        return lacked is not None

    def _believes(self, host: str, origin: Origin | None) -> bool:
        """Returns whether the epoch of a message is confirmed. Call it without the lock: it may read the table of services."""
        return origin is None or self._epochs is None or self._epochs.confirms(origin, host)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _claim(self, record: InstanceRecord) -> None:
        self._touch(record.uuid)
        now = self._clock.monotonic()
        if len(self._claimed) > self._most_claimed:
            claiming = self._claiming()
            self._claimed = {uuid: at for uuid, at in self._claimed.items() if at > now - _GRACE or uuid in claiming}
            # All are checked once for as many new claims as there are open ones, so the cost of a claim does not grow.
            self._most_claimed = max(_FEW_CLAIMED, 2 * len(self._claimed))
        self._claimed[record.uuid] = now
        self._view.put(_own(record))

    def _heard(self, host: str, origin: Origin | None) -> int:
        """Notes a message of a host. Returns its number; 0: it has no origin; -1: it is of an earlier epoch.

        Sets ``_late``: whether a newer message of the service has arrived before.
        """
        self._late = False
        if origin is None:
            self._spoke.add(host)
            return 0
        service = self._services.get(origin.service)
        if service is None:
            service = self._services[origin.service] = _Service(len(self._services) + 1 << _SERVICE_SHIFT)
        if service.host != host:
            service.host = sys.intern(host)
            self._spoke.add(service.host)
        sequence = origin.sequence
        if origin.epoch != service.epoch:
            if origin.epoch < service.epoch:
                return -1
            # From the first message of a service one cannot know whether earlier ones are missing. Each epoch begins with 1.
            service.highest = 0 if service.epoch >= 0 else sequence - 1
            service.epoch = origin.epoch
            service.base = service.number | origin.epoch << _EPOCH_SHIFT
        ahead = sequence - service.highest
        if ahead > 0:
            service.highest = sequence
            if ahead > 1:
                self._missed.setdefault(host, self._clock.monotonic())
        else:
            self._late = True
        return service.base | sequence

    def _last_word(self, uuid: str) -> int | None:
        found = self._said.get(uuid)
        return self._said_before.get(uuid) if found is None else found

    def _outdated(self, uuid: str, number: int) -> bool:
        """Returns whether a late message is too old for an instance: a newer message, or another service, was about it."""
        last = self._last_word(uuid)
        return last is not None and (last >= number or last >> _SERVICE_SHIFT != number >> _SERVICE_SHIFT)

    def _remember(self, uuid: str, number: int) -> None:
        self._said[uuid] = number
        if len(self._said) >= _REMEMBERED:
            self._said_before, self._said = self._said, {}

    def _put(self, records: Sequence[InstanceRecord], number: int) -> None:
        """Applies the instances of a message."""
        for record in records:
            self._said[record.uuid] = number
        if len(self._said) >= _REMEMBERED:
            self._said_before, self._said = self._said, {}
        self._settle(records)

    def _settle(self, records: Sequence[InstanceRecord]) -> None:
        """Puts instances into the view, which are no mere claims any more."""
        if self._readings or self._claimed:
            for record in records:
                self._touch(record.uuid)
                self._claimed.pop(record.uuid, None)
        self._view.put_many(records)

    def _drop(self, uuid: str) -> None:
        if self._readings:
            self._touch(uuid)
        self._claimed.pop(uuid, None)
        self._view.drop(uuid)

    def _replace(self, host: str, records: Sequence[InstanceRecord], number: int) -> None:
        """Applies a message with all instances of a host."""
        given = {record.uuid for record in records}
        claiming = self._claiming()
        lacked = []
        for uuid in self._view.of_host(host).keys() - given:
            if self._late and self._outdated(uuid, number):
                continue
            if uuid in claiming or self._just_claimed(uuid):
                lacked.append(uuid)
                continue
            self._drop(uuid)
            self._remember(uuid, number)
        if lacked:
            self._compare_later(host, lacked, len(records))
        self._put([each for each in records if not (self._late and self._outdated(each.uuid, number))], number)

    def _compare_later(self, host: str, lacked: Collection[str], size: int) -> None:
        """Plans another comparison of a host, for when the claims that its list lacked are old: such a claim may have failed.

        :param size: how many instances the host has.
        """
        self._lacked[host] = self._clock.monotonic() + _GRACE + _PACE * size, frozenset(lacked)

    def _lacked_claims(
        self, host: str, uuids: Sequence[str], digest: str | None, between: tuple[str, str | None]
    ) -> frozenset[str] | None:
        """Returns the instances that a host lacks, each claimed less than five seconds ago or being claimed.

        The host may have made its list before these claims. None if the host and the view differ in anything else.
        """
        if between == _ALL and digest is not None and (len(uuids), digest) == self._view.digest(host):
            return _NONE
        (first, before), here, listed = between, self._view.of_host(host), set(uuids)
        if between != _ALL:
            here = {uuid: each for uuid, each in here.items() if first <= uuid and (before is None or uuid < before)}
        lacking = here.keys() - listed
        claiming = self._claiming()
        agree = (
            len(here) - len(lacking) == len(listed)
            and all(uuid in claiming or self._just_claimed(uuid) for uuid in lacking)
            and digest in (None, _digest(here, listed))
        )
        return frozenset(lacking) if agree else None

    def _is_mere_claim(self, uuid: str) -> bool:
        """Returns whether no agent has sent a message about the claimed instance."""
        return uuid in self._claimed or (self._last_word(uuid) is None and self._view.get(uuid) is not None)

    def _just_claimed(self, uuid: str) -> bool:
        at = self._claimed.get(uuid)
        return at is not None and at > self._clock.monotonic() - _GRACE

    def _touch(self, uuid: str) -> None:
        for touched in self._readings:
            touched.add(uuid)


def _digest(known: Mapping[str, InstanceRecord], uuids: Collection[str]) -> str:
    """Returns the digest of some of the known instances."""
    return instance_digest((uuid, known[uuid].flavorid) for uuid in uuids)


def _own(record: InstanceRecord) -> InstanceRecord:
    """Replaces texts and mappings of a record by equal ones that records share, to save memory. Returns the record.

    It changes the frozen record itself, because the values are equal, and a new record would take four times as long.
    """
    put, intern, flavorid = object.__setattr__, sys.intern, record.flavorid
    put(record, "host", intern(record.host))
    put(record, "node", intern(record.node))
    put(record, "flavorid", intern(flavorid))
    if record.project_id:
        put(record, "project_id", intern(record.project_id))
    if _resources.get(flavorid) is not record.resources:
        put(record, "resources", _shared(flavorid, record.resources))
    if record.fields is not EMPTY and not record.fields:
        put(record, "fields", EMPTY)
    return record


#: The largest integer that columns of floats hold exactly.
_LARGEST = 2**53
#: The resources of each flavor, as most of its instances have them.
_resources: dict[str, FrozenDict] = {}


def _shared(flavorid: str, resources: Mapping[str, int]) -> Mapping[str, int]:
    known = _resources.get(flavorid)
    if known == resources and known is not None:
        return known
    for name, amount in resources.items():
        if not isinstance(name, str) or type(amount) is not int or not 0 <= amount <= _LARGEST:
            raise TypeError(f"resources has {str(amount)[:40]} units of {name!r}")
    if len(_resources) >= 10_000:
        _resources.clear()
    shared = _resources[flavorid] = frozen_mapping(resources)
    return shared


def record_from_json(data: Any, host: str) -> InstanceRecord:
    """Reads an instance from a message.

    :raises InvalidInput: it has no uuid, or a field has the wrong type.
    """
    try:
        get = data.get
        uuid = data["uuid"]
        if not isinstance(uuid, str) or not uuid:
            raise TypeError(f"its uuid is {uuid!r}")
        flavorid = sys.intern(get("flavorid") or "")
        fields, group = get("fields") or EMPTY, get("server_group") or ""
        if not isinstance(fields, dict) or not isinstance(group, str):
            raise TypeError(f"its fields are {str(fields)[:40]}, its server_group is {str(group)[:40]}")
        return InstanceRecord(
            uuid,
            sys.intern(get("host") or host),
            sys.intern(get("node") or ""),
            flavorid,
            _shared(flavorid, get("resources") or EMPTY),
            sys.intern(get("project_id") or ""),
            fields,
            bool(get("busy")),
            group,
            _holds(get("holds")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise errors.InvalidInput(
            f"A message of host {host} has an instance that cannot be read ({type(error).__name__}: {error}); an instance is an "
            "object with uuid, host, node, flavorid, resources and project_id."
        ) from error


def _holds(data: Any) -> Holds | None:
    """Reads the resources that an instance holds by provider, from a message."""
    if data is None:
        return None
    return {str(uuid): {str(name): int(units) for name, units in taken.items()} for uuid, taken in data.items()}


def record_to_json(record: InstanceRecord) -> dict[str, Any]:
    """Returns an instance as it is written into messages."""
    return {
        "uuid": record.uuid,
        "host": record.host,
        "node": record.node,
        "flavorid": record.flavorid,
        "resources": dict(record.resources),
        "project_id": record.project_id,
        **({"fields": dict(record.fields)} if record.fields else {}),
        **({"server_group": record.server_group} if record.server_group else {}),
        **({"busy": True} if record.busy else {}),
        **({"holds": record.holds} if record.holds else {}),
    }
