# SPDX-License-Identifier: Apache-2.0
"""Decides which dead services are cleaned up, and requests the cleanup: for operators, or automatically after several samples.

Runs in every scheduler. Nothing is agreed between them: the row of a request is unique, so that all of them make one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.cleanup.requests import CleanupRequest, RequestStore
from moorage.cleanup.views import Forecast, OperationViews
from moorage.services.interface import Service
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.work.interface import Phase

__all__ = ["CleanupFilter", "CleanupCoordinator"]

LOG = logging.getLogger(__name__)
#: The services that work on resources.
BINARY = "agent"


@dataclass(frozen=True, slots=True)
class CleanupFilter:
    """What a person asks for; None and empty: all. Without any, every dead service.

    :param service: uuid, or number, of a service.
    :param host: exactly, or all of what is before an ``@``.
    :param is_up: True: what earlier incarnations of living services left.
    """

    service: str | None = None
    cluster: str | None = None
    host: str | None = None
    binary: str | None = None
    is_up: bool = False
    disabled: bool | None = None
    resource_type: str | None = None
    resource_id: str | None = None

    def match(self, row: Service) -> bool:
        """Returns whether the service is meant, but for ``is_up``."""
        wanted = (
            (self.service, self.service in (row.uuid, str(row.id))),
            (self.cluster, self.cluster == row.cluster or self.cluster == (row.cluster or "").partition("@")[0]),
            (self.host, self.host in (row.host, row.host.partition("@")[0])),
            (self.binary, self.binary == row.binary),
            (self.disabled, self.disabled == bool(row.disabled)),
        )
        return all(fits for given, fits in wanted if given is not None)


@dataclass(slots=True)
class _Sample:
    epoch: int
    beat: int
    count: int = 0


@dataclass(slots=True)
class _Answer:
    cleaning: list[dict[str, Any]] = field(default_factory=list)
    unavailable: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)


class CleanupCoordinator:
    """One in each scheduler. Safe for use by several threads.

    :param tell: has one service look for requests: ``tell(host, request uuid)``; may be lost.
    :param announce: tells the other schedulers of a request: ``announce(service uuid, epoch)``; may be lost.
    :param checks: ``[cleanup] auto_cleanup_checks``, read again each time; so is ``automatic``.
    :param predict: has a service say what it would do: ``predict(host, service, dead, filters)``; by the rows alone unless said.
    :param requested: called after a request was made, or opened again.
    :param changed: called by :meth:`sample` with a service and whether it is up, when that is another than the time before.
    """

    def __init__(
        self,
        registry: ServiceRegistry,
        observer: LivenessObserver,
        requests: RequestStore,
        views: OperationViews,
        *,
        tell: Callable[[str, str], None],
        announce: Callable[[str, int], None],
        checks: Callable[[], int],
        automatic: Callable[[], bool],
        predict: Callable[[str, Service, bool, CleanupFilter], Forecast] | None = None,
        requested: Callable[[Service, CleanupRequest], None] = lambda service, request: None,
        changed: Callable[[Service, bool], None] = lambda service, up: None,
    ) -> None:
        self._registry = registry
        self._observer = observer
        self._requests = requests
        self._views = views
        self._tell = tell
        self._announce = announce
        self._checks = checks
        self._automatic = automatic
        self._foresee = predict or self._by_rows
        self._requested = requested
        self._changed = changed
        self._lock = threads.lock()
        self._was_up: dict[str, bool] = {}
        self._samples: dict[str, _Sample] = {}

    # -- on request -----------------------------------------------------------------------------------------------

    def request(self, filters: CleanupFilter, requested_by: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Have those cleaned after that the filters name.

        :returns: ``cleaning`` and ``unavailable`` (no service of their cluster can do it now) with a service in each item,
            ``requests``; with ``dry_run`` nothing is written, ``would_clean`` lists rows with what would become of each, up to
            some of each service, and ``left_out`` is how many more there are.
        :raises Unavailable: services of different versions are running.
        :raises InvalidInput: the named resource has no operation in progress.
        """
        rows, up = self._look()
        self._refuse_upgrade(rows, up)
        filters = self._of_resource(filters)
        left, _ = self._requests.left()
        chosen = [row for row in rows if _relevant(row, left) and filters.match(row) and up[row.uuid] == filters.is_up]
        return self._all(chosen, rows, up, filters, requested_by, kind="manual", dry_run=dry_run)

    def _of_resource(self, filters: CleanupFilter) -> CleanupFilter:
        """A resource alone names its service, as its row knows it."""
        if not filters.resource_id or filters.service or filters.cluster or filters.host:
            return filters
        found = self._views.find(filters.resource_id, filters.resource_type)
        if not found:
            raise errors.InvalidInput(
                f"There is no resource with UUID {filters.resource_id} pending cleanup.", path="resource_id"
            )
        owners = {row.worker for row in found}
        if len(owners) > 1:
            raise errors.InvalidInput(
                f"There are multiple resources with UUID {filters.resource_id} pending cleanup; give resource_type.",
                path="resource_id",
            )
        owner = owners.pop()
        if owner is None:
            raise errors.InvalidInput(
                f"No service has begun the operation on {filters.resource_id}; it is cleaned by itself after "
                "[cleanup] unclaimed_timeout.",
                path="resource_id",
            )
        return replace(filters, service=owner)

    # -- automatically --------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Look once, every ``service_down_time`` seconds; request what is due where that is enabled."""
        rows, up = self._look()
        with self._lock:
            for row in rows:
                self._count(row, up[row.uuid])
            for gone in self._samples.keys() - {row.uuid for row in rows}:
                del self._samples[gone]
            # Of a service that is seen for the first time nothing has changed.
            changed = [row for row in rows if self._was_up.get(row.uuid, up[row.uuid]) != up[row.uuid]]
            self._was_up = {row.uuid: up[row.uuid] for row in rows}
        for row in changed:
            self._changed(row, up[row.uuid])
        if self._automatic():
            try:
                self.automatic("automatic")
            except errors.Unavailable as error:
                LOG.warning("Nothing is cleaned automatically now: %s", error.message)

    def automatic(self, requested_by: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Have all cleaned after that stayed dead for as many samples as are asked for; answers as :meth:`request` does."""
        rows, up = self._look()
        self._refuse_upgrade(rows, up)
        with self._lock:
            counts = {uuid: sample.count for uuid, sample in self._samples.items()}
        left, queues = self._requests.left()
        checks = self._checks()
        # A service that left only rows in quarantine gets no further request.
        due = [
            row
            for row in rows
            if not up[row.uuid]
            and counts.get(row.uuid, 0) >= checks
            and (
                left.get(row.uuid, frozenset()) - {Phase.QUARANTINED.value}
                or (row.binary == BINARY and row.host in queues)
            )
        ]
        return self._all(due, rows, up, CleanupFilter(), requested_by, kind="automatic", dry_run=dry_run)

    def heard(self, service: str, epoch: int) -> None:
        """Another scheduler has requested it: begin to count again."""
        with self._lock:
            self._samples.pop(service, None)
        LOG.info("Another scheduler has service %s (before epoch %d) cleaned after.", service, epoch)

    def _count(self, row: Service, is_up: bool) -> None:
        sample = self._samples.get(row.uuid)
        if sample is None or sample.beat != row.beat or is_up:
            sample = self._samples[row.uuid] = _Sample(row.epoch, row.beat)
        if not is_up:
            sample.count += 1

    # -- both -----------------------------------------------------------------------------------------------------

    def _look(self) -> tuple[Sequence[Service], Mapping[str, bool]]:
        """Returns all services, and which are up. A service that was declared dead is down until it starts again."""
        rows = self._registry.list()
        up, declared = self._observer.observe(rows), self._requests.declared()
        return rows, {row.uuid: up[row.uuid] and (row.uuid, row.epoch) not in declared for row in rows}

    def _refuse_upgrade(self, rows: Sequence[Service], up: Mapping[str, bool]) -> None:
        running: dict[str, list[str]] = {}
        for row in rows:
            if up[row.uuid]:
                running.setdefault(row.rpc_version, []).append(f"{row.binary} {row.host}")
        if len(running) > 1:
            listed = "; ".join(f"{version}: {', '.join(sorted(names))}" for version, names in sorted(running.items()))
            raise errors.Unavailable(
                f"Services of different versions are running, so an upgrade is going on ({listed}). Cleanup can be requested when "
                "it is over; a service that starts cleans what it left itself, now too.",
                retry_after=60,
            )

    def _all(
        self,
        chosen: Sequence[Service],
        rows: Sequence[Service],
        up: Mapping[str, bool],
        filters: CleanupFilter,
        requested_by: str,
        *,
        kind: str,
        dry_run: bool,
    ) -> dict[str, Any]:
        answer = _Answer()
        would: list[Mapping[str, Any]] = []
        left_out = 0
        for row in chosen:
            able = _able(row, rows, up)
            if not able:
                answer.unavailable.append(_shown(row, up))
                continue
            if dry_run:
                answer.cleaning.append(_shown(row, up))
                forecast = self._foresee(able[0].host, row, not up[row.uuid], filters)
                would += forecast.rows
                left_out += forecast.left_out
                continue
            request = self._requests.open(
                row,
                evict=not up[row.uuid],
                kind=kind,
                requested_by=requested_by,
                resource_type=filters.resource_type or "",
                resource_id=filters.resource_id or "",
            )
            if request is None:
                LOG.info("%s %s has come back; nothing is cleaned after it.", row.binary, row.host)
                continue
            answer.cleaning.append(_shown(row, up))
            answer.requests.append(_request(request))
            self._requested(row, request)
            self._tell(able[0].host, request.uuid)
            self._announce(row.uuid, request.epoch)
        found: dict[str, Any] = asdict(answer)
        return {**found, "would_clean": would, "left_out": left_out} if dry_run else found

    def _by_rows(self, host: str, row: Service, dead: bool, filters: CleanupFilter) -> Forecast:
        return self._views.would_clean(row, dead, filters.resource_type, filters.resource_id)


def _able(row: Service, rows: Sequence[Service], up: Mapping[str, bool]) -> list[Service]:
    """Who can clean after it, now: itself when it lives, and living members of its cluster."""
    if up[row.uuid]:
        return [row]
    return [
        other
        for other in rows
        if up[other.uuid]
        and other.uuid != row.uuid
        and other.binary == row.binary
        and row.cluster is not None
        and other.cluster == row.cluster
    ]


def _relevant(row: Service, left: Mapping[str, object]) -> bool:
    return row.binary == BINARY or row.uuid in left


def _shown(row: Service, up: Mapping[str, bool]) -> dict[str, Any]:
    return {
        "id": row.id,
        "uuid": row.uuid,
        "host": row.host,
        "binary": row.binary,
        "cluster": row.cluster,
        "state": "up" if up[row.uuid] else "down",
        "disabled": bool(row.disabled),
    }


def _request(request: CleanupRequest) -> dict[str, Any]:
    return {"uuid": request.uuid, "service": request.service, "epoch": request.epoch}
