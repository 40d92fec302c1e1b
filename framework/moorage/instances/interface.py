# SPDX-License-Identifier: Apache-2.0
"""Instances as data, and the store that a service on Moorage implements for them.

The reference is the compute plugin. Transactions (``transaction``) are the store's own, an SQLAlchemy connection: the rows of an
instance, its operation and its claim are written in one.
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
#: Resource type of the operation by which the source of a move lets go of an instance; its resource_id is the instance's uuid.
DEPARTURE = "instance_source"
_MOVES = uuid.UUID("0f3d1a52-6f8b-5f0e-9a3c-6c1f6f1f7a11")


@dataclass(frozen=True)
class Instance:
    """An instance in full. Timestamps are microseconds since the Unix epoch, of the database's clock.

    :param status: building, active, deleting, error, or stopped (it ended on its host and keeps its resources); during the
        operations of :mod:`moorage.instances.action_kinds` theirs, and shelved_offloaded (a plugin may add others). resized: it
        runs with its new flavor, and :mod:`moorage.instances.resizes` can bring it back.
    :param node: name of the node; ``node_uuid`` its uuid. Empty, as ``host``, while it is on none.
    :param fence: the token of the last operation that wrote the row.
    :param request: what was asked for: extra_specs, hints, image, availability_zone, server_group, command.
    :param server_group: uuid (or, for one that a request brought along, name) of its server group; empty for none.
    :param pending: what the operation in progress is to make of it; ``kept``: the place that an unconfirmed resize keeps.
    :param actual_state: what was seen on its host: a state of :class:`moorage.drivers.interface.WorkloadState`, ``gone``, or
        ``unknown`` while nobody has looked. ``actual_at`` says since when, ``actual_detail`` is a sentence about it.
    :param restarts: how often it was started again since it last ran for long.
    :param flavor_version: the version of the flavor that ``resources`` and the extra specs of ``request`` are; 0: the request
        brought them along.
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
    """Reads what a consumer holds: provider uuid -> resource class -> units. One statement."""
    found: dict[str, dict[str, int]] = {}
    for item in store.allocations(consumers=[consumer]):
        found.setdefault(item.provider, {})[item.resource_class] = item.used
    return found


def move_consumer(instance_uuid: str) -> str:
    """The consumer that holds resources on the destination while an instance moves."""
    return str(uuid.uuid5(_MOVES, instance_uuid))


def departed_consumer(instance_uuid: str) -> str:
    """The consumer that holds resources on the source of a move from its end until the source's agent has let go."""
    return str(uuid.uuid5(_MOVES, f"{instance_uuid}/source"))


def claims_after_leaving(
    ledger: AllocationLedger,
    instance: Instance,
    holds: Mapping[str, Mapping[str, int]],
    residents: Mapping[str, int | None],
    *,
    departed: Expect = Expect.NOTHING,
) -> list[AllocationChange]:
    """Returns the changes by which an instance holds ``holds``, and ``departed_consumer`` what the instance held before.

    One read of the ledger. The changes are refused if the instance's claim was changed since.

    :param residents: as in :class:`moorage.allocation.interface.AllocationChange`.
    :param departed: whether the source of an earlier move may hold something, which is given back.
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
    """One of the writes of :meth:`InstanceStore.write_many`.

    :param values: fields as for :meth:`InstanceStore.change`; None: the instance is removed.
    :param context: the request that the event of the write names.
    :param fence: that the row must still have, where fields are changed.
    """

    uuid: str
    token: int
    values: Mapping[str, Any] | None
    context: RequestContext | None
    fence: int | None = None


class InstanceStore(InstanceSource):
    """Reads and writes instances. Built by the loader as ``plugin(conf=..., database=..., clock=...)``."""

    api_version: ClassVar[tuple[int, int]]
    #: The resource type of its worker rows (``instance``).
    resource_type: ClassVar[str] = "instance"

    @abc.abstractmethod
    def insert(self, transaction: Any, instance: Instance) -> Instance:
        """Write a new row and return it with its timestamps; AlreadyExists when the uuid is taken."""

    def insert_many(
        self, transaction: Any, instances: Sequence[Instance], contexts: Sequence[RequestContext | None]
    ) -> Sequence[Instance]:
        """Write new rows as :meth:`insert` does.

        :param contexts: the request of each instance; its event names that request.
        """
        found = []
        for each, context in zip(instances, contexts, strict=True):
            with acting_for(context):
                found.append(self.insert(transaction, each))
        return found

    @abc.abstractmethod
    def get(self, uuid: str) -> Instance:
        """One instance; NotFound when there is none."""

    def find(self, uuids: Sequence[str], transaction: Any = None) -> Sequence[Instance]:
        """Those of several instances that exist, in any order.

        :param transaction: an open one of this store to read in; None: one of its own.
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
        """Instances ordered by uuid, a page of ``limit`` after the given uuid."""

    def group_members(
        self, group: str, transaction: Any = None, *, project_id: str | None = None
    ) -> Sequence[tuple[str, str]]:
        """(uuid, uuid of the node) of the instances that are in a server group and occupy a node; one that moves is on both.

        A store that does not keep server groups knows of none, and policies of groups are then not checked with the claim.

        :param transaction: an open one of this store to read in; None: one of its own.
        :param project_id: those of a project only; groups that requests bring along may have one name in several.
        """
        return ()

    def on_node(self, node_uuid: str, transaction: Any) -> Sequence[InstanceRecord]:
        """The instances that occupy a node or are moving to it, read in an open transaction.

        An instance that leaves the node has its old flavor here, one that moves in has its new flavor. An instance that is
        resized on its own node stands here twice; the second record has the uuid :func:`move_consumer`.

        The claim asks filters that judge instances again with this answer. A store that does not keep it up to date breaks
        their promises when requests are concurrent.
        """
        return ()

    def occupies(self, node_uuid: Any) -> Any | None:
        """Returns a condition (SQLAlchemy): an instance occupies the node of the column ``node_uuid``, or moves to that node.

        Statements that may write only free nodes carry it. None: the store cannot tell, so every node counts as occupied.
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
        """Set the status with the fence: only where ``fence <= token`` (and the status is one of ``expected``, when given).

        The condition is in the statement; False when the row was not written.
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
        """Set fields of an instance with the fence, as :meth:`set_status` does; names are those of :class:`Instance`.

        :param fence: the row must still have this one: nothing was written since it was read.
        """

    @abc.abstractmethod
    def remove(self, transaction: Any, uuid: str, token: int) -> bool:
        """Delete the row where ``fence <= token``; False when it was not."""

    def write_many(self, transaction: Any, writes: Sequence[InstanceWrite]) -> bool:
        """Change and remove several different instances, as :meth:`change` and :meth:`remove` do each of them.

        False when at least one was not written: the transaction must then be rolled back.
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
    """A further power of instance stores: instances change their host together with their node."""

    @abc.abstractmethod
    def reassign(self, transaction: Any, hosts: Mapping[str, str], host: str) -> int:
        """Give instances to another host: those of ``hosts`` (uuid -> host) that still are of that host, and in no operation.

        The condition is in the statement; answers how many were written.
        """

    def kept_on(self, transaction: Any, node_uuids: Collection[str]) -> Sequence[str]:
        """The uuids of the instances whose unconfirmed resize keeps a place on some nodes, whatever is in progress on them.

        A store that keeps no places has none.
        """
        return ()


#: Chosen by ``[control_plane] instance_store``.
INSTANCE_STORES: ExtensionPoint[InstanceStore] = ExtensionPoint(
    "moorage.instance_stores",
    InstanceStore,
    API_VERSION,
    "[control_plane] instance_store",
)
