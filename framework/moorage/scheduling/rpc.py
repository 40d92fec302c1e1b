# SPDX-License-Identifier: Apache-2.0
"""What a scheduler answers to: questions of the API, and what agents tell of their instances."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from oslo_context import context as oslo_context

from moorage import context as request_context
from moorage import errors, threads
from moorage.context import acting_for
from moorage.read_only import EMPTY, FrozenDict, frozen, replaced
from moorage.rpc import wire
from moorage.rpc.server import incoming, rpc_method
from moorage.scheduling.host_pages import host_page, one_host
from moorage.scheduling.instance_tracker import InstanceTracker, record_from_json
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.placement import Placement, Selection
from moorage.scheduling.request import property_types, spec_from_json
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.shared_placements import SharedPlacements

__all__ = ["SchedulerEndpoint"]

#: The adapter of oslo.log would take a fifth of the time of a line, and each request has one.
LOG = logging.getLogger(__name__)
#: Seconds that a question waits for a scheduler that has just started.
_PATIENCE = 30.0


class SchedulerEndpoint:
    """Served on the topic ``scheduler``.

    :param placements: places the instances of creates with the scheduler.
    :param enabled: ``[scheduling] track_instance_changes``; messages on instances are ignored without it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tracker: InstanceTracker,
        placements: SharedPlacements,
        *,
        enabled: bool = True,
    ) -> None:
        self._ready = threads.event()
        self._scheduler = scheduler
        self._tracker = tracker
        self._placements = placements
        self._enabled = enabled
        self._reader = _SpecReader()

    def open(self) -> None:
        """Starts to answer requests, which need a loaded fleet. Messages about instances are handled before that, too."""
        self._ready.set()

    @rpc_method
    def create_instance(self, request: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """Place an instance. Repeating it with the same uuid and request_id finds the earlier claim.

        Returns the instance as it was written (``instance``), unless the claim is an earlier one. ``host`` and ``node`` are empty
        where the instance of the earlier claim is in error or shelved.
        """
        selection = self._placements.place(self._placements.prepare(self._spec(request), request_id))
        _log_placed([selection])
        return _placed(selection)

    @rpc_method
    def create_each(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Place the instances of several requests, each as :meth:`create_instance` does.

        :param requests: of different instances: ``request``, ``request_id`` and ``context``, the request context of each.
        :returns: of each a reply as :mod:`moorage.rpc.wire` has it; None: nothing was done, it has to be asked for by itself.
        """
        uuids = [each["request"].get("uuid") for each in requests]
        if len(set(uuids)) < len(uuids):
            raise errors.InvalidInput("Two of the requests are for the same instance; send one after the other.")
        self._await_fleet()
        works: list[Placement] = []
        replies: list[dict[str, Any] | None] = []
        for each in requests:
            with acting_for(request_context.from_dict(each["context"])):
                try:
                    works.append(self._placements.prepare(self._reader.spec(each["request"]), each["request_id"]))
                    replies.append(None)
                except Exception as error:  # noqa: BLE001  (the others are placed nevertheless)
                    replies.append(wire.error_reply(error, "create_instance"))
        found = iter(zip(works, self._placements.place_each(works), strict=True))
        return [self._reply(*next(found)) if reply is None else reply for reply in replies]

    def _reply(self, work: Placement, outcome: Selection | Exception | None) -> dict[str, Any] | None:
        """Returns the reply to one of several requests, and logs it in the context of that request."""
        if outcome is None:
            return None
        with acting_for(work.context):
            if isinstance(outcome, Exception):
                return wire.error_reply(outcome, "create_instance")
            _log_placed([outcome])
            return {"result": _placed(outcome)}

    @rpc_method
    def create_instances(
        self, request: Mapping[str, Any], uuids: Sequence[str], request_id: str
    ) -> list[dict[str, Any]]:
        """Place several instances alike, all or none; repeating it with the same uuids and request_id finds the earlier claims.

        Returns the instances as they were written, each empty if its claim is an earlier one.
        """
        selections = self._placements.place_many(self._spec(request), uuids, request_id)
        _log_placed(selections)
        return [dict(selection.shown) for selection in selections]

    @rpc_method
    def select(self, request: Mapping[str, Any], count: int, explain: bool = False) -> dict[str, Any]:
        """Returns where instances would be placed, and claims nothing."""
        return self._scheduler.select(self._spec(request), count, explain=explain)

    @rpc_method
    def decision(self, request_id: str, node: str | None = None) -> dict[str, Any]:
        """Returns the decision on a request. With ``node``, adds what each filter says of that node now."""
        return self._scheduler.decision(request_id, node)

    @rpc_method
    def list_hosts(
        self,
        after: str = "",
        limit: int | None = None,
        filters: Mapping[str, Any] | None = None,
        fields: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Returns nodes as this scheduler sees them, ordered by uuid: a page of ``limit`` after the given uuid.

        See :func:`moorage.scheduling.host_pages.host_page`.
        """
        self._await_fleet()
        return host_page(self._scheduler.view.snapshot(), after, limit, filters or {}, fields)

    @rpc_method
    def show_host(self, host: str, after: str = "", limit: int | None = None) -> dict[str, Any]:
        """Returns a page of a host's nodes with their instances. See :func:`moorage.scheduling.host_pages.one_host`."""
        self._await_fleet()
        return one_host(self._scheduler.view.snapshot(), host, after, limit)

    @rpc_method
    def fleet_changed(self) -> None:
        """Schedules a refresh of the fleet, because nodes or services have changed."""
        self._scheduler.changed()

    @rpc_method
    def states_changed(self) -> None:
        """Refreshes the states of agents and nodes, because an agent or a node was disabled, enabled or forced down."""
        self._scheduler.observe()

    # -- the seed's three -----------------------------------------------------------------------------------------

    @rpc_method
    def update_instance_info(self, host_name: str, instance_or_list: Any, replace: bool = False) -> None:
        """Updates instances that an agent has created or changed. With ``replace``, removes all others of its host."""
        if not self._enabled:
            return
        data: Sequence[Any] = instance_or_list if isinstance(instance_or_list, list) else [instance_or_list]
        records = [record_from_json(each, host_name) for each in data]
        self._tracker.update(host_name, records, _origin(), replace=replace)

    @rpc_method
    def delete_instance_info(self, host_name: str, instance_uuid: Any) -> None:
        """Removes one instance, or a list of instances, that a host no longer has."""
        if self._enabled:
            self._tracker.delete(host_name, instance_uuid, _origin())

    @rpc_method
    def sync_instance_info(
        self,
        host_name: str,
        instance_uuids: Sequence[str],
        digest: str | None = None,
        between: Sequence[str | None] = ("", None),
    ) -> None:
        """Compares the scheduler's instances of a host with those that its agent reports.

        :param between: the list has all instances from the first uuid on and before the second one; None: up to the last one.
        """
        if self._enabled:
            first, before = between
            self._tracker.sync(host_name, instance_uuids, digest, _origin(), (first or "", before))

    @rpc_method
    def claimed_instances(self, instances: Sequence[Any]) -> None:
        """Adds instances for which another scheduler has claimed nodes. Their agents report them in full after the build."""
        if self._enabled:
            self._tracker.claimed([record_from_json(each, "") for each in instances])

    def _await_fleet(self) -> None:
        if not self._ready.wait(_PATIENCE):
            raise errors.Unavailable("This scheduler is still reading the fleet; try again.")

    def _spec(self, request: Mapping[str, Any]) -> RequestSpec:
        self._await_fleet()
        return self._reader.spec(request)


class _SpecReader:
    """Parses requests. Safe for use by several threads.

    A request that differs from the request before it only in uuid and name reuses what was parsed of that request.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, RequestSpec] | None = None

    def spec(self, request: Mapping[str, Any]) -> RequestSpec:
        """Parses a request. Its caller is the caller of the thread's request context."""
        context = oslo_context.get_current()
        who = ("", "", True)
        if context is not None:
            who = context.project_id or "", context.user_id or "", bool(context.system_scope)
        shared = dict(request)
        uuid, name = shared.pop("uuid", None), shared.pop("name", "")
        asked = who, shared, property_types(shared.get("image") or EMPTY)
        # One look at what is known: another thread may replace it at any time.
        known = self._known
        if uuid and known is not None and known[0] == asked:
            properties = FrozenDict({**known[1].properties, "name": frozen(name)})
            return replaced(known[1], instance_uuid=str(uuid), properties=properties)
        project_id, user_id, all_projects = who
        spec = spec_from_json(request, project_id, user_id, all_projects=all_projects)
        self._known = asked, spec
        return spec


def _placed(selection: Selection) -> dict[str, Any]:
    record = selection.record
    return {
        "uuid": record.uuid,
        "host": record.host,
        "node": record.node,
        "attempts": selection.attempts,
        "alternates": [{"host": host, "node": node} for host, node in selection.alternates],
        "instance": dict(selection.shown),
    }


def _log_placed(selections: Sequence[Selection]) -> None:
    """Logs where instances were placed, in the name of their request."""
    for selection in selections:
        record = selection.record
        if record.host:
            LOG.info("Instance %s was placed on host %s, node %s.", record.uuid, record.host, record.node)
        else:
            LOG.info("Instance %s exists and is on no host; its create was repeated.", record.uuid)


def _origin() -> Any:
    message = incoming()
    return message.origin if message is not None else None
