# SPDX-License-Identifier: Apache-2.0
"""The scheduler's memory of the fleet: columns and indexes, one writer, immutable snapshots.

A change goes into the index at once and is noted; what is noted is added to the columns when somebody asks for a snapshot, all
of it at a time, into copies of those columns that it concerns. So a snapshot costs what has changed, and a reader never sees a
column change. What an instance occupies is counted by its uuid: however often it is told, it counts once.

What the store says is used beyond the known instances (claims of others) is added as ``foreign`` use. It is believed only when
two readings in a row agree on it, because a reading is always a little older than the messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.scheduling.digest import instance_digest
from moorage.scheduling.host_names import NovaNames
from moorage.scheduling.instance_index import InstanceIndex, Overlay, Places
from moorage.scheduling.interface import Aggregate, Column, HostFilter, InstanceRecord, NodeState, RequestSpec, Rows

__all__ = ["FleetView", "Snapshot", "SnapshotHost"]

#: Changes that are noted at most before they are added to the columns.
_NOTED = 65_536
#: Kinds of instances (flavor, resources, busy) that are remembered at most between two snapshots.
_KINDS = 4096
#: Flavors whose instances are counted by row all the time; those of others are counted when somebody asks.
_COUNTED_FLAVORS = 256
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
            if len(self.flavors) >= _COUNTED_FLAVORS:
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
                used[name] = _plus(used[name], row, amount)
        flavors = dict(self.flavors)
        flavors[record.flavorid] = _plus(self.flavor_counts(record.flavorid), row, 1)
        places = self.places if isinstance(self.places, Overlay) else Overlay(self.places, {}, {})
        return replace(
            self,
            used=used,
            num_instances=_plus(self.num_instances, row, 1),
            num_io_ops=_plus(self.num_io_ops, row, 1) if record.busy else self.num_io_ops,
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


def _plus(column: Any, row: int, amount: float) -> Any:
    changed = column.copy()
    changed[row] += amount
    return changed


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


class FleetView:
    """The head of the view: written under one lock, read through :meth:`snapshot`. Safe for use by several threads.

    :param tracked: instances are put here. Otherwise there are none, and use is what the store says and what is held.
    """

    def __init__(self, *, tracked: bool = True) -> None:
        self._tracked = tracked
        self._held: dict[str, InstanceRecord] = {}
        self._lock = threading.RLock()
        self._homeless: dict[str, InstanceRecord] = {}
        self._groups: dict[tuple[str, str], set[str]] = {}
        self._last_foreign: dict[str, Floats] = {}
        self._last_rows: dict[str, int] = {}
        self._snapshot: Snapshot | None = None
        self._index = InstanceIndex(0)
        self._nodes: tuple[NodeState, ...] = ()
        self._build([])

    # -- nodes ----------------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeState], *, held: Collection[str] = ()) -> None:
        """Take over what the store says of the nodes. Instances stay where they are by the name of host and node.

        :param held: what was :meth:`held` when the reading began, and is in it therefore.
        """
        with self._lock:
            for uuid in held:
                self.let_go(uuid)
            before = self._nodes
            same = len(before) == len(nodes) and all(
                old.uuid == new.uuid and old.host == new.host and old.name == new.name
                for old, new in zip(before, nodes, strict=True)
            )
            if same and self._capacities.keys() == {name for node in nodes for name in node.capacity}:
                self._fold()
                self._nodes = tuple(nodes)
                self._read_columns()
                # Places for those whose node is told by another name now are looked for again.
                homeless, self._homeless = self._homeless, {}
                for record in homeless.values():
                    self._add(record)
                self._fold()
            else:
                known = [*self._index.records(), *self._homeless.values()]
                self._build(nodes)
                for record in known:
                    self._add(record)
                self._fold()
                for record in self._held.values():
                    self._hold(record, 1)
            self._count_foreign()
            self._snapshot = None

    def _build(self, nodes: Sequence[NodeState]) -> None:
        size = len(nodes)
        self._nodes = tuple(nodes)
        self._read_columns()
        self._used = {name: np.zeros(size) for name in self._capacities}
        self._counts = np.zeros(size, dtype=np.int64)
        self._io_ops = np.zeros(size, dtype=np.int64)
        self._flavors: dict[str, Counts] = {}
        self._row_of_node = {node.uuid: row for row, node in enumerate(nodes)}
        self._row_of_name: dict[str, dict[str, int]] = {}
        for node in nodes:
            self._row_of_name.setdefault(node.host, {})[node.name] = self._row_of_node[node.uuid]
        self._rows_of_host = {
            host: np.array(sorted(rows.values()), dtype=np.intp) for host, rows in self._row_of_name.items()
        }
        self._index = InstanceIndex(size)
        self._homeless, self._groups = {}, {}
        self._digests: dict[str, tuple[int, str]] = {}
        self._forget_kinds()

    def _read_columns(self) -> None:
        nodes = self._nodes
        classes = sorted({name for node in nodes for name in node.capacity})
        self._capacities = {
            name: np.array([node.capacity.get(name, 0.0) for node in nodes], dtype=np.float64) for name in classes
        }
        self._foreign = {name: np.zeros(len(nodes)) for name in classes}
        self._available = np.array([node.up and node.enabled and node.can_host for node in nodes], dtype=np.bool_)
        self._derived: dict[Hashable, Any] = {}

    def _count_foreign(self) -> None:
        measured = {}
        for name, used in self._used.items():
            stored = np.array([node.used.get(name, 0) for node in self._nodes], dtype=np.float64)
            measured[name] = np.maximum(stored - used, 0.0) if self._tracked else stored
            self._foreign[name] = np.minimum(measured[name], self._foreign_before(name)) if self._tracked else stored
        self._last_foreign, self._last_rows = measured, self._row_of_node

    def _foreign_before(self, name: str) -> Floats:
        """What the last reading found, by today's rows."""
        before = self._last_foreign.get(name)
        if before is None:
            return np.zeros(len(self._nodes))
        if self._last_rows is self._row_of_node:
            return before
        rows = [self._last_rows.get(node.uuid, -1) for node in self._nodes]
        return np.array([before[row] if row >= 0 else 0.0 for row in rows], dtype=np.float64)

    # -- instances ------------------------------------------------------------------------------------------------

    def put(self, record: InstanceRecord) -> None:
        """An instance is on that host and node, and nowhere else."""
        with self._lock:
            self._snapshot = None
            self._add(record)

    def put_many(self, records: Iterable[InstanceRecord]) -> None:
        """As :meth:`put`, for many at once."""
        with self._lock:
            self._snapshot = None
            add = self._add
            for record in records:
                add(record)

    def drop(self, uuid: str) -> bool:
        """An instance is nowhere; False when it was not known."""
        with self._lock:
            self._snapshot = None
            return self._remove(uuid)

    def hold(self, record: InstanceRecord) -> None:
        """Count what was just claimed as used until a reading of the store has it; it does not become an instance here."""
        with self._lock:
            self.let_go(record.uuid)
            self._held[record.uuid] = record
            self._hold(record, 1)

    def held(self) -> list[str]:
        """What is held now."""
        with self._lock:
            return list(self._held)

    def let_go(self, uuid: str) -> None:
        """Hold it no more; harmless when it is not held."""
        with self._lock:
            record = self._held.pop(uuid, None)
            if record is not None:
                self._hold(record, -1)

    def _hold(self, record: InstanceRecord, sign: int) -> None:
        row = self._row_of_name.get(record.host, {}).get(record.node)
        if row is None:
            return
        self._snapshot = None
        for name, amount in record.resources.items():
            if name in self._used:
                self._used[name] = _plus(self._used[name], row, sign * amount)

    def of_host(self, host: str) -> dict[str, InstanceRecord]:
        """The known instances of a host by uuid."""
        with self._lock:
            rows = self._row_of_name.get(host, {}).values()
            if len(rows) == 1 and not self._homeless:
                return self._index.on_row(*rows).copy()
            found = {uuid: record for row in rows for uuid, record in self._index.on_row(row).items()}
            found.update({uuid: record for uuid, record in self._homeless.items() if record.host == host})
            return found

    def digest(self, host: str) -> tuple[int, str]:
        """How many instances of a host are known, and their digest; computed once after each change."""
        with self._lock:
            found = self._digests.get(host)
            if found is None:
                known = self.of_host(host)
                digest = instance_digest((each.uuid, each.flavorid) for each in known.values())
                found = self._digests[host] = (len(known), digest)
            return found

    def get(self, uuid: str) -> InstanceRecord | None:
        """One instance, where known."""
        found = self._index.get(uuid)
        return found if found is not None else self._homeless.get(uuid)

    def group_members(self, project_id: str, group: str) -> frozenset[str]:
        """The known instances of a project's server group."""
        with self._lock:
            return frozenset(self._groups.get((project_id, group), ()))

    def __len__(self) -> int:
        return len(self._index) + len(self._homeless)

    def _add(self, record: InstanceRecord) -> None:
        uuid = record.uuid
        index = self._index
        names = self._row_of_name.get(record.host)
        row = None if names is None else names.get(record.node)
        if row is None and names is not None and not record.node and len(names) == 1:
            # The seed's messages do not name the node; a host mostly has one.
            (row,) = names.values()
        before = index.row_of(uuid)
        if before is None and row is not None and not self._homeless and not record.server_group:
            # What happens all the time.
            self._digests.pop(record.host, None)
            index.put(record, row)
            self._note(row, record, 1)
            return
        self._change(record, before, row)

    def _change(self, record: InstanceRecord, before: int | None, row: int | None) -> None:
        uuid, index = record.uuid, self._index
        self._digests.pop(record.host, None)
        if before is not None and before == row:
            known = index.on_row(row)[uuid]
            index.put(record, row)
            if known.flavorid == record.flavorid and known.resources is record.resources and known.busy == record.busy:
                if known.server_group != record.server_group:
                    self._group(known, record)
                return
            self._note(row, known, -1)
            self._note(row, record, 1)
            self._group(known, record)
            return
        if before is not None or uuid in self._homeless:
            self._remove(uuid)
        if row is None:
            # Its node is not in the view yet; the next reading of the nodes finds it a place.
            self._homeless[uuid] = record
            return
        index.put(record, row)
        self._note(row, record, 1)
        self._group(None, record)

    def _remove(self, uuid: str) -> bool:
        found = self._index.pop(uuid)
        if found is None:
            homeless = self._homeless.pop(uuid, None)
            if homeless is not None:
                self._digests.pop(homeless.host, None)
            return homeless is not None
        row, record = found
        self._digests.pop(record.host, None)
        self._note(row, record, -1)
        if record.server_group:
            self._group(record, None)
        return True

    def _group(self, before: InstanceRecord | None, after: InstanceRecord | None) -> None:
        if before is not None and before.server_group:
            key = (before.project_id, before.server_group)
            members = self._groups.get(key, set())
            members.discard(before.uuid)
            if not members:
                self._groups.pop(key, None)
        if after is not None and after.server_group:
            self._groups.setdefault((after.project_id, after.server_group), set()).add(after.uuid)

    # -- from changes to columns ----------------------------------------------------------------------------------

    def _note(self, row: int, record: InstanceRecord, sign: int) -> None:
        """One more (or less) instance of that kind on the row."""
        known = self._kinds.get(id(record.resources))
        if known is not None and known[0] == record.flavorid and known[1] == record.busy:
            kind = known[2]
        else:
            if len(self._examples) >= _KINDS:
                self._fold()
                self._forget_kinds()
            # The record keeps its resources alive, so that their id stays theirs.
            kind = len(self._examples)
            self._examples.append(record)
            self._kinds[id(record.resources)] = (record.flavorid, record.busy, kind)
        self._noted_rows.append(row)
        self._noted_kinds.append(kind if sign > 0 else ~kind)
        if len(self._noted_rows) >= _NOTED:
            self._fold()
            if self._index.trim():
                self._snapshot = None

    def _forget_kinds(self) -> None:
        self._kinds: dict[int, tuple[str, bool, int]] = {}
        self._examples: list[InstanceRecord] = []
        self._noted_rows: list[int] = []
        self._noted_kinds: list[int] = []

    def _fold(self) -> None:
        """Add what was noted to copies of the columns that it concerns."""
        if not self._noted_rows:
            return
        rows = np.array(self._noted_rows, dtype=np.intp)
        noted = np.array(self._noted_kinds, dtype=np.int64)
        self._noted_rows, self._noted_kinds = [], []
        signs = np.where(noted < 0, -1, 1)
        kinds = np.where(noted < 0, ~noted, noted)
        present = np.unique(kinds)
        examples = [self._examples[kind] for kind in present]
        where = np.zeros(int(present[-1]) + 1, dtype=np.intp)
        where[present] = np.arange(len(present))
        which = where[kinds]
        self._counts = _added(self._counts, rows, signs)
        busy = np.array([each.busy for each in examples], dtype=np.bool_)[which]
        if busy.any():
            self._io_ops = _added(self._io_ops, rows[busy], signs[busy])
        for name in self._used:
            amounts = np.array([each.resources.get(name, 0) for each in examples], dtype=np.float64)
            if amounts.any():
                self._used[name] = _added(self._used[name], rows, amounts[which] * signs)
        self._fold_flavors(examples, which, rows, signs)

    def _fold_flavors(self, examples: Sequence[InstanceRecord], which: Rows, rows: Rows, signs: Counts) -> None:
        numbers: dict[str, list[int]] = {}
        for number, each in enumerate(examples):
            numbers.setdefault(each.flavorid, []).append(number)
        for flavorid, of_flavor in numbers.items():
            column = self._flavors.get(flavorid)
            if column is None:
                if len(self._flavors) >= _COUNTED_FLAVORS:
                    continue
                column = np.zeros(len(self._nodes), dtype=np.int64)
            mine = which == of_flavor[0] if len(of_flavor) == 1 else np.isin(which, of_flavor)
            self._flavors[flavorid] = _added(column, rows[mine], signs[mine])

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The fleet as it is now; the same object as long as nothing changes."""
        found = self._snapshot
        if found is not None:
            return found
        with self._lock:
            if self._snapshot is None:
                self._fold()
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
                    self._index.view(),
                    self._derived,
                )
            return self._snapshot


def _added(column: Any, rows: Rows, amounts: Any) -> Any:
    """A copy of the column with the amounts added to those rows, of which some may stand there several times."""
    changed = column.copy()
    np.add.at(changed, rows, amounts)
    return changed
