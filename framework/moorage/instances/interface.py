# SPDX-License-Identifier: Apache-2.0
"""Defines instances as data, and the interface of the store that a service on Moorage implements for them.

The compute plugin is the reference. A ``transaction`` is an SQLAlchemy connection of the store: one transaction writes the rows of
an instance, its operation and its claim.
"""

from __future__ import annotations

import abc
import contextlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from oslo_context.context import RequestContext

from moorage import errors
from moorage.allocation.interface import AllocationChange, AllocationLedger, AllocationStore, ConsumerHolding, Expect
from moorage.context import acting_for
from moorage.extensions import ExtensionPoint
from moorage.read_only import fields_of
from moorage.scheduling.interface import InstanceRecord, InstanceSource
from moorage.scheduling.reporter import FlavorOf

__all__ = [
    "API_VERSION",
    "DEPARTURE",
    "INSTANCE_STORES",
    "Instance",
    "InstanceStore",
    "InstanceWrite",
    "Reassignable",
    "claims_after_leaving",
    "departed_consumer",
    "holds_of",
    "move_consumer",
]

API_VERSION = (1, 0)
#: The resource type of the operation in which the source host of a move removes an instance. Its resource_id is the instance's
#: uuid.
DEPARTURE = "instance_source"
_MOVES = uuid.UUID("0f3d1a52-6f8b-5f0e-9a3c-6c1f6f1f7a11")


@dataclass(frozen=True)
class Instance:
    """Holds all fields of an instance. Timestamps are microseconds since the Unix epoch, by the database's clock.

    :param status: building, active, deleting, error, stopped (it ended on its host and keeps its resources), or shelved_offloaded.
        Each operation of :mod:`moorage.instances.action_kinds` has its own status, and plugins may add others. resized: it runs
        with its new flavor, and :mod:`moorage.instances.resizes` can undo that.
    :param node: the name of the node; ``node_uuid`` its uuid. Empty, like ``host``, while it is on no node.
    :param fence: the token of the last operation that wrote the row.
    :param request: the rest of the request: extra_specs, hints, image, availability_zone, server_group, command.
    :param server_group: the uuid of its server group, or the name if the request defined the group; empty: none.
    :param pending: what the operation in progress will change. ``kept``: the node that an unconfirmed resize holds.
    :param actual_state: the state on its host: a :class:`moorage.drivers.interface.WorkloadState`, ``gone``, or ``unknown`` before
        the agent's first look. ``actual_at`` says since when, ``actual_detail`` is a sentence about it.
    :param restarts: how often it was started again since it last ran for long.
    :param flavor_version: the version of the flavor that ``resources`` and the extra specs of ``request`` come from; 0: they come
        from the request.
    """

    uuid: str
    name: str
    status: str
    host: str
    node: str
    node_uuid: str
    flavorid: str
    resources: Mapping[str, int]
    project_id: str = ""
    user_id: str = ""
    fault: str = ""
    fence: int = 0
    created_at: int = 0
    updated_at: int = 0
    request: Mapping[str, Any] = field(default_factory=dict)
    server_group: str = ""
    pending: Mapping[str, Any] = field(default_factory=dict)
    actual_state: str = "unknown"
    actual_detail: str = ""
    actual_at: int = 0
    restarts: int = 0
    flavor_version: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the instance as JSON data, which shares its values; ``dataclasses.asdict`` would copy them all."""
        return fields_of(self)


def holds_of(store: AllocationStore, consumer: str) -> dict[str, dict[str, int]]:
    """Reads the allocations of a consumer, in units by provider uuid and resource class. One statement."""
    found: dict[str, dict[str, int]] = {}
    for item in store.allocations(consumers=[consumer]):
        found.setdefault(item.provider, {})[item.resource_class] = item.used
    return found


def move_consumer(instance_uuid: str) -> str:
    """Returns the consumer that holds resources on the destination while an instance moves."""
    return str(uuid.uuid5(_MOVES, instance_uuid))


def departed_consumer(instance_uuid: str) -> str:
    """Returns the consumer that holds resources on the source after a move, until the source's agent has removed the instance."""
    return str(uuid.uuid5(_MOVES, f"{instance_uuid}/source"))


