# SPDX-License-Identifier: Apache-2.0
"""The fleet at one moment, read-only: the data by which a request is decided."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.read_only import frozen_array
from moorage.request_groups import CandidateQuery
from moorage.scheduling.assignment import Search, proposal
from moorage.scheduling.instance_index import Overlay, Places
from moorage.scheduling.interface import (
    Aggregate,
    Column,
    Flavor,
    FreeByProvider,
    HostFilter,
    InstanceRecord,
    Mask,
    NodeState,
    Propose,
    ProviderState,
    RequestSpec,
    Rows,
)
from moorage.scheduling.nova_names import NovaNames
from moorage.scheduling.provider_columns import ProviderColumns
from moorage.scheduling.resource_request import is_grouped, resource_request

__all__ = ["COUNTED_FLAVORS", "NO_INSTANCE", "Counts", "Floats", "Snapshot", "SnapshotHost", "Use", "plus", "use_of"]

#: Flavors whose instances are counted by row all the time; those of others are counted when a filter asks.
COUNTED_FLAVORS = 256
#: Stands in hints for an instance that the requester may not see.
NO_INSTANCE = "no-such-instance"
#: How many columns that follow from requests are kept.
_DERIVED = 1024
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
#: What is used of a node: the units of each class, the counts of instances and busy ones, and that of a flavor's instances.
Use = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The fleet at one moment; see :class:`moorage.scheduling.interface.plugins.Fleet`."""

    nodes: Sequence[NodeState]
    capacities: Mapping[str, Floats]
    used: Mapping[str, Floats]
    foreign: Mapping[str, Floats]
    available: npt.NDArray[np.bool_]
    num_instances: Counts
    num_io_ops: Counts
    row_of_node: Mapping[str, int]
    rows_of_host: Mapping[str, Rows]
    _flavors: dict[str, Counts]
    _places: Places
    #: Columns that follow from the nodes alone; shared by all snapshots of one reading of the nodes.
    _derived: dict[Hashable, Any]
    #: Rows with several providers.
    nested: npt.NDArray[np.bool_]
    #: What was claimed of providers since the nodes were read, by provider and class.
    _taken: Mapping[tuple[str, str], int]
    #: The columns of all providers under one key, made at the first use; shared as ``_derived`` is.
    _providers: dict[str, ProviderColumns]
    _step_rule: str
    #: What is free, and which rows fit, computed at the first use.
    _frees: dict[str, Floats] = field(default_factory=dict)
    _fits: dict[int, tuple[CandidateQuery, Mask]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("capacities", "used", "foreign", "row_of_node", "rows_of_host"):
            mapping = getattr(self, name)
            if type(mapping) is not MappingProxyType:
                object.__setattr__(self, name, MappingProxyType(mapping))

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.nodes)

    @property
    def resource_classes(self) -> Sequence[str]:
        """The resource classes that any node has."""
        return tuple(self.capacities)

    @property
    def scarce_classes(self) -> Sequence[str]:
        """The resource classes that some nodes have and others do not."""
        found = self._derived.get("scarce")
        if found is None:
            there = {name: column > 0 for name, column in self.capacities.items()}
            found = tuple(name for name, has in there.items() if has.any() and not has.all())
            self._keep("scarce", found)
        names: Sequence[str] = found
        return names

    def capacity(self, resource_class: str) -> Floats:
        """Capacity of a class by row."""
        found = self.capacities.get(resource_class)
        return frozen_array(np.zeros(self.size)) if found is None else found

    def free(self, resource_class: str) -> Floats:
        """Free amount of a class by row."""
        free = self._frees.get(resource_class)
        if free is None:
            capacity = self.capacities.get(resource_class)
            if capacity is None:
                return frozen_array(np.zeros(self.size))
            free = frozen_array(capacity - self.used[resource_class] - self.foreign[resource_class])
            self._frees[resource_class] = free
        return free

    def free_by_provider(self, resource_class: str) -> FreeByProvider:
        """Free amount of a class by provider."""
        table = self._columns.inventories.get(resource_class)
        if table is None:
            return FreeByProvider(frozen_array(np.zeros(0, dtype=np.intp)), frozen_array(np.zeros(0)))
        rows = self._columns.row[table.at]
        free = table.capacity - self._columns.used(resource_class, self._taken)
        # What instances hold of a node with one provider is known by node.
        alone = ~self.nested[rows]
        free[alone] = self.free(resource_class)[rows[alone]]
        return FreeByProvider(frozen_array(rows), frozen_array(free))

    def asked_of_providers(self, spec: RequestSpec, resource_class: str) -> tuple[int, ...]:
        """What a request asks of single providers; see :meth:`Fleet.asked_of_providers`."""
        groups = resource_request(spec).groups
        return tuple(group.resources[resource_class] for group in groups if resource_class in group.resources)

    @property
    def _columns(self) -> ProviderColumns:
        found = self._providers.get("columns")
        if found is None:
            found = self._providers["columns"] = ProviderColumns.of(self.nodes)
        return found

    def fits(self, spec: RequestSpec) -> Mask | None:
        """Which rows have providers that give every group what it asks for; see :meth:`Fleet.fits`."""
        grouped = is_grouped(spec)
        if not grouped and not self._any_nested:
            return None
        query = resource_request(spec)
        known = self._fits.get(id(query))
        if known is None:
            mask = self._columns.fits(query, self._taken, self._step_rule)
            if not grouped:
                mask |= ~self.nested
            known = self._fits[id(query)] = query, frozen_array(mask)
        return known[1]

    @property
    def _any_nested(self) -> bool:
        found = self._derived.get("any_nested")
        if found is None:
            found = bool(self.nested.any())
            self._keep("any_nested", found)
        return bool(found)

    def have_trait(self, names: frozenset[str]) -> Mask:
        """Which rows have one of the traits on any provider."""
        return self._columns.rows_with_trait(names)

    def proposal(self, row: int, spec: RequestSpec) -> Propose | None:
        """Says of which providers of a node a claim of the request may take; None: all of the node's own one."""
        if not self.nested[row] and not is_grouped(spec):
            return None
        return proposal(resource_request(spec), self.nodes[row].own_and_nested, self._taken, self._step_rule)

    def shortage(self, row: int, spec: RequestSpec) -> str:
        """See :meth:`HostState.shortage`."""
        taken = self._taken

        def used(provider: ProviderState, name: str) -> float:
            return provider.used.get(name, 0) + taken.get((provider.uuid, name), 0)

        return Search(resource_request(spec), self.nodes[row].own_and_nested, used, self._step_rule).shortage()

    def flavor_counts(self, flavorid: str) -> Counts:
        """Instances of a flavor by row."""
        found = self._flavors.get(flavorid)
        if found is None:
            found = np.zeros(self.size, dtype=np.int64)
            if len(self._flavors) >= COUNTED_FLAVORS:
                for row in range(self.size):
                    here = self._places.on_row(row)
                    found[row] = sum(each.flavorid == flavorid for each in here.values())
                found = frozen_array(found)
                self._flavors[flavorid] = found
        return frozen_array(found)

    def rows_of_instances(self, uuids: Iterable[str]) -> Rows:
        """Rows of the known ones of these instances."""
        return frozen_array(np.array(sorted(set(self._places.locate(uuids).values())), dtype=np.intp))

    def locate(self, uuids: Iterable[str]) -> Mapping[str, int]:
        """Instance -> row, for the known ones."""
        return MappingProxyType(self._places.locate(uuids))

    def instances_on(self, row: int) -> Mapping[str, InstanceRecord]:
        """Returns the instances on a row's node, by uuid."""
        return MappingProxyType(self._places.on_row(row))

    def with_placed(self, record: InstanceRecord, row: int) -> Snapshot:
        """Returns the fleet with one more instance on a row."""
        return self.with_residents(row, [*self._places.on_row(row).values(), record])

    def with_more_on(self, rows: Rows, flavor: Flavor, *, counted: bool) -> Snapshot:
        """Returns the fleet with one more busy instance of a flavor on each of some rows. Only the columns change.

        :param counted: the instances are counted too. Otherwise only their use of resources is added.
        """
        used = dict(self.used)
        for name, amount in flavor.resources.items():
            if name in used:
                used[name] = plus(used[name], rows, amount)
        flavors = {**self._flavors, flavor.flavorid: plus(self.flavor_counts(flavor.flavorid), rows, int(counted))}
        return replace(
            self,
            used=used,
            num_instances=plus(self.num_instances, rows, int(counted)),
            num_io_ops=plus(self.num_io_ops, rows, int(counted)),
            _flavors=flavors,
            _frees={},
            _fits={},
        )

    def without(self, records: Iterable[InstanceRecord]) -> Snapshot:
        """Returns the fleet without some instances."""
        fleet = self
        for row, gone in self._by_row(each.uuid for each in records).items():
            here = fleet._places.on_row(row)
            fleet = fleet.with_residents(row, [here[uuid] for uuid in here if uuid not in gone])
        return fleet

    def _by_row(self, uuids: Iterable[str]) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for uuid, row in self._places.locate(uuids).items():
            found.setdefault(row, set()).add(uuid)
        return found

    def with_residents(self, row: int, records: Iterable[InstanceRecord]) -> Snapshot:
        """Returns the fleet with these instances on a row, and no others there. Copies the columns that differ."""
        before = self._places.on_row(row)
        here = {each.uuid: each for each in records}
        used = dict(self.used)
        for name, change in _difference(_amounts(before.values()), _amounts(here.values())).items():
            if name in used:
                used[name] = plus(used[name], row, change)
        flavors = dict(self._flavors)
        counted = (Counter(each.flavorid for each in some) for some in (before.values(), here.values()))
        for flavorid, change in _difference(*counted).items():
            flavors[flavorid] = plus(self.flavor_counts(flavorid), row, change)
        busy = sum(each.busy for each in here.values()) - sum(each.busy for each in before.values())
        taken = dict(self._taken)
        for residents, others, sign in ((here, before, 1), (before, here, -1)):
            for uuid in residents.keys() - others.keys():
                for provider, amounts in (residents[uuid].holds or {}).items():
                    for name, amount in amounts.items():
                        taken[provider, name] = taken.get((provider, name), 0) + sign * amount
        places = self._places if isinstance(self._places, Overlay) else Overlay(self._places, {}, {})
        return replace(
            self,
            used=used,
            num_instances=plus(self.num_instances, row, len(here) - len(before)),
            num_io_ops=plus(self.num_io_ops, row, busy) if busy else self.num_io_ops,
            _flavors=flavors,
            _places=places.with_row(row, here),
            _taken=taken,
            _frees={},
            _fits={},
        )

    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        """Rows of the known ones of these agents."""
        found = [self.rows_of_host[host] for host in set(hosts) if host in self.rows_of_host]
        return frozen_array(np.sort(np.concatenate(found)) if found else np.array([], dtype=np.intp))

    def rows_of_folded_hosts(self, hosts: Iterable[str]) -> Rows:
        """As :meth:`rows_of_hosts`, without regard to case."""
        names = self._derived.get("folded")
        if names is None:
            names = {}
            for host, rows in self.rows_of_host.items():
                names.setdefault(host.casefold(), []).append(rows)
            self._keep("folded", names)
        found = [rows for host in {host.casefold() for host in hosts} for rows in names.get(host, ())]
        return frozen_array(np.sort(np.concatenate(found)) if found else np.array([], dtype=np.intp))

    def rows_of_nodes(self, uuids: Iterable[str]) -> Rows:
        """Rows of the known ones of these nodes."""
        rows = {row for uuid in uuids if (row := self.row_of_node.get(uuid)) is not None}
        return frozen_array(np.array(sorted(rows), dtype=np.intp))

    def resolved(self, spec: RequestSpec) -> RequestSpec:
        """Fill in the nodes of the server group's members; hide instances of projects that the requester may not see.

        Members on the node that the instance is evacuated from are left out.
        """
        if not spec.all_projects:
            spec = self._without_other_projects(spec)
        group = spec.server_group
        if group is None:
            return spec
        if group.left in self.row_of_node:
            left = self._places.on_row(self.row_of_node[group.left])
            group = replace(group, members=tuple(uuid for uuid in group.members if uuid not in left))
        nodes = tuple(self.nodes[row].uuid for row in self.rows_of_instances(group.members))
        return replace(spec, server_group=replace(group, nodes=nodes))

    def _without_other_projects(self, spec: RequestSpec) -> RequestSpec:
        """Replace each instance of another project in hints by a name that no instance has, so that all plugins agree."""
        group = spec.server_group
        named = [*(value for values in spec.hints.values() for value in values), *(group.members if group else ())]
        hidden = {
            uuid
            for uuid, row in self._places.locate(named).items()
            if (record := self._places.on_row(row).get(uuid)) is not None and record.project_id != spec.project_id
        }
        if not hidden:
            return spec
        hints = {
            name: [NO_INSTANCE if value in hidden else value for value in values] for name, values in spec.hints.items()
        }
        if group is not None:
            group = replace(group, members=tuple(uuid for uuid in group.members if uuid not in hidden))
        return replace(spec, hints=hints, server_group=group)

    def property_column(self, name: str) -> Column:
        """Returns a property of the nodes."""
        if name not in self._property_names:
            # A request for names that no node has must not make the scheduler look at each node for each of them.
            return self._column(("no property",), ((None, None) for _ in self.nodes))
        values = (node.properties.get(name) for node in self.nodes)
        return self._column(("property", name), ((json.dumps(value, sort_keys=True), value) for value in values))

    @property
    def _property_names(self) -> frozenset[str]:
        found = self._derived.get("property_names")
        if found is None:
            found = frozenset().union(*(node.properties for node in self.nodes))
            self._keep("property_names", found)
        names: frozenset[str] = found
        return names

    def property_numbers(self, name: str) -> Floats:
        """Returns a property as a number."""
        found = self._derived.get(("numbers", name))
        if found is None:
            found = frozen_array(
                np.array([_number(node.properties.get(name)) for node in self.nodes], dtype=np.float64)
            )
            self._keep(("numbers", name), found)
        numbers: Floats = found
        return numbers

    def aggregate_column(self, key: str) -> Column:
        """What the aggregates of the nodes say under a key."""
        values = (frozenset(each.metadata[key] for each in n.aggregates if key in each.metadata) for n in self.nodes)
        return self._column(("aggregate", key), ((value, value) for value in values))

    @property
    def aggregates(self) -> Column:
        """The aggregates of the nodes."""
        return self._column(
            ("aggregates",), ((tuple(each.name for each in node.aggregates), node.aggregates) for node in self.nodes)
        )

    @property
    def traits(self) -> Column:
        """The traits of the nodes."""
        return self._column(("traits",), ((node.traits, node.traits) for node in self.nodes))

    def key_column(self, plugin: HostFilter) -> Column | None:
        """Returns the rows by the filter's ``host_key``: a value is the first row with that key. None when it gives no keys."""
        name = ("key", plugin)
        if name not in self._derived:
            keys = [plugin.host_key(self.host_state(row)) for row in range(min(self.size, 1))]
            if not keys or keys[0] is NotImplemented:
                self._keep(name, None)
            else:
                self._column(name, ((plugin.host_key(self.host_state(row)), row) for row in range(self.size)))
        found: Column | None = self._derived.get(name)
        return found

    @property
    def by_uuid(self) -> tuple[Sequence[str], Sequence[int]]:
        """The uuids of all nodes in order, and the row of each."""
        found = self._derived.get("by_uuid")
        if found is None:
            pairs = sorted((node.uuid, row) for row, node in enumerate(self.nodes))
            found = tuple(uuid for uuid, _ in pairs), tuple(row for _, row in pairs)
            self._keep("by_uuid", found)
        ordered: tuple[Sequence[str], Sequence[int]] = found
        return ordered

    @property
    def all_rows(self) -> Rows:
        """Every row."""
        found = self._derived.get("all_rows")
        if found is None:
            found = frozen_array(np.arange(self.size, dtype=np.intp))
            self._keep("all_rows", found)
        rows: Rows = found
        return rows

    @property
    def can_host(self) -> npt.NDArray[np.bool_]:
        """Rows on which instances may land at all."""
        found = self._derived.get("can_host")
        if found is None:
            found = frozen_array(np.array([node.can_host for node in self.nodes], dtype=np.bool_))
            self._keep("can_host", found)
        column: npt.NDArray[np.bool_] = found
        return column

    @property
    def all_can_host(self) -> bool:
        """Instances may land on every row."""
        found = self._derived.get("all_can_host")
        if found is None:
            found = bool(self.can_host.all())
            self._keep("all_can_host", found)
        return bool(found)

    def _column(self, name: Hashable, pairs: Iterable[tuple[Hashable, Any]]) -> Column:
        found = self._derived.get(name)
        if found is None:
            codes = np.empty(self.size, dtype=np.intp)
            values: list[Any] = []
            code_of: dict[Hashable, int] = {}
            for row, (key, value) in enumerate(pairs):
                code = code_of.setdefault(key, len(values))
                if code == len(values):
                    values.append(value)
                codes[row] = code
            found = Column(frozen_array(codes), tuple(values))
            self._keep(name, found)
        column: Column = found
        return column

    def _keep(self, name: Hashable, value: Any) -> None:
        if len(self._derived) >= _DERIVED:
            self._derived.clear()
        self._derived[name] = value

    def host_state(self, row: int) -> SnapshotHost:
        """One row by itself."""
        return SnapshotHost(self, row)


