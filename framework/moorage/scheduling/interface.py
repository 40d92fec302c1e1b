# SPDX-License-Identifier: Apache-2.0
"""What scheduling plugins implement, and the plain data that crosses the border."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from oslo_context import context as oslo_context

from moorage.extensions import ExtensionPoint
from moorage.inventory import InventoryItem
from moorage.read_only import EMPTY, FrozenDict, freeze_fields, frozen_mapping

__all__ = [
    "API_VERSION",
    "FILTERS",
    "SKIP",
    "WEIGHERS",
    "Aggregate",
    "Column",
    "Fleet",
    "FleetChanges",
    "FleetSource",
    "FreeByProvider",
    "HostFilter",
    "HostState",
    "HostWeigher",
    "Holds",
    "NodeState",
    "Propose",
    "ProviderState",
    "Residents",
    "Rows",
    "Skip",
    "ClaimResult",
    "Claimer",
    "Flavor",
    "InstanceRecord",
    "InstanceSource",
    "Mask",
    "RequestSpec",
    "ServerGroup",
    "SetClaimer",
    "WantedClaim",
    "Where",
]

API_VERSION = (1, 0)

#: Numbers of rows of a fleet, ascending.
Rows = npt.NDArray[np.intp]
#: Provider uuid -> resource class -> units: what a claim takes of which provider.
Holds = Mapping[str, Mapping[str, int]]
#: Called with pairs (provider uuid, resource class) that have refused the request; returns what else a claim may take of which
#: providers of the node, or None.
Propose = Callable[[frozenset[tuple[str, str]]], Holds | None]
#: Rows of a fleet, or ``slice(None)`` for all of them: a column indexed by that is the column itself, not a copy.
Where = Rows | slice
#: Yes or no for each of some rows.
Mask = npt.NDArray[np.bool_]


class Skip(enum.Enum):
    """What ``prepare`` answers when the filter has nothing to say about a request."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP


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
    """Instances that want to be together, or apart.

    :param policy: ``affinity``, ``anti-affinity``, ``soft-affinity`` or ``soft-anti-affinity``.
    :param max_server_per_host: how many of them one node may have under ``anti-affinity``.
    :param members: uuids of those that are known, the request's own instance left out; the scheduler adds those that its view
        has under the group's name.
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
    """What is asked of the scheduler for one instance, or for several alike.

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
        """A hint in Nova's way: the text itself when it is the only one, the list otherwise, the default when absent."""
        values = self.hints.get(name)
        if values is None:
            return default
        return values[0] if len(values) == 1 else list(values)


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """An instance as schedulers know it. ``fields`` holds what filters declared in ``instance_fields`` beyond these.

    :param busy: an operation on it is in progress that loads its node (it is being built, moved, ...).
    :param server_group: the name of its server group, within its project; empty for none.
    :param holds: what it holds of which providers, where it was claimed a moment ago; None: the store's reading has it.
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
    """The instances of a node as the store has them, those that are moving in included.

    :param version: rises with every change of them. It was read before the instances were.
    """

    version: int
    records: tuple[InstanceRecord, ...]


class InstanceSource(abc.ABC):
    """Where instances can be read from: the store of the service that owns them."""

    @abc.abstractmethod
    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        """Instances that occupy a node, ordered by uuid, a page of ``limit`` after the given uuid."""

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
        """Instances that occupy a node of one of the hosts; one query for all of them."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The claim holds, on ``node_uuid``; ``repeated`` when an earlier try of the same request had taken it.

    :param node_uuid: empty with ``repeated``: the instance exists and holds nothing on any node, since its build failed or it
        was shelved.
    :param shown: what was written with a new claim, as JSON data; empty where the claimer does not say.
    :param holds: which of the proposals of ``propose`` was taken; None: the first one, or there was none.
    :param token: of the operation that the claim recorded; 0 where the claimer does not say.
    :param together: how many claims the transaction made.
    """

    node_uuid: str
    repeated: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    holds: Holds | None = None
    token: int = 0
    together: int = field(default=1, compare=False)


class Claimer(Protocol):
    """What the scheduler needs of allocation; bound by the control plane."""

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Take the room on that node.

        :raises CapacityExceeded: another claim was faster; the next candidate may do.
        :raises ConstraintViolated: this node never takes such a size, or a limit of ``spec.limits`` is reached by now.
        :raises ResidentsChanged: the node's instances have another version than ``spec.residents``.
        :raises NotFound: the node is gone (details: ``provider``); the next candidate may do.

        A ConstraintViolated with the detail ``state`` says that the node or its agent is unavailable by now.
        """

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """What an earlier try of the same request has left; asked before a request is refused. None: nothing."""

    def release(self, instance_uuid: str) -> None:
        """Give the room of a new claim back, and take back what was recorded with it; harmless when there is none.

        :raises InUse: the claim was confirmed (:meth:`SetClaimer.confirm`) or changed since.
        """


