# SPDX-License-Identifier: Apache-2.0
"""Defines the interfaces of filters and weighers, and the read-only fleet that these plugins read."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from moorage.extensions import ExtensionPoint
from moorage.scheduling.interface.nodes import Aggregate, ProviderState
from moorage.scheduling.interface.requests import InstanceRecord, RequestSpec

__all__ = [
    "API_VERSION",
    "Rows",
    "Where",
    "Mask",
    "Skip",
    "SKIP",
    "Column",
    "FreeByProvider",
    "HostState",
    "Fleet",
    "HostFilter",
    "HostWeigher",
    "FILTERS",
    "WEIGHERS",
]

API_VERSION = (1, 0)
#: Row numbers of a fleet, ascending.
Rows = npt.NDArray[np.intp]
#: Rows of a fleet, or ``slice(None)`` for all of them: a column indexed by that is the column itself, not a copy.
Where = Rows | slice
#: A yes or no for each row.
Mask = npt.NDArray[np.bool_]


class Skip(enum.Enum):
    """The answer of ``prepare`` if the filter does not apply to a request."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Holds a value for each row, encoded: row ``r`` has the value ``values[codes[r]]``.

    Many rows have the same few values. So a filter can decide once for each value, and look the answers up by row:
    ``np.array([decide(value) for value in column.values])[column.codes[rows]]``.
    """

    codes: npt.NDArray[np.intp]
    values: tuple[Any, ...]

    def rows_where(self, rows: Rows, decide: Callable[[Any], bool]) -> Rows:
        """Returns the rows whose value passes. Calls ``decide`` once for each value that the rows have."""
        codes = self.codes[rows]
        present = range(len(self.values)) if len(self.values) <= len(rows) else np.unique(codes)
        answers = np.zeros(len(self.values), dtype=np.bool_)
        for code in present:
            answers[code] = decide(self.values[code])
        return rows[answers[codes]]


@dataclass(frozen=True, slots=True, eq=False)
class FreeByProvider:
    """Holds the free amount of a resource class for each provider that has the class, ordered by row.

    :param rows: the row of each provider's node, ascending. A pool occurs once for each node that uses it.
    :param free: the free amount of each provider; below 0 if more is used than the capacity.
    """

    rows: Rows
    free: npt.NDArray[np.float64]


class HostState(Protocol):
    """One row of a fleet, for filters that judge one node at a time; read-only, with Nova's names.

    It also has Nova's ``free_ram_mb``, ``vcpus_total``, ``stats``, ``hypervisor_version`` and others; see
    :mod:`moorage.scheduling.nova_names`.
    """

    @property
    def host(self) -> str:
        """The host: the name of the node's agent."""

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
        """The number of instances on the node."""

    @property
    def num_io_ops(self) -> int:
        """The number of instances on the node that an operation loads it with (a build or a move, for example)."""

    @property
    def aggregates(self) -> Sequence[Aggregate]:
        """The aggregates that the node is in."""

    @property
    def capacity(self) -> Mapping[str, float]:
        """The capacity by resource class."""

    @property
    def free(self) -> Mapping[str, float]:
        """The free amount by resource class."""

    @property
    def service_up(self) -> bool:
        """Whether the agent sends heartbeats."""

    @property
    def service_enabled(self) -> bool:
        """Whether the node and its agent are enabled, and the node is not in maintenance."""

    @property
    def disabled_reason(self) -> str:
        """The reason if ``service_enabled`` is False; empty otherwise."""

    @property
    def can_host(self) -> bool:
        """Whether the node may have instances at all."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """The node's properties."""

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the node's own provider."""

    @property
    def providers(self) -> Sequence[ProviderState]:
        """The node's own provider, the providers below it, and its pools, as the store had them at the last reading."""

    def fits(self, spec: RequestSpec) -> bool:
        """Returns :meth:`Fleet.fits` for this node; True if ``free`` alone decides."""

    def shortage(self, spec: RequestSpec) -> str:
        """Explains which request group finds no provider on the node, and what is missing; empty if all groups find one."""


