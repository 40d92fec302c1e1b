# SPDX-License-Identifier: Apache-2.0
"""The scheduler's memory of the fleet: columns and indexes, one writer, immutable snapshots.

Columns are copied on the first write after a snapshot was taken, so a snapshot costs nothing but references, and a reader never
sees a column change. What an instance occupies is counted by its uuid: however often it is told, it counts once.

What the store says is used beyond the known instances (claims of others) is added as ``foreign`` use. It is believed only when
two readings in a row agree on it, because a reading is always a little older than the messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.scheduling.host_names import NovaNames
from moorage.scheduling.interface import Aggregate, Column, InstanceRecord, NodeState, RequestSpec, Rows

__all__ = ["FleetView", "Snapshot", "SnapshotHost"]

_BUCKETS = 256
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
    flavors: Mapping[str, Counts]
    row_of_node: Mapping[str, int]
    rows_of_host: Mapping[str, Rows]
    buckets: tuple[Mapping[str, int], ...]
    on_row: Sequence[Mapping[str, InstanceRecord]]
    derived: dict[Hashable, Any]

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
        capacity = self.capacities.get(resource_class)
        if capacity is None:
            return np.zeros(self.size)
        free: Floats = capacity - self.used[resource_class] - self.foreign[resource_class]
        return free

    def flavor_counts(self, flavorid: str) -> Counts:
        """Instances of a flavor by row."""
        found = self.flavors.get(flavorid)
        return np.zeros(self.size, dtype=np.int64) if found is None else found

    def rows_of_instances(self, uuids: Iterable[str]) -> Rows:
        """Rows of the known ones of these instances."""
        found = {row for uuid in uuids if (row := self.buckets[hash(uuid) % _BUCKETS].get(uuid)) is not None}
        return np.array(sorted(found), dtype=np.intp)

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""
        return {uuid: row for uuid in uuids if (row := self.buckets[hash(uuid) % _BUCKETS].get(uuid)) is not None}

    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        """Rows of the known ones of these agents."""
        found = [self.rows_of_host[host] for host in set(hosts) if host in self.rows_of_host]
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
        values = (node.properties.get(name) for node in self.nodes)
        return self._column(("property", name), ((json.dumps(value, sort_keys=True), value) for value in values))

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
        return MappingProxyType(self._fleet.on_row[self._row])

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


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


class FleetView:
    """The head of the view: written under one lock, read through :meth:`snapshot`. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: dict[str, tuple[int, InstanceRecord]] = {}
        self._homeless: dict[str, InstanceRecord] = {}
        self._last_foreign: dict[str, dict[str, float]] = {}
        self._published: set[int] = set()
        self._snapshot: Snapshot | None = None
        self._build([])

    # -- nodes ----------------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeState]) -> None:
        """Take over what the store says of the nodes. Instances stay where they are by the name of host and node."""
        with self._lock:
            known = [record for _, record in self._records.values()] + list(self._homeless.values())
            self._build(nodes)
            for record in known:
                self._add(record)
            self._count_foreign(nodes)
            self._snapshot = None

    def _build(self, nodes: Sequence[NodeState]) -> None:
        size = len(nodes)
        classes = sorted({name for node in nodes for name in node.capacity})
        self._nodes: tuple[NodeState, ...] = tuple(nodes)
        self._capacities = {
            name: np.array([node.capacity.get(name, 0.0) for node in nodes], dtype=np.float64) for name in classes
        }
        self._used = {name: np.zeros(size) for name in classes}
        self._foreign = {name: np.zeros(size) for name in classes}
        self._available = np.array([node.up and node.enabled and node.can_host for node in nodes], dtype=np.bool_)
        self._counts = np.zeros(size, dtype=np.int64)
        self._io_ops = np.zeros(size, dtype=np.int64)
        self._derived: dict[Hashable, Any] = {}
        self._flavors: dict[str, Counts] = {}
        self._row_of_node = {node.uuid: row for row, node in enumerate(nodes)}
        self._row_of_name = {(node.host, node.name): row for row, node in enumerate(nodes)}
        rows_of_host: dict[str, list[int]] = {}
        for row, node in enumerate(nodes):
            rows_of_host.setdefault(node.host, []).append(row)
        self._rows_of_host = {host: np.array(rows, dtype=np.intp) for host, rows in rows_of_host.items()}
        self._buckets: list[dict[str, int]] = [{} for _ in range(_BUCKETS)]
        self._on_row: list[dict[str, InstanceRecord]] = [{} for _ in nodes]
        self._records, self._homeless = {}, {}
        self._published = set()

    def _count_foreign(self, nodes: Sequence[NodeState]) -> None:
        measured = {
            name: {
                node.uuid: extra
                for row, node in enumerate(nodes)
                if (extra := node.used.get(name, 0) - float(self._used[name][row])) > 0
            }
            for name in self._capacities
        }
        for name, column in self._foreign.items():
            before = self._last_foreign.get(name, {})
            for uuid, extra in measured[name].items():
                column[self._row_of_node[uuid]] = min(extra, before.get(uuid, 0.0))
        self._last_foreign = measured

    # -- instances ------------------------------------------------------------------------------------------------

    def put(self, record: InstanceRecord) -> None:
        """An instance is on that host and node, and nowhere else."""
        with self._lock:
            self._remove(record.uuid)
            self._add(record)
            self._snapshot = None

    def put_many(self, records: Iterable[InstanceRecord]) -> None:
        """As :meth:`put`, for many at once."""
        with self._lock:
            for record in records:
                self.put(record)

    def drop(self, uuid: str) -> bool:
        """An instance is nowhere; False when it was not known."""
        with self._lock:
            found = self._remove(uuid)
            self._snapshot = None
            return found

    def of_host(self, host: str) -> dict[str, InstanceRecord]:
        """The known instances of a host by uuid."""
        with self._lock:
            rows = self._rows_of_host.get(host, ())
            found = {uuid: record for row in rows for uuid, record in self._on_row[row].items()}
            found.update({uuid: record for uuid, record in self._homeless.items() if record.host == host})
            return found

    def get(self, uuid: str) -> InstanceRecord | None:
        """One instance, where known."""
        with self._lock:
            found = self._records.get(uuid)
            return found[1] if found is not None else self._homeless.get(uuid)

    def __len__(self) -> int:
        return len(self._records) + len(self._homeless)

    def _add(self, record: InstanceRecord) -> None:
        row = self._row_of_name.get((record.host, record.node))
        if row is None:
            # Its node is not in the view yet; the next reading of the nodes finds it a place.
            self._homeless[record.uuid] = record
            return
        self._records[record.uuid] = (row, record)
        self._writable_bucket(record.uuid)[record.uuid] = row
        self._writable_row(row)[record.uuid] = record
        self._count(row, record, 1)

    def _remove(self, uuid: str) -> bool:
        if self._homeless.pop(uuid, None) is not None:
            return True
        found = self._records.pop(uuid, None)
        if found is None:
            return False
        row, record = found
        self._writable_bucket(uuid).pop(uuid, None)
        self._writable_row(row).pop(uuid, None)
        self._count(row, record, -1)
        return True

    def _count(self, row: int, record: InstanceRecord, sign: int) -> None:
        for name, amount in record.resources.items():
            if name in self._used:
                self._used[name] = self._writable(self._used[name])
                self._used[name][row] += sign * amount
        self._counts = self._writable(self._counts)
        self._counts[row] += sign
        if record.busy:
            self._io_ops = self._writable(self._io_ops)
            self._io_ops[row] += sign
        column = self._flavors.get(record.flavorid)
        if column is None:
            column = np.zeros(len(self._nodes), dtype=np.int64)
        self._flavors[record.flavorid] = column = self._writable(column)
        column[row] += sign

    def fork(self) -> FleetView:
        """A view of its own with what this one knows now; changes of either do not show in the other."""
        with self._lock:
            other = FleetView()
            other.set_nodes(self._nodes)
            for _, record in self._records.values():
                other.put(record)
            other._foreign = {name: column.copy() for name, column in self._foreign.items()}
            return other

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The fleet as it is now; the same object as long as nothing changes."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = Snapshot(
                    self._nodes,
                    self._capacities,
                    dict(self._used),
                    self._foreign,
                    self._available,
                    self._counts,
                    self._io_ops,
                    dict(self._flavors),
                    self._row_of_node,
                    self._rows_of_host,
                    tuple(self._buckets),
                    tuple(self._on_row),
                    self._derived,
                )
                shared: list[object] = [*self._used.values(), self._counts, self._io_ops, *self._flavors.values()]
                shared += [*self._buckets, *self._on_row]
                self._published = {id(each) for each in shared}
            return self._snapshot

    def _writable(self, column: Any) -> Any:
        """The column itself, or a copy of it when a snapshot holds it."""
        return column.copy() if id(column) in self._published else column

    def _writable_bucket(self, uuid: str) -> dict[str, int]:
        number = hash(uuid) % _BUCKETS
        bucket: dict[str, int] = self._writable(self._buckets[number])
        self._buckets[number] = bucket
        return bucket

    def _writable_row(self, row: int) -> dict[str, InstanceRecord]:
        found: dict[str, InstanceRecord] = self._writable(self._on_row[row])
        self._on_row[row] = found
        return found