@dataclass(frozen=True, slots=True)
class WantedClaim:
    """A claim of :meth:`SetClaimer.claim_many`; the arguments of :meth:`Claimer.claim`.

    :param context: of the request; by default that of the thread.
    """

    spec: RequestSpec
    node_uuid: str
    host: str
    request_id: str
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)


@runtime_checkable
class SetClaimer(Claimer, Protocol):
    """A claimer that makes several claims at once."""

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[ClaimResult | BaseException]:
        """Claim for several instances; of each the result, or what :meth:`claim` would have raised. No claim undoes another."""

    def confirm(self, instances: Sequence[str]) -> None:
        """Have claims stay that earlier tries of a request have made: :meth:`release` gives none of them back from here on.

        :raises Conflict: a claim is gone or was changed; none is confirmed.
        """


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A named set of nodes with metadata, as Nova has them."""

    name: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze_fields(self, "metadata")


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Something said of each row, encoded: row ``r`` has the value ``values[codes[r]]``.

    Many rows share few values; who decides by value decides once for each of ``values`` and spreads the answers:
    ``np.array([decide(value) for value in column.values])[column.codes[rows]]``.
    """

    codes: npt.NDArray[np.intp]
    values: tuple[Any, ...]

    def rows_where(self, rows: Rows, decide: Callable[[Any], bool]) -> Rows:
        """Those of the rows whose value passes; decides once for each value that the rows have."""
        codes = self.codes[rows]
        present = range(len(self.values)) if len(self.values) <= len(rows) else np.unique(codes)
        answers = np.zeros(len(self.values), dtype=np.bool_)
        for code in present:
            answers[code] = decide(self.values[code])
        return rows[answers[codes]]


