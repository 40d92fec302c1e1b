# SPDX-License-Identifier: Apache-2.0
"""Describes requests to the scheduler, and the instances that are on nodes already."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moorage.read_only import EMPTY, FrozenDict, freeze_fields, frozen_mapping

__all__ = ["Holds", "Propose", "Flavor", "ServerGroup", "RequestSpec", "InstanceRecord", "Residents", "InstanceSource"]

#: The amounts of a claim: provider uuid -> resource class -> units.
Holds = Mapping[str, Mapping[str, int]]
#: Chooses providers of a node for a claim. Takes the pairs (provider uuid, resource class) that have refused the request so far;
#: returns amounts from other providers of the node, or None if there are no others.
Propose = Callable[[frozenset[tuple[str, str]]], Holds | None]


@dataclass(frozen=True, slots=True)
class Flavor:
    """A named size. ``flavorid`` is stable; two flavors are the same when their flavorid is, whatever their versions are.

    :param resources: resource class -> units: VCPU, MEMORY_MB, DISK_GB, PGPU and custom classes. They are the sums of all request
        groups of the extra specs (:mod:`moorage.scheduling.resource_request`).
    :param version: the version of the catalogue that has these contents; 0: the request brought them along.
    """

    flavorid: str
    resources: Mapping[str, int]
    extra_specs: Mapping[str, str] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        freeze_fields(self, "resources", "extra_specs")


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Names instances that shall be on the same node, or on different nodes.

    :param policy: ``affinity``, ``anti-affinity``, ``soft-affinity`` or ``soft-anti-affinity``.
    :param max_server_per_host: how many of them one node may have under ``anti-affinity``.
    :param members: uuids of the known members, without the instance of the request; the scheduler adds the members that its view
        has under the name of the group.
    :param nodes: uuids of the nodes on which members are; filled in from the view when the request is decided.
    :param left: uuid of the node that the instance is evacuated from: members there do not count. Empty: all count.
    """

    name: str
    policy: str
    max_server_per_host: int = 1
    members: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    left: str = ""


@dataclass(frozen=True)
class RequestSpec:
    """Asks the scheduler for a node for one instance, or for several alike.

    :param hints: scheduler hints, name -> list of strings (``same_host``, ``different_host``, ...).
    :param image: what is known of the image: ``id``, ``properties`` and what else the requester said.
    :param rebuild: the instance stays where it is (that node is the only candidate) and gets another image: only filters with
        ``RUN_ON_REBUILD`` are asked.
    :param ignore_nodes: uuids or names of nodes where it shall not go.
    :param limits: what the filters promised of the node that is being claimed (:meth:`HostFilter.limits`); filled in by the
        scheduler.
    :param residents: the version of the node's instances (:class:`Residents`) that the filters judged: the claim must fail when
        the node has another one. None: no filter judged them. Filled in by the scheduler.
    :param decision: how the node that is being claimed was chosen: ``considered``, ``passed`` and ``removed`` (filter -> nodes).
        Filled in by the scheduler.
    :param properties: further fields of the request that only some filters read.
    :param all_projects: the requester may see every project. Otherwise hints and server groups that name an instance of another
        project are treated as if the instance did not exist.
    :param powers: what the agent of its host must offer (``compute.commands``). An agent that names no powers may have all.
    :param propose: names the providers of the node that is being claimed. None: the node has one provider, which gives everything.
        Filled in by the scheduler.
    :param held_providers: uuids of the providers that give a rebuilt instance what it asks for outside of request groups; empty:
        it is no rebuild, or nothing is known of them.
    """

    instance_uuid: str
    flavor: Flavor
    project_id: str = ""
    user_id: str = ""
    hints: Mapping[str, Sequence[str]] = field(default_factory=lambda: EMPTY)
    force_hosts: tuple[str, ...] = ()
    force_nodes: tuple[str, ...] = ()
    ignore_hosts: tuple[str, ...] = ()
    ignore_nodes: tuple[str, ...] = ()
    requested_host: str | None = None
    requested_node: str | None = None
    properties: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    availability_zone: str | None = None
    image: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    server_group: ServerGroup | None = None
    rebuild: bool = False
    limits: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    residents: int | None = None
    decision: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    all_projects: bool = True
    powers: tuple[str, ...] = ()
    propose: Propose | None = field(default=None, compare=False, repr=False)
    held_providers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        freeze_fields(self, "hints", "properties", "image", "limits", "decision")

    def get_scheduler_hint(self, name: str, default: Any = None) -> Any:
        """Returns a hint as Nova does: the text if there is one, the list if there are several, the default if there is none."""
        values = self.hints.get(name)
        if values is None:
            return default
        return values[0] if len(values) == 1 else list(values)


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """Describes an instance as schedulers know it.

    :param fields: further fields of the instance that filters declare in ``instance_fields``.
    :param busy: an operation on it is in progress that loads its node (it is being built, moved, ...).
    :param server_group: the name of its server group, within its project; empty for none.
    :param holds: the amounts of a claim that was made a moment ago; None: what was read from the store includes them.
    """

    uuid: str
    host: str
    node: str
    flavorid: str
    resources: Mapping[str, int]
    project_id: str = ""
    fields: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    busy: bool = False
    server_group: str = ""
    holds: Holds | None = None

    def __post_init__(self) -> None:
        # Without a loop: a scheduler makes one for each instance that a message names.
        if type(self.resources) is not FrozenDict:
            object.__setattr__(self, "resources", frozen_mapping(self.resources))
        if type(self.fields) is not FrozenDict:
            object.__setattr__(self, "fields", frozen_mapping(self.fields))


@dataclass(frozen=True, slots=True)
class Residents:
    """Lists the instances of a node in the store, including those that are moving to it.

    :param version: rises with every change of them. It was read before the instances were.
    """

    version: int
    records: tuple[InstanceRecord, ...]


class InstanceSource(abc.ABC):
    """Reads instances from the store of the service that owns them."""

    @abc.abstractmethod
    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        """Returns a page of the instances that occupy a node, by uuid: up to ``limit`` after the given uuid."""

    def pages(self, limit: int) -> Iterator[Sequence[InstanceRecord]]:
        """Yields pages of the instances that occupy a node, in any order. No instance is on two pages.

        An instance that is inserted during the call may be missing.
        """
        after = ""
        while True:
            page = self.all(after=after, limit=limit)
            yield page
            if len(page) < limit:
                return
            after = page[-1].uuid

    @abc.abstractmethod
    def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
        """Returns the instances that occupy a node of one of the hosts; one query for all hosts."""