class Fleet(Protocol):
    """A read-only snapshot of all nodes. Each node has a row; columns are arrays with one value per row.

    In a large fleet the snapshot can be a random sample of the nodes, with its own row numbers; the other nodes are unknown then.
    Samples are used only while every enabled filter declares ``judges_alone``.

    The snapshot does not change while the scheduler decides a request, and other requests read it too. Every array, mapping and
    list of it raises an error if a plugin writes to it (``free -= 8``). To compute with a column, make a new array
    (``free = free - 8``) or copy it (``fleet.free("VCPU").copy()``).
    """

    @property
    def size(self) -> int:
        """The number of rows."""

    @property
    def resource_classes(self) -> Sequence[str]:
        """The resource classes that any node has."""

    @property
    def scarce_classes(self) -> Sequence[str]:
        """The resource classes that some nodes have and others lack. A sample has those of the whole fleet."""

    def free(self, resource_class: str) -> npt.NDArray[np.float64]:
        """Returns the free amount of a class for each row; 0 if the node does not have the class."""

    def capacity(self, resource_class: str) -> npt.NDArray[np.float64]:
        """Returns the capacity of a class for each row; 0 if the node does not have the class."""

    def free_by_provider(self, resource_class: str) -> FreeByProvider:
        """Returns the free amount of a class for each provider (GPU, NUMA cell, pool). ``free`` has the sum by row."""

    def asked_of_providers(self, spec: RequestSpec, resource_class: str) -> tuple[int, ...]:
        """Returns how much of a class each request group asks for. A group takes all of it from one provider."""

    def fits(self, spec: RequestSpec) -> Mask | None:
        """Returns which rows have providers that satisfy every group of the request. ``free`` alone cannot decide that.

        If the request has no groups with a suffix, rows with one provider pass: ``free`` decides these. None: ``free`` decides all
        rows.
        """

    @property
    def nested(self) -> Mask:
        """Whether each row has several providers: providers below the node's own one, or pools."""

    @property
    def available(self) -> npt.NDArray[np.bool_]:
        """Whether each row's agent is up and enabled, and the node may have instances."""

    @property
    def num_instances(self) -> npt.NDArray[np.int64]:
        """The number of instances of each row."""

    @property
    def num_io_ops(self) -> npt.NDArray[np.int64]:
        """The number of busy instances of each row."""

    def flavor_counts(self, flavorid: str) -> npt.NDArray[np.int64]:
        """Returns the number of instances of a flavor for each row."""

    def rows_of_instances(self, uuids: Iterable[str]) -> Rows:
        """Returns the rows that have any of the instances. Unknown instances are ignored."""

    def locate(self, uuids: Iterable[str]) -> Mapping[str, int]:
        """Returns the row of each known instance, by uuid. Unknown instances are ignored."""

    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        """Returns the rows of hosts. Unknown hosts are ignored."""

    def rows_of_nodes(self, uuids: Iterable[str]) -> Rows:
        """Returns the rows of nodes. Unknown nodes are ignored."""

    # The following columns depend on the nodes only, not on requests. A column is computed at its first use after the nodes were
    # read, and kept until they are read again.

    def property_column(self, name: str) -> Column:
        """Returns a property of the nodes; None if a node lacks it. Values are equal if their JSON is."""

    def property_numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Returns a property as a number for each row; NaN if the node lacks it, or if it is no number."""

    def aggregate_column(self, key: str) -> Column:
        """Returns for each row the frozenset of the values of ``key`` in the metadata of its aggregates; commas are not split."""

    @property
    def aggregates(self) -> Column:
        """The tuple of aggregates of each row."""

    @property
    def traits(self) -> Column:
        """The frozenset of traits of each row's own provider."""

    def have_trait(self, names: frozenset[str]) -> Mask:
        """Returns which rows have one of the traits on any of their providers, pools included."""

    def host_state(self, row: int) -> HostState:
        """Returns one row."""