@dataclass(frozen=True, slots=True, eq=False)
class FreeByProvider:
    """What is free of a resource class at each provider that has it; those of a row stand together.

    :param rows: the row of each provider's node, ascending. A pool counts for each node that takes of it.
    :param free: what is free of each provider; below 0 where more is used than there is.
    """

    rows: Rows
    free: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProviderState:
    """A resource provider that the instances of a node can hold resources of.

    :param parent: uuid of the provider above; None for a root.
    :param shared: it is a pool, in another tree; other nodes take of it too.
    """

    uuid: str
    parent: str | None
    inventories: tuple[InventoryItem, ...]
    used: Mapping[str, int]
    traits: frozenset[str] = frozenset()
    shared: bool = False

    def __post_init__(self) -> None:
        freeze_fields(self, "used")


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is known of a node beside its instances, as the control plane reads it from fleet, allocation and services.

    :param up: its agent's heartbeats arrive.
    :param enabled: neither the node nor its agent is disabled, and the node is not in maintenance.
    :param disabled_reason: why it is not enabled; empty when it is.
    :param traits: the traits of its own provider.
    :param capacity: by class, the sum of its own provider and all below it; of a class that none of them has, that of the roomiest
        pool. Likewise ``used``.
    :param providers: its own provider, then those below it (NUMA cells, GPUs), then the pools that it takes of. Empty: its own
        provider gives everything.
    """

    uuid: str
    name: str
    host: str
    capacity: Mapping[str, float]
    used: Mapping[str, int]
    can_host: bool = True
    up: bool = True
    enabled: bool = True
    properties: Mapping[str, Any] = field(default_factory=dict)
    aggregates: tuple[Aggregate, ...] = ()
    disabled_reason: str = ""
    traits: frozenset[str] = frozenset()
    providers: tuple[ProviderState, ...] = ()

    def __post_init__(self) -> None:
        freeze_fields(self, "capacity", "used", "properties")

    @property
    def own_and_nested(self) -> tuple[ProviderState, ...]:
        """The providers; at least its own one."""
        if self.providers:
            return self.providers
        items = tuple(InventoryItem(name, 1, allocation_ratio=amount) for name, amount in self.capacity.items())
        return (ProviderState(self.uuid, None, items, self.used, self.traits),)


@dataclass(frozen=True, slots=True)
class ExcludedTargets:
    """What gets no new instances at one moment.

    :param down: hosts whose agent is down.
    :param disabled: host -> why, of agents that are disabled or do not work on instances.
    :param nodes: uuid -> why, of nodes that are disabled or in maintenance.
    """

    down: frozenset[str] = frozenset()
    disabled: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)

    def applied(self, node: NodeState) -> NodeState:
        """The node with these states; the same object when nothing differs."""
        up = node.host not in self.down
        reason = self.nodes.get(node.uuid) or self.disabled.get(node.host, "")
        if up == node.up and reason == node.disabled_reason:
            return node
        return replace(node, up=up, enabled=not reason, disabled_reason=reason)


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """What changed between two readings of the fleet.

    :param changed: nodes that are new or have changed, without the states of :class:`ExcludedTargets`.
    :param removed: uuids of nodes that are gone; some of them may never have been known.
    """

    changed: tuple[NodeState, ...] = ()
    removed: frozenset[str] = frozenset()


class FleetSource(Protocol):
    """Where the scheduler reads nodes; bound by the control plane."""

    def nodes(self) -> Iterable[NodeState]:
        """All nodes that have a host."""

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        """Reads what changed since the last reading of nodes or changes; None: all nodes must be read.

        :param compare: also find what a transaction committed long after it had written.
        """

    def unavailable(self) -> ExcludedTargets:
        """What gets no new instances now; cheap enough to be called every second."""


class HostState(Protocol):
    """One row of a fleet, for filters that look at one at a time; read-only, with Nova's names.

    Beside what is listed here it has Nova's ``free_ram_mb``, ``vcpus_total``, ``stats``, ``hypervisor_version``, ... (see
    :mod:`moorage.scheduling.nova_names`).
    """

    @property
    def host(self) -> str:
        """The agent's name."""

    @property
    def nodename(self) -> str:
        """The node's name."""

    @property
    def uuid(self) -> str:
        """The node's uuid."""

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """Instances on the node by uuid."""

    @property
    def num_instances(self) -> int:
        """How many they are."""

    @property
    def num_io_ops(self) -> int:
        """How many of them are busy."""

    @property
    def aggregates(self) -> Sequence[Aggregate]:
        """The aggregates that the node is in."""

    @property
    def capacity(self) -> Mapping[str, float]:
        """Resource class -> capacity."""

    @property
    def free(self) -> Mapping[str, float]:
        """Resource class -> what is free."""

    @property
    def service_up(self) -> bool:
        """The agent's heartbeat is seen."""

    @property
    def service_enabled(self) -> bool:
        """No operator has disabled the node or its agent, and the node is not in maintenance."""

    @property
    def disabled_reason(self) -> str:
        """Why ``service_enabled`` is False; empty otherwise."""

    @property
    def can_host(self) -> bool:
        """Instances may land there at all."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """The node's properties."""

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the node's own provider."""

    @property
    def providers(self) -> Sequence[ProviderState]:
        """The node's own provider, those below it and its pools, with what the store's last reading has of them."""

    def fits(self, spec: RequestSpec) -> bool:
        """As :meth:`Fleet.fits`, for this node; True where ``free`` tells all."""

    def shortage(self, spec: RequestSpec) -> str:
        """Says which request group finds no provider of the node, and for want of what; empty where all find one."""