class SnapshotHost(NovaNames):
    """One row of a snapshot with Nova's names."""

    __slots__ = ("_fleet", "_row")

    def __init__(self, fleet: Snapshot, row: int) -> None:
        self._fleet = fleet
        self._row = row

    @property
    def host(self) -> str:
        """The agent's name."""
        return self._fleet.nodes[self._row].host

    @property
    def nodename(self) -> str:
        """The node's name."""
        return self._fleet.nodes[self._row].name

    @property
    def uuid(self) -> str:
        """The node's uuid."""
        return self._fleet.nodes[self._row].uuid

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """Instances on the node by uuid."""
        return self._fleet.instances_on(self._row)

    @property
    def num_instances(self) -> int:
        """How many they are."""
        return int(self._fleet.num_instances[self._row])

    @property
    def num_io_ops(self) -> int:
        """How many of them are busy."""
        return int(self._fleet.num_io_ops[self._row])

    @property
    def capacity(self) -> Mapping[str, float]:
        """Resource class -> capacity."""
        row, columns = self._row, self._fleet.capacities
        return MappingProxyType({name: float(column[row]) for name, column in columns.items() if column[row]})

    @property
    def free(self) -> Mapping[str, float]:
        """Resource class -> what is free."""
        return MappingProxyType({name: float(self._fleet.free(name)[self._row]) for name in self.capacity})

    @property
    def service_up(self) -> bool:
        """The agent's heartbeat is seen."""
        return self._fleet.nodes[self._row].up

    @property
    def service_enabled(self) -> bool:
        """Neither the node nor its agent is disabled, and the node is not in maintenance."""
        return self._fleet.nodes[self._row].enabled

    @property
    def disabled_reason(self) -> str:
        """Why it is not enabled; empty otherwise."""
        return self._fleet.nodes[self._row].disabled_reason

    @property
    def can_host(self) -> bool:
        """Instances may land there at all."""
        return self._fleet.nodes[self._row].can_host

    @property
    def properties(self) -> Mapping[str, Any]:
        """The node's properties."""
        return self._fleet.nodes[self._row].properties

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the node's own provider."""
        return self._fleet.nodes[self._row].traits

    @property
    def providers(self) -> Sequence[ProviderState]:
        """The node's providers as the store's last reading has them."""
        return self._fleet.nodes[self._row].own_and_nested

    def fits(self, spec: RequestSpec) -> bool:
        """See :meth:`Fleet.fits`."""
        mask = self._fleet.fits(spec)
        return True if mask is None else bool(mask[self._row])

    def shortage(self, spec: RequestSpec) -> str:
        """Says which request group finds no provider, and for want of what."""
        return self._fleet.shortage(self._row, spec)

    @property
    def aggregates(self) -> Sequence[Aggregate]:
        """The aggregates that the node is in."""
        return self._fleet.nodes[self._row].aggregates


def use_of(used: Iterable[Floats], num_instances: Counts, num_io_ops: Counts, of_flavor: Counts) -> list[Use]:
    """Returns the use of each row from columns that have a value for each of them."""
    columns = (*used, num_instances, num_io_ops, of_flavor)
    return list(zip(*[column.tolist() for column in columns], strict=True))


def plus(column: Any, row: int | Rows, amount: float) -> Any:
    """Returns a read-only copy of the column with ``amount`` added to one row, or to each of several rows."""
    changed = column.copy()
    changed[row] += amount
    changed.flags.writeable = False
    return changed


def _amounts(records: Iterable[InstanceRecord]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in records:
        found.update(each.resources)
    return found


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What was added (or, below zero, taken away) by name; only what differs."""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in before.keys() | after.keys()}
    return {name: change for name, change in changes.items() if change}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