class HostFilter(abc.ABC):
    """Decides which nodes an instance may be placed on. Built once as ``plugin(conf=...)``, used by several threads at once.

    A filter reads a read-only snapshot only. It must not block, keep state between requests or change anything. Each request calls
    it, so it should judge many nodes at once: implement ``prepare``, ``mask_rows`` or ``filter_rows``. If a filter raises, the
    request fails with an error that names the filter. If it runs longer than ``[scheduling] plugin_deadline``, the scheduler's
    process ends. It must not fork: a copy of the process (``os.fork``) ends when it returns from the filter.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Nova's names. The first: the filter is called when an instance is rebuilt on its node. The second: its answer is equal for
    #: all instances of one request, so that a scheduler need not call it for each of them. (This scheduler does.)
    RUN_ON_REBUILD: ClassVar[bool] = False
    run_filter_once_per_request: ClassVar[bool] = False
    #: Its answer for a node depends on the other nodes that it gets. So it is called exactly at its place in ``enabled_filters``.
    needs_order: ClassVar[bool] = False
    #: Its answer for a node depends on that node and the request only. So the scheduler may call it with a sample of the nodes. A
    #: class that overrides ``prepare``, ``mask_rows`` or ``filter_rows`` declares this itself; a class with ``host_passes`` alone
    #: need not. Such a filter must not read the instance's uuid or name, except in requests with a server group: the scheduler uses
    #: its answers for up to a second for requests that differ in nothing else, except for nodes whose use has changed.
    judges_alone: ClassVar[bool] = False
    #: Its answer depends neither on the project nor on the user of a request, if the request has no hints and no server group. With
    #: ``judges_alone``, the scheduler uses its answers for requests of other projects too. A class that overrides ``host_passes``,
    #: ``prepare``, ``mask_rows`` or ``filter_rows`` declares this itself.
    ignores_owner: ClassVar[bool] = False
    #: All rows that ``prepare`` returns pass. The filter is not called again for them.
    prepare_is_final: ClassVar[bool] = False
    #: The filter is advice only: if it raises, and ``[scheduling] advisory_errors = skip``, the request goes on without it.
    advisory: ClassVar[bool] = False
    #: It reads instances, so instance tracking must be enabled. The scheduler calls it once more for the node that it claims, with
    #: the instances that the store has on that node. So its answer is true when the claim commits.
    needs_instances: ClassVar[bool] = False
    #: It may read instances or their number, and works without instance tracking. It is called once more as well.
    judges_instances: bool = False
    #: It judges the traits that a request asks for. If no enabled filter does, requests for traits are refused.
    judges_traits: ClassVar[bool] = False
    #: Fields of instances that it reads, besides those of InstanceRecord.
    instance_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, conf: Any) -> None:
        """Keeps the configuration."""
        self.conf = conf

    @abc.abstractmethod
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        """Returns whether the instance may be placed on the node."""

    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        """Begins a request. Returns SKIP (the filter does not apply), the only rows that can pass, or None (any row can)."""
        return None

    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask | None:
        """Returns whether each row passes; None if the filter does not implement this method.

        This is the fastest way, for filters that compare columns: ``fleet.free("VCPU")[where] >= 2``. While nearly all nodes are
        left, ``where`` is all rows (``slice(None)``), which copies nothing. The answer may be a column of the fleet; the scheduler
        does not write to it.
        """
        return None

    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        """Returns the rows that pass, in their order; None if the filter implements ``host_passes`` only.

        By default it uses ``mask_rows``.
        """
        mask = self.mask_rows(fleet, rows, spec)
        return None if mask is None else rows[mask]

    def limits(self, host_state: HostState, spec: RequestSpec) -> Mapping[str, Any]:
        """Returns the limits of a node that passed, as JSON data by name. Called for the node that is being claimed.

        The claim checks ``num_instances`` and ``num_io_ops`` in its transaction: the node must have fewer. So schedulers that
        decide at the same moment do not exceed them. Other limits are stored for the agent, which finds them in
        ``instance.pending["limits"]`` while it builds or moves the instance. If several filters limit one name, the lowest number
        applies.
        """
        return {}

    def host_key(self, host_state: HostState) -> Hashable:
        """Returns a key; nodes with equal keys always get equal answers. NotImplemented if there is no such key.

        The key must depend on the node only (name, properties, capacity, aggregates), not on instances, use or services. Keys are
        computed at the first use after the nodes were read, and ``host_passes`` is then called once for each key.
        """
        none: Hashable = NotImplemented
        return none

    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        """Explains to a person why the node does not pass. Called on demand only."""
        return f"{type(self).__name__} refused it"


class HostWeigher(abc.ABC):
    """Ranks the nodes that passed all filters: a larger weight is better. Built and used as a filter is.

    Raw weights are limited to ``minval`` and ``maxval``, scaled to 0..1 over the nodes that passed, and multiplied.
    """

    api_version: ClassVar[tuple[int, int]]
    minval: ClassVar[float | None] = None
    maxval: ClassVar[float | None] = None
    #: The weight of a node depends on that node and the request only, and not on the instance's uuid or name. So the scheduler may
    #: call it for some nodes only, and uses its weights for up to a second for requests that differ in nothing else, except for
    #: nodes whose use has changed. A class that overrides ``weigh_rows`` or a multiplier declares this itself.
    weighs_alone: ClassVar[bool] = False
    #: The weights depend neither on the project nor on the user of a request, if the request has no hints and no server group. A
    #: class that overrides ``weigh_rows`` or a multiplier declares this itself.
    ignores_owner: ClassVar[bool] = False

    def __init__(self, *, conf: Any) -> None:
        """Keeps the configuration."""
        self.conf = conf

    @property
    def multiplier(self) -> float:
        """The factor of this weigher's weights. A negative factor prefers small weights."""
        return 1.0

    @property
    def spreads(self) -> bool:
        """Whether a node that is nearly the best one is good enough, as for weighers that spread instances over many nodes.

        The scheduler then ranks a random sample of a large fleet instead of all nodes. A weigher that fills one node before the
        next one, or that prefers rare nodes, needs all nodes. A class that overrides ``weigh_rows`` or a multiplier declares this
        itself. If aggregates set a negative multiplier, all nodes are ranked in any case.
        """
        return False

    def preferred(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Mask | None:
        """Returns which rows are in the best class of nodes: no node of the fleet can be strictly better. None: all rows are.

        For weighers that divide nodes into classes. A sample decides a request only if it has enough nodes of the best class.
        """
        return None

    def row_multipliers(self, fleet: Fleet, rows: Rows) -> npt.NDArray[np.float64] | None:
        """Returns the multiplier of each row, if aggregates can set their own; None: ``multiplier`` for all rows."""
        return None

    @abc.abstractmethod
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        """Returns the raw weights of the rows."""


#: Chosen by ``[scheduling] enabled_filters`` and ``enabled_weighers``.
FILTERS: ExtensionPoint[HostFilter] = ExtensionPoint(
    "moorage.filters", HostFilter, API_VERSION, "[scheduling] enabled_filters"
)
WEIGHERS: ExtensionPoint[HostWeigher] = ExtensionPoint(
    "moorage.weighers", HostWeigher, API_VERSION, "[scheduling] enabled_weighers"
)
