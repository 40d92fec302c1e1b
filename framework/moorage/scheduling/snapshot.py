# SPDX-License-Identifier: Apache-2.0
"""The fleet at one moment: what a request is decided by."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.scheduling.host_names import NovaNames
from moorage.scheduling.instance_index import Overlay, Places
from moorage.scheduling.interface import Aggregate, Column, HostFilter, InstanceRecord, NodeState, RequestSpec, Rows

__all__ = ["COUNTED_FLAVORS", "Counts", "Floats", "Snapshot", "SnapshotHost", "plus"]

#: Flavors whose instances are counted by row all the time; those of others are counted when somebody asks.
COUNTED_FLAVORS = 256
#: How many columns that follow from requests are kept.
_DERIVED = 1024
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The fleet at one moment; see :class:`moorage.scheduling.interface.Fleet`."""

    nodes: Sequence[NodeState]
    capacities: Mapping[str, Floats]
    used: Mapping[str, Floats]
    foreign: Mapping[str, Floats]
    available: npt.NDArray[np.bool_]
    num_instances: Counts
    num_io_ops: Counts
    flavors: dict[str, Counts]
    row_of_node: Mapping[str, int]
    rows_of_host: Mapping[str, Rows]
    places: Places
    derived: dict[Hashable, Any]
    #: What is free, computed at the first use.
    frees: dict[str, Floats] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.nodes)

    def capacity(self, resource_class: str) -> Floats:
        """Capacity of a class by row."""
        found = self.capacities.get(resource_class)
        return np.zeros(self.size) if found is None else found

    def free(self, resource_class: str) -> Floats:
        """Free amount of a class by row."""
        free = self.frees.get(resource_class)
        if free is None:
            capacity = self.capacities.get(resource_class)
            if capacity is None:
                return np.zeros(self.size)
            free = capacity - self.used[resource_class] - self.foreign[resource_class]
            self.frees[resource_class] = free
        return free

    def flavor_counts(self, flavorid: str) -> Counts:
        """Instances of a flavor by row."""
        found = self.flavors.get(flavorid)
        if found is None:
            found = np.zeros(self.size, dtype=np.int64)
            if len(self.flavors) >= COUNTED_FLAVORS:
                for row in range(self.size):
                    here = self.places.on_row(row)
                    found[row] = sum(each.flavorid == flavorid for each in here.values())
                self.flavors[flavorid] = found
        return found

    def rows_of_instances(self, uuids: Iterable[str]) -> Rows:
        """Rows of the known ones of these instances."""
        return np.array(sorted(set(self.places.locate(uuids).values())), dtype=np.intp)

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""
        return self.places.locate(uuids)

    def instances_on(self, row: int) -> Mapping[str, InstanceRecord]:
        """The instances of a row by uuid."""
        return self.places.on_row(row)

    def with_placed(self, record: InstanceRecord, row: int) -> Snapshot:
        """The same fleet with one instance more; for trying out."""
        used = dict(self.used)
        for name, amount in record.resources.items():
            if name in used:
                used[name] = plus(used[name], row, amount)
        flavors = dict(self.flavors)
        flavors[record.flavorid] = plus(self.flavor_counts(record.flavorid), row, 1)
        places = self.places if isinstance(self.places, Overlay) else Overlay(self.places, {}, {})
        return replace(
            self,
            used=used,
            num_instances=plus(self.num_instances, row, 1),
            num_io_ops=plus(self.num_io_ops, row, 1) if record.busy else self.num_io_ops,
            flavors=flavors,
            places=places.with_one(record, row),
            frees={},
        )

    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        """Rows of the known ones of these agents."""
        found = [self.rows_of_host[host] for host in set(hosts) if host in self.rows_of_host]
        return np.sort(np.concatenate(found)) if found else np.array([], dtype=np.intp)

    def rows_of_folded_hosts(self, hosts: Iterable[str]) -> Rows:
        """As :meth:`rows_of_hosts`, without regard to case."""
        names = self.derived.get("folded")
        if names is None:
            names = {}
            for host, rows in self.rows_of_host.items():
                names.setdefault(host.casefold(), []).append(rows)
            self._keep("folded", names)
        found = [rows for host in {host.casefold() for host in hosts} for rows in names.get(host, ())]
        return np.sort(np.concatenate(found)) if found else np.array([], dtype=np.intp)

    def rows_of_nodes(self, uuids: Iterable[str]) -> Rows:
        """Rows of the known ones of these nodes."""
        return np.array(
            sorted({row for uuid in uuids if (row := self.row_of_node.get(uuid)) is not None}), dtype=np.intp
        )

    def resolved(self, spec: RequestSpec) -> RequestSpec:
        """The request with the nodes of its server group's members filled in."""
        group = spec.server_group
        if group is None:
            return spec
        nodes = tuple(self.nodes[row].uuid for row in self.rows_of_instances(group.members))
        return replace(spec, server_group=replace(group, nodes=nodes))

    def property_column(self, name: str) -> Column:
        """A property of the nodes."""
        if name not in self._property_names:
            # Whoever asks for names that no node has must not make the scheduler look at each node for each of them.
            return self._column(("no property",), ((None, None) for _ in self.nodes))
        values = (node.properties.get(name) for node in self.nodes)
        return self._column(("property", name), ((json.dumps(value, sort_keys=True), value) for value in values))

    @property
    def _property_names(self) -> frozenset[str]:
        found = self.derived.get("property_names")
        if found is None:
            found = frozenset().union(*(node.properties for node in self.nodes))
            self._keep("property_names", found)
        names: frozenset[str] = found
        return names

    def property_numbers(self, name: str) -> Floats:
        """A property as a number."""
        found = self.derived.get(("numbers", name))
        if found is None:
            found = np.array([_number(node.properties.get(name)) for node in self.nodes], dtype=np.float64)
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

    def key_column(self, plugin: HostFilter) -> Column | None:
        """The rows by the filter's ``host_key``: a value is the first row with that key. None when it gives no keys."""
        name = ("key", plugin)
        if name not in self.derived:
            keys = [plugin.host_key(self.host_state(row)) for row in range(min(self.size, 1))]
            if not keys or keys[0] is NotImplemented:
                self._keep(name, None)
            else:
                self._column(name, ((plugin.host_key(self.host_state(row)), row) for row in range(self.size)))
        found: Column | None = self.derived.get(name)
        return found

    @property
    def all_rows(self) -> Rows:
        """Every row."""
        found = self.derived.get("all_rows")
        if found is None:
            found = np.arange(self.size, dtype=np.intp)
            found.flags.writeable = False
            self._keep("all_rows", found)
        rows: Rows = found
        return rows

    @property
    def can_host(self) -> npt.NDArray[np.bool_]:
        """Rows on which instances may land at all."""
        found = self.derived.get("can_host")
        if found is None:
            found = np.array([node.can_host for node in self.nodes], dtype=np.bool_)
            self._keep("can_host", found)
        column: npt.NDArray[np.bool_] = found
        return column

    @property
    def all_can_host(self) -> bool:
        """Instances may land on every row."""
        found = self.derived.get("all_can_host")
        if found is None:
            found = bool(self.can_host.all())
            self._keep("all_can_host", found)
        return bool(found)

    def _column(self, name: Hashable, pairs: Iterable[tuple[Hashable, Any]]) -> Column:
        found = self.derived.get(name)
        if found is None:
            codes = np.empty(self.size, dtype=np.intp)
            values: list[Any] = []
            code_of: dict[Hashable, int] = {}
            for row, (key, value) in enumerate(pairs):
                code = code_of.setdefault(key, len(values))
                if code == len(values):
                    values.append(value)
                codes[row] = code
            found = Column(codes, tuple(values))
            self._keep(name, found)
        column: Column = found
        return column

    def _keep(self, name: Hashable, value: Any) -> None:
        if len(self.derived) >= _DERIVED:
            self.derived.clear()
        self.derived[name] = value

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
        return MappingProxyType(self._fleet.places.on_row(self._row))

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
        return {name: float(column[self._row]) for name, column in self._fleet.capacities.items() if column[self._row]}

    @property
    def free(self) -> Mapping[str, float]:
        """Resource class -> what is free."""
        return {name: float(self._fleet.free(name)[self._row]) for name in self.capacity}

    @property
    def service_up(self) -> bool:
        """The agent's heartbeat is seen."""
        return self._fleet.nodes[self._row].up

    @property
    def service_enabled(self) -> bool:
        """The agent is not disabled."""
        return self._fleet.nodes[self._row].enabled

    @property
    def can_host(self) -> bool:
        """Instances may land there at all."""
        return self._fleet.nodes[self._row].can_host

    @property
    def properties(self) -> Mapping[str, Any]:
        """The node's properties."""
        return self._fleet.nodes[self._row].properties

    @property
    def aggregates(self) -> Sequence[Aggregate]:
        """The aggregates that the node is in."""
        return self._fleet.nodes[self._row].aggregates


def plus(column: Any, row: int, amount: float) -> Any:
    """A copy of the column with that much more on one row."""
    changed = column.copy()
    changed[row] += amount
    return changed


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