def claims_after_leaving(
    ledger: AllocationLedger,
    instance: Instance,
    holds: Mapping[str, Mapping[str, int]],
    residents: Mapping[str, int | None],
    *,
    departed: Expect = Expect.NOTHING,
) -> list[AllocationChange]:
    """Returns the changes after which an instance holds ``holds``, and ``departed_consumer`` what the instance held before.

    Reads the ledger once. The changes are refused if the instance's claim has changed since.

    :param residents: as in :class:`moorage.allocation.interface.AllocationChange`.
    :param departed: what ``departed_consumer`` may hold of an earlier move; it is released.
    """
    project, user = instance.project_id, instance.user_id
    source = ledger.consumer(instance.uuid)
    # A client of Placement may have deleted the consumer. The first change creates it again, with its owner and type.
    expected = Expect.ANYTHING if source is None else source.consumer.generation
    changes = [
        AllocationChange(instance.uuid, holds, expected, project, user, consumer_type="INSTANCE", residents=residents)
    ]
    if source is not None:
        kept, consumer = _resources(source), departed_consumer(instance.uuid)
        changes.append(
            AllocationChange(
                consumer, kept, departed, project, user, consumer_type="MIGRATION_SOURCE", counts_with=instance.uuid
            )
        )
    return changes


def _resources(holding: ConsumerHolding) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for item in holding.allocations:
        found.setdefault(item.provider, {})[item.resource_class] = item.used
    return found


@dataclass(frozen=True, slots=True)
class InstanceWrite:
    """One write of :meth:`InstanceStore.write_many`.

    :param values: fields as for :meth:`InstanceStore.change`; None: the instance is removed.
    :param context: the request context for the event of the write.
    :param fence: the fence that the row must still have, for changes.
    """

    uuid: str
    token: int
    values: Mapping[str, Any] | None
    context: RequestContext | None
    fence: int | None = None