class Fleet(Protocol):
    """A read-only snapshot of all nodes. Each node has a row; columns are arrays with one value per row.

    In a large fleet it can be a random sample of the nodes, with rows of its own: what is not in the sample is unknown. That is so
    only while every enabled filter judges each host alone (``judges_alone``).

    The snapshot does not change while a request is decided, and other requests read it too. Every array, mapping and list that a
    plugin gets from it raises an error when it is written to (``free -= 8``). To compute with a column, make a new array
    (``free = free - 8``) or copy it (``fleet.free("VCPU").copy()``).
    """

    @property
    def size(self) -> int:
        """How many rows there are."""

    @property
    def resource_classes(self) -> Sequence[str]:
        """The resource classes that any node has."""

    @property
    def scarce_classes(self) -> Sequence[str]:
        """The resource classes that some nodes have and others do not; of the whole fleet, in a sample of it too."""

    def free(self, resource_class: str) -> npt.NDArray[np.float64]:
        """What is free of a class, a number for each row; 0 where a node has none of it."""

    def capacity(self, resource_class: str) -> npt.NDArray[np.float64]:
        """The capacity of a class, a number for each row."""

    def free_by_provider(self, resource_class: str) -> FreeByProvider:
        """What is free of a class at each single provider (GPU, NUMA cell, pool); ``free`` has the sum of each row."""

    def asked_of_providers(self, spec: RequestSpec, resource_class: str) -> tuple[int, ...]:
        """How much of a class the request asks of single providers: an amount for each request group that asks for it."""

    def fits(self, spec: RequestSpec) -> Mask | None:
        """Which rows have providers that give every group of the request what it asks for; ``free`` cannot tell that.

        Rows with one provider pass where the request has no groups with a suffix: ``free`` tells all of them. None: that is so for
        all rows.
        """

    @property
    def nested(self) -> Mask:
        """Rows that have several providers: others below their own one, or pools."""

    @property
    def available(self) -> npt.NDArray[np.bool_]:
        """Rows whose agent is up and enabled and that may host."""

    @property
    def num_instances(self) -> npt.NDArray[np.int64]:
        """How many instances each row has."""

    @property
    def num_io_ops(self) -> npt.NDArray[np.int64]:
        """How many busy instances each row has."""

    def flavor_counts(self, flavorid: str) -> npt.NDArray[np.int64]:
        """How many instances of a flavor each row has."""

    def rows_of_instances(self, uuids: Iterable[str]) -> Rows:
        """The rows on which any of the instances are; unknown ones are left out."""

    def locate(self, uuids: Iterable[str]) -> Mapping[str, int]:
        """Instance -> row, for those that are known."""

    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        """The rows of the agents with these names; unknown ones are left out."""

    def rows_of_nodes(self, uuids: Iterable[str]) -> Rows:
        """The rows of the nodes with these uuids; unknown ones are left out."""

    # What follows is said of nodes and does not change from request to request: it is computed at the first use after a reading
    # of the nodes and kept until the next.

    def property_column(self, name: str) -> Column:
        """A property of the nodes; None where a node does not have it. Values are told apart as JSON."""

    def property_numbers(self, name: str) -> npt.NDArray[np.float64]:
        """A property as a number for each row; not a number where it is absent or none."""

    def aggregate_column(self, key: str) -> Column:
        """For each row the frozenset of what its aggregates' metadata say under ``key``, commas not split; often empty."""

    @property
    def aggregates(self) -> Column:
        """For each row the tuple of its aggregates."""

    @property
    def traits(self) -> Column:
        """For each row the frozenset of the traits of its node's own provider."""

    def have_trait(self, names: frozenset[str]) -> Mask:
        """Which rows have one of these traits on any of their providers, pools included."""

    def host_state(self, row: int) -> HostState:
        """One row by itself."""


