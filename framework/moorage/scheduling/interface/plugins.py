# SPDX-License-Identifier: Apache-2.0
"""What filters and weighers implement, and the columns of the fleet that they judge."""

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
#: Numbers of rows of a fleet, ascending.
Rows = npt.NDArray[np.intp]
#: Rows of a fleet, or ``slice(None)`` for all of them: a column indexed by that is the column itself, not a copy.
Where = Rows | slice
#: Yes or no for each of some rows.
Mask = npt.NDArray[np.bool_]


class Skip(enum.Enum):
    """What ``prepare`` answers when the filter has nothing to say about a request."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP


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