class InstanceStore(InstanceSource):
    """Reads and writes instances. Built by the loader as ``plugin(conf=..., database=..., clock=...)``."""

    api_version: ClassVar[tuple[int, int]]
    #: The resource type of operations on its instances (``instance``).
    resource_type: ClassVar[str] = "instance"

    def flavors_on(self, host: str) -> Sequence[FlavorOf]:
        """Returns the uuid and the flavor of each instance on a host, as :meth:`by_hosts` has them.

        A store may read less for it. An agent asks for this at each comparison with the schedulers.
        """
        return self.by_hosts([host])

    @abc.abstractmethod
    def insert(self, transaction: Any, instance: Instance) -> Instance:
        """Inserts an instance. Returns it with its timestamps.

        :raises AlreadyExists: the uuid is in use.
        """

    def insert_many(
        self, transaction: Any, instances: Sequence[Instance], contexts: Sequence[RequestContext | None]
    ) -> Sequence[Instance]:
        """Inserts instances, as :meth:`insert` inserts each.

        :param contexts: the request context of each instance, for its event.
        """
        found = []
        for each, context in zip(instances, contexts, strict=True):
            with acting_for(context):
                found.append(self.insert(transaction, each))
        return found

    @abc.abstractmethod
    def get(self, uuid: str) -> Instance:
        """Returns an instance.

        :raises NotFound: there is none with the uuid.
        """

    def find(self, uuids: Sequence[str], transaction: Any = None) -> Sequence[Instance]:
        """Returns the instances that exist, in any order.

        :param transaction: an open transaction of this store, to read in it; None: the store opens one.
        """
        found = []
        for each in uuids:
            with contextlib.suppress(errors.NotFound):
                found.append(self.get(each))
        return found

    @abc.abstractmethod
    def list(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        host: str | None = None,
        status: str | None = None,
        project_id: str | None = None,
    ) -> Sequence[Instance]:
        """Returns instances ordered by uuid: at most ``limit`` of them after the uuid ``after``."""

    def group_members(
        self, group: str, transaction: Any = None, *, project_id: str | None = None
    ) -> Sequence[tuple[str, str]]:
        """Returns (uuid, uuid of the node) of the instances of a server group that are on a node. A moving one is on two nodes.

        A store without server groups returns none; claims then do not check the policies of groups.

        :param transaction: an open transaction of this store, to read in it; None: the store opens one.
        :param project_id: only instances of this project: groups that requests define may have one name in several projects.
        """
        return ()

    def on_node(self, node_uuid: str, transaction: Any) -> Sequence[InstanceRecord]:
        """Reads the instances that are on a node or move to it, in an open transaction.

        An instance that leaves the node has its old flavor, one that moves to it has its new flavor. An instance that is resized
        on its node occurs twice; the second record has the uuid :func:`move_consumer`.

        A claim calls the filters that judge instances again, with this answer. If a store does not keep it up to date, concurrent
        requests can break the rules of these filters.
        """
        return ()

    def occupies(self, node_uuid: Any) -> Any | None:
        """Returns a condition (SQLAlchemy): an instance is on the node of the column ``node_uuid``, or moves to that node.

        Statements that may write only free nodes contain its negation. None: the store has no such condition, so every node counts
        as occupied.
        """
        return None

    @abc.abstractmethod
    def set_status(
        self,
        transaction: Any,
        uuid: str,
        status: str,
        token: int,
        *,
        fault: str = "",
        expected: Sequence[str] = (),
    ) -> bool:
        """Sets the status and the fence, if ``fence <= token``, and if the status is one of ``expected`` (when given).

        The condition is in the statement. Returns whether the row was written.
        """

    @abc.abstractmethod
    def change(
        self,
        transaction: Any,
        uuid: str,
        token: int,
        values: Mapping[str, Any],
        *,
        expected: Sequence[str] = (),
        fence: int | None = None,
    ) -> bool:
        """Sets fields of an instance and the fence, on the conditions of :meth:`set_status`.

        :param values: by the names of :class:`Instance`.
        :param fence: the row must still have this fence, so nothing was written since it was read.
        """

    @abc.abstractmethod
    def remove(self, transaction: Any, uuid: str, token: int) -> bool:
        """Deletes the row if ``fence <= token``. Returns whether it was deleted."""

    def write_many(self, transaction: Any, writes: Sequence[InstanceWrite]) -> bool:
        """Changes and removes different instances, as :meth:`change` and :meth:`remove` write each of them.

        Returns whether all were written. Otherwise the transaction must be rolled back.
        """
        for each in writes:
            with acting_for(each.context):
                if each.values is None:
                    written = self.remove(transaction, each.uuid, each.token)
                else:
                    written = self.change(transaction, each.uuid, each.token, each.values, fence=each.fence)
            if not written:
                return False
        return True


class Reassignable(abc.ABC):
    """A power of instance stores: gives instances another host when their node gets another agent."""

    @abc.abstractmethod
    def reassign(self, transaction: Any, hosts: Mapping[str, str], host: str) -> int:
        """Gives instances another host, if they still have the host in ``hosts`` and no operation on them is in progress.

        The condition is in the statement. Returns how many were written.

        :param hosts: the present host by the instance's uuid.
        """

    def kept_on(self, transaction: Any, node_uuids: Collection[str]) -> Sequence[str]:
        """Returns the uuids of instances whose unconfirmed resize holds resources on some nodes, also during operations.

        A store without unconfirmed resizes returns none.
        """
        return ()


#: Chosen by ``[control_plane] instance_store``.
INSTANCE_STORES: ExtensionPoint[InstanceStore] = ExtensionPoint(
    "moorage.instance_stores",
    InstanceStore,
    API_VERSION,
    "[control_plane] instance_store",
)
