# SPDX-License-Identifier: Apache-2.0
"""Instances in the view: loaded once, kept by messages that may be lost, doubled, late or out of order.

Each instance remembers the last (service, epoch, sequence) that spoke of it; what is older is dropped, also after a deletion. A
message without an origin (the seed's bare form) is applied in the order in which it arrives.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage.rpc.interface import Origin
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import InstanceRecord, InstanceSource

__all__ = ["InstanceTracker", "record_from_json", "record_to_json"]

LOG = logging.getLogger(__name__)
#: How many deleted instances are remembered, against messages that come after the deletion.
_TOMBSTONES = 100_000
_PAGE = 5_000


class InstanceTracker:
    """Feeds a view. Safe for use by several threads.

    :param heal: called with a host's name when a comparison found a difference; should have its instances told again.
    """

    def __init__(self, view: FleetView, heal: Callable[[str], None]) -> None:
        self._view = view
        self._heal = heal
        self._lock = threading.Lock()
        self._last: dict[str, Origin] = {}
        self._gone: collections.OrderedDict[str, Origin | None] = collections.OrderedDict()
        self._touched: set[str] | None = set()
        self.hosts_that_spoke: set[str] = set()

    def load(self, source: InstanceSource) -> int:
        """Read all instances, page by page; what a message said meanwhile is not overwritten."""
        after, count = "", 0
        while True:
            page = source.all(after=after, limit=_PAGE)
            with self._lock:
                for record in page:
                    if record.uuid not in (self._touched or ()):
                        self._view.put(record)
            count += len(page)
            if len(page) < _PAGE:
                break
            after = page[-1].uuid
        with self._lock:
            self._touched = None
        return count

    def reload_hosts(self, source: InstanceSource, hosts: Sequence[str]) -> None:
        """Make the view of these hosts equal to the store's, by one query."""
        records = source.by_hosts(hosts)
        with self._lock:
            for host in hosts:
                self._replace(host, [record for record in records if record.host == host], None)

    def update(
        self, host: str, records: Sequence[InstanceRecord], origin: Origin | None, *, replace: bool = False
    ) -> None:
        """Instances are on the host; with ``replace`` these and no others."""
        with self._lock:
            self.hosts_that_spoke.add(host)
            if replace:
                self._replace(host, records, origin)
            else:
                for record in records:
                    self._put(record, origin)

    def claimed(self, record: InstanceRecord) -> None:
        """Another scheduler claimed a node for it. Anything an agent said of it counts more, also that it is gone."""
        with self._lock:
            if record.uuid not in self._gone and self._view.get(record.uuid) is None:
                self._view.put(record)

    def delete(self, host: str, uuid: str, origin: Origin | None) -> None:
        """An instance is not on the host any more; one that another host told of since stays there."""
        with self._lock:
            self.hosts_that_spoke.add(host)
            present = self._view.get(uuid)
            if self._older(uuid, origin) or (present is not None and present.host != host):
                return
            self._drop(uuid, origin)

    def sync(self, host: str, uuids: Sequence[str], digest: str | None, origin: Origin | None) -> bool:
        """Compare with what the host has; a difference is healed by asking. True when they agree."""
        with self._lock:
            self.hosts_that_spoke.add(host)
            known = self._view.of_host(host)
            agree = set(known) == set(uuids)
            if agree and digest is not None:
                agree = digest == instance_digest((each.uuid, each.flavorid) for each in known.values())
        if not agree:
            LOG.info("The view of host %s differs from what the host says; it is asked.", host)
            self._heal(host)
        return agree

    # -- under the lock -------------------------------------------------------------------------------------------

    def _older(self, uuid: str, origin: Origin | None) -> bool:
        last = self._last.get(uuid) or self._gone.get(uuid)
        if origin is None or last is None or last.service != origin.service:
            return False
        return (origin.epoch, origin.sequence) < (last.epoch, last.sequence)

    def _put(self, record: InstanceRecord, origin: Origin | None) -> None:
        if self._older(record.uuid, origin):
            return
        self._gone.pop(record.uuid, None)
        self._mark(record.uuid, origin)
        self._view.put(record)

    def _drop(self, uuid: str, origin: Origin | None) -> None:
        self._view.drop(uuid)
        self._mark(uuid, None)
        self._last.pop(uuid, None)
        self._gone[uuid] = origin
        while len(self._gone) > _TOMBSTONES:
            self._gone.popitem(last=False)

    def _replace(self, host: str, records: Sequence[InstanceRecord], origin: Origin | None) -> None:
        given = {record.uuid for record in records}
        for uuid in set(self._view.of_host(host)) - given:
            if not self._older(uuid, origin):
                self._drop(uuid, origin)
        for record in records:
            self._put(record, origin)

    def _mark(self, uuid: str, origin: Origin | None) -> None:
        if self._touched is not None:
            self._touched.add(uuid)
        if origin is not None:
            self._last[uuid] = origin


def record_from_json(data: Mapping[str, Any], host: str) -> InstanceRecord:
    """An instance as a message has it."""
    return InstanceRecord(
        str(data["uuid"]),
        str(data.get("host") or host),
        str(data.get("node", "")),
        str(data.get("flavorid", "")),
        {str(name): int(amount) for name, amount in (data.get("resources") or {}).items()},
        str(data.get("project_id", "")),
        dict(data.get("fields") or {}),
    )


def record_to_json(record: InstanceRecord) -> dict[str, Any]:
    """An instance as a message has it."""
    return {
        "uuid": record.uuid,
        "host": record.host,
        "node": record.node,
        "flavorid": record.flavorid,
        "resources": dict(record.resources),
        "project_id": record.project_id,
    }