class HostFilter(abc.ABC):
    """Decides on which nodes an instance may go. Built once as ``plugin(conf=...)``, used by several threads at once.

    It is given a read-only snapshot and nothing else; it must not block, keep state between requests or change anything. It is
    called for every request, so it should look at sets: ``prepare``, ``mask_rows`` or ``filter_rows``. A filter that raises
    refuses the request, with an error that names it; one that runs longer than ``[scheduling] plugin_deadline`` costs the
    process its life. It must not fork: a copy of the process (``os.fork``) is ended as soon as it returns from the filter.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Nova's names: asked again when an instance is rebuilt in its place; answers the same for each of several alike, so that
    #: a caller that keeps the nodes that passed for the first need not ask again. (This scheduler asks again.)
    RUN_ON_REBUILD: ClassVar[bool] = False
    run_filter_once_per_request: ClassVar[bool] = False
    #: Its answer for a node depends on which other nodes it is shown: it is asked exactly in its configured place.
    needs_order: ClassVar[bool] = False
    #: Its answer for a node follows from that node and the request alone, so that it may be shown a sample of the nodes. A class
    #: that overrides ``prepare``, ``mask_rows`` or ``filter_rows`` declares it itself. One with ``host_passes`` alone need not. One
    #: that declares it does not read the instance's uuid or name of requests without a server group: what it says for one request
    #: holds for the next one that differs in nothing else, but for nodes whose use has changed. What depends on other things is up
    #: to a second old then.
    judges_alone: ClassVar[bool] = False
    #: Its answer about a request without hints and server group depends neither on the project nor on the user of the request. With
    #: ``judges_alone``, what it says for a request of one project holds for those of others too. A class that overrides
    #: ``host_passes``, ``prepare``, ``mask_rows`` or ``filter_rows`` declares it itself.
    ignores_owner: ClassVar[bool] = False
    #: The rows that ``prepare`` answers are the answer: it is not asked again for each of them.
    prepare_is_final: ClassVar[bool] = False
    #: It is only advice: with ``[scheduling] advisory_errors = skip`` a request goes on without it when it raises.
    advisory: ClassVar[bool] = False
    #: It reads ``instances`` (or their indexes), which tracking must then provide. The scheduler asks it again about the node
    #: that it claims, with the node's instances as the store has them: what it promised is true when the claim commits.
    needs_instances: ClassVar[bool] = False
    #: It may read instances or their number although it works without tracking; it is asked again as well.
    judges_instances: bool = False
    #: It judges the traits that a request asks for. Without such a filter, a request that asks for traits is refused.
    judges_traits: ClassVar[bool] = False
    #: Fields of instances that it reads beyond those of InstanceRecord.
    instance_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, conf: Any) -> None:
        """Keep what is needed of the configuration."""
        self.conf = conf

    @abc.abstractmethod
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        """Whether the instance may go there."""

    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        """Called once for each request: SKIP (nothing to say), the only rows that can pass, or None (ask further)."""
        return None

    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask | None:
        """Which of the rows pass, yes or no for each; None when there is no such form.

        The form for filters that compare columns, and the fastest one: ``fleet.free("VCPU")[where] >= 2``. While nearly all nodes
        are left it is asked for all of them (``slice(None)``), which copies nothing. The answer may be a column of the fleet
        itself; the scheduler does not write to it.
        """
        return None

    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        """Those of the rows that pass, in their order; None when there is only ``host_passes``.

        It follows from ``mask_rows`` where there is one.
        """
        mask = self.mask_rows(fleet, rows, spec)
        return None if mask is None else rows[mask]

    def limits(self, host_state: HostState, spec: RequestSpec) -> Mapping[str, Any]:
        """What this filter promises of a node that it let pass, JSON data by name; asked of the node that is being claimed.

        ``num_instances`` and ``num_io_ops`` (so many are too many) are checked by the claim, in its transaction: schedulers that
        decide at the same moment do not break them. Others are kept with the instance for its agent, which finds them in
        ``instance.pending["limits"]`` while it builds or moves it. Of several filters' numbers of one name the least counts.
        """
        return {}

    def host_key(self, host_state: HostState) -> Hashable:
        """A key such that nodes with the same one always get the same answer; NotImplemented when there is none.

        It must follow from the node alone (name, properties, capacity, aggregates), not from instances, use or services: keys
        are computed at the first use after a reading of the nodes, and ``host_passes`` is then asked once for each key.
        """
        none: Hashable = NotImplemented
        return none

    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        """Why the host does not pass, for a person; only called on demand."""
        return f"{type(self).__name__} refused it"


class HostWeigher(abc.ABC):
    """Ranks the nodes that passed: more is better. Built and used as a filter is.

    Raw weights are clamped to ``minval`` and ``maxval``, stretched to 0..1 over the nodes that passed and multiplied.
    """

    api_version: ClassVar[tuple[int, int]]
    minval: ClassVar[float | None] = None
    maxval: ClassVar[float | None] = None
    #: The weight of a node follows from that node and the request alone, and not from the instance's uuid or name. So it may be
    #: asked about some nodes alone, and what it says for one request holds for the next one that differs in nothing else, but for
    #: nodes whose use has changed. What depends on other things is up to a second old then. A class that overrides
    #: ``weigh_rows`` or a multiplier declares it itself.
    weighs_alone: ClassVar[bool] = False
    #: The weights for a request without hints and server group depend neither on the project nor on the user of the request. A
    #: class that overrides ``weigh_rows`` or a multiplier declares it itself.
    ignores_owner: ClassVar[bool] = False

    def __init__(self, *, conf: Any) -> None:
        """Keep what is needed of the configuration."""
        self.conf = conf

    @property
    def multiplier(self) -> float:
        """How much this weigher counts; negative turns it round."""
        return 1.0

    @property
    def spreads(self) -> bool:
        """Whether a node that is nearly the best one is as good, as for weighers that spread instances over many nodes.

        The scheduler then ranks a random sample of a large fleet instead of all nodes. A weigher that fills one node before the
        next, or that looks for rare nodes, needs all of them. A class that overrides ``weigh_rows`` or a multiplier declares it
        itself. Where aggregates turn the multiplier round, all nodes are ranked whatever it says.
        """
        return False

    def preferred(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Mask | None:
        """Which of the rows no other node of the fleet can be strictly better than; None: all.

        For weighers with classes of nodes. A sample decides a request only if it has enough such nodes.
        """
        return None

    def row_multipliers(self, fleet: Fleet, rows: Rows) -> npt.NDArray[np.float64] | None:
        """The multiplier for each of the rows, where aggregates can set their own; None: ``multiplier`` for all."""
        return None

    @abc.abstractmethod
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        """Raw weights of the rows."""


#: Chosen by ``[scheduling] enabled_filters`` and ``enabled_weighers``.
FILTERS: ExtensionPoint[HostFilter] = ExtensionPoint(
    "moorage.filters", HostFilter, API_VERSION, "[scheduling] enabled_filters"
)
WEIGHERS: ExtensionPoint[HostWeigher] = ExtensionPoint(
    "moorage.weighers", HostWeigher, API_VERSION, "[scheduling] enabled_weighers"
)
