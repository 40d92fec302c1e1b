# SPDX-License-Identifier: Apache-2.0
"""Keeps the fleet in the scheduler's memory, as columns and indexes. It has one writer, and readers get immutable snapshots.

A change is put into the index at once, and noted. All noted changes are added to the columns together, when a snapshot is made. A
column that a snapshot has is copied before it is changed, so a reader never sees a column change. A column that no snapshot has is
changed in place. So samples, which copy their own rows only, cost the same for a fleet of any size. Instances are counted by uuid:
an instance that is reported several times counts once.

The store may have more use than the known instances have (claims of others). The difference is added as ``foreign`` use, if two
readings in a row agree on it: a reading is always a little older than the messages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage import threads
from moorage.read_only import frozen_array
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.instance_index import InstanceIndex
from moorage.scheduling.interface import ExcludedTargets, FleetChanges, InstanceRecord, NodeState, Rows
from moorage.scheduling.provider_columns import ProviderColumns, ProviderUse
from moorage.scheduling.sample import Sample
from moorage.scheduling.snapshot import COUNTED_FLAVORS, Counts, Floats, Snapshot, Use, use_of

__all__ = ["FleetView", "Moment"]

#: A moment of a view: an object for the present era, and the number of row changes since the era began.
Moment = tuple[object, int]
#: Names of the counts by row: all instances, and busy instances.
_INSTANCES, _BUSY = "instances", "busy"
#: Changes that are noted at most before they are added to the columns, and changed rows that are remembered at most.
_NOTED = 65_536
#: Up to so many noted changes are added one by one, which takes less time than array operations.
_FEW = 64
#: Kinds of instances (flavor, resources, busy) that are remembered between two snapshots, at most.
_KINDS = 4096


class _Host:
    """Holds the nodes of one agent, and the digest of its instances until they change."""

    __slots__ = ("digest", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.digest: tuple[int, str] | None = None


class FleetView:
    """The view of the fleet: changed under one lock, read through :meth:`snapshot`. Safe for use by several threads.

    :param tracked: the view has instances. Otherwise use is what the store has, and what is held.
    :param step_rule: ``[allocation] step_size_rule``.
    """

    def __init__(self, *, tracked: bool = True, step_rule: str = "seed") -> None:
        self._tracked = tracked
        self._step_rule = step_rule
        #: Claims on providers that no reading has yet.
        self._use = ProviderUse()
        self._held: dict[str, InstanceRecord] = {}
        self._lock = threads.rlock()
        self._homeless: dict[str, InstanceRecord] = {}
        self._groups: dict[tuple[str, str], set[str]] = {}
        self._last_foreign: dict[str, Floats] = {}
        self._last_rows: dict[str, int] = {}
        self._snapshot: Snapshot | None = None
        #: The fleet without instances, for columns of nodes alone; None: the nodes have changed since it was made.
        self._bare: Snapshot | None = None
        #: The states that were last applied to the nodes; None: nodes were read since.
        self._unavailable: ExcludedTargets | None = None
        #: The rows whose use has changed since the era began. An era ends when more than use changes.
        self._changed_rows: list[int] = []
        self._era = object()
        self._index = InstanceIndex(0)
        self._nodes: tuple[NodeState, ...] = ()
        self._build([])

    # -- nodes ----------------------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Sequence[NodeState], *, held: Collection[str] = ()) -> None:
        """Takes the nodes over that were read from the store. Instances keep their place by the names of host and node.

        :param held: what :meth:`held` returned when the reading began: the reading has these claims.
        """
        with self._lock:
            self._read_held(held)
            before = self._nodes
            same = len(before) == len(nodes) and all(
                old.uuid == new.uuid and old.host == new.host and old.name == new.name
                for old, new in zip(before, nodes, strict=True)
            )
            if same and self._capacities.keys() == {name for node in nodes for name in node.capacity}:
                self._fold()
                self._nodes = tuple(nodes)
                self._read_columns()
                self._place_homeless()
            else:
                known = [*self._index.records(), *self._homeless.values()]
                self._build(nodes)
                for record in known:
                    self._add(record)
                self._fold()
                for record in self._held.values():
                    self._hold(record, 1)
            self._count_foreign()
            self._unavailable = None
            self._snapshot = None
            self._begin_era()

    def change_nodes(self, changes: FleetChanges, *, held: Collection[str] = ()) -> None:
        """Takes nodes over that changed in the store since the last reading. The cost depends on the number of changes.

        :param held: as for :meth:`set_nodes`.
        """
        with self._lock:
            rows = [self._row_of_node.get(node.uuid) for node in changes.changed]
            replaced = {
                row: self._with_states(node)
                for row, node in zip(rows, changes.changed, strict=True)
                if row is not None and self._is_same_place(row, node)
            }
            if len(replaced) < len(rows) or not changes.removed.isdisjoint(self._row_of_node):
                known = {node.uuid: node for node in self._nodes if node.uuid not in changes.removed}
                known |= {node.uuid: node for node in changes.changed}
                self.set_nodes(sorted(known.values(), key=_uuid), held=held)
                return
            self._read_held(held)
            self._fold()
            if replaced:
                nodes = list(self._nodes)
                for row, node in replaced.items():
                    nodes[row] = node
                self._nodes = tuple(nodes)
                self._change_columns(np.array(list(replaced), dtype=np.intp), list(replaced.values()))
                self._place_homeless()
            self._count_foreign()
            self._snapshot = None
            self._begin_era()

    def _read_held(self, uuids: Collection[str]) -> None:
        """Forgets the held claims that the present reading has."""
        self._use.read(uuids)
        for uuid in uuids:
            self._let_go(uuid)

    def _is_same_place(self, row: int, node: NodeState) -> bool:
        """Returns whether the row has the node's host and name, and all classes of the node have columns."""
        before = self._nodes[row]
        return (before.host, before.name) == (node.host, node.name) and node.capacity.keys() <= self._capacities.keys()

    def _with_states(self, node: NodeState) -> NodeState:
        """Returns the node with the states that were last applied. A host without an agent is down in any case."""
        return node if self._unavailable is None or not node.up else self._unavailable.applied(node)

    def _place_homeless(self) -> None:
        """Puts instances whose node was unknown on their nodes, if these are known now."""
        homeless, self._homeless = self._homeless, {}
        for record in homeless.values():
            self._add(record)
        self._fold()

    def set_unavailable(self, unavailable: ExcludedTargets) -> None:
        """Applies the states of agents and nodes that were just read. Costs nothing if nothing has changed."""
        with self._lock:
            if unavailable == self._unavailable:
                return
            self._unavailable = unavailable
            nodes = tuple(map(unavailable.applied, self._nodes))
            if all(map(operator.is_, nodes, self._nodes)):
                return
            self._nodes = nodes
            self._read_availability()
            self._snapshot = None
            self._begin_era()

    def down_hosts(self) -> frozenset[str]:
        """Returns the hosts whose agents were down when the states were last read."""
        unavailable = self._unavailable
        return frozenset() if unavailable is None else unavailable.down

    def _build(self, nodes: Sequence[NodeState]) -> None:
        size = len(nodes)
        self._nodes = tuple(nodes)
        self._read_columns()
        self._used = {name: frozen_array(np.zeros(size)) for name in self._capacities}
        self._totals = {name: frozen_array(np.zeros(size, dtype=np.int64)) for name in (_INSTANCES, _BUSY)}
        self._flavors: dict[str, Counts] = {}
        #: The columns that no snapshot has.
        self._own: list[npt.NDArray[Any]] = []
        self._row_of_node = {node.uuid: row for row, node in enumerate(nodes)}
        self._hosts: dict[str, _Host] = {}
        for node in nodes:
            self._host(node.host).rows[node.name] = self._row_of_node[node.uuid]
        self.rows_of_host: Mapping[str, Rows] = MappingProxyType(
            {
                host: frozen_array(np.array(sorted(each.rows.values()), dtype=np.intp))
                for host, each in self._hosts.items()
            }
        )
        self._index = InstanceIndex(size)
        self._homeless, self._groups = {}, {}
        self._forget_kinds()

    def _read_columns(self) -> None:
        nodes = self._nodes
        classes = sorted({name for node in nodes for name in node.capacity})
        self._capacities = MappingProxyType({name: _column(nodes, "capacity", name) for name in classes})
        #: What the store says is used.
        self._stored = {name: _column(nodes, "used", name) for name in classes}
        self._foreign = {name: frozen_array(np.zeros(len(nodes))) for name in classes}
        self._read_availability()

        self._nested = frozen_array(np.array([len(node.providers) > 1 for node in nodes], dtype=np.bool_))
        self._any_nested = bool(self._nested.any())
        self._providers: dict[str, ProviderColumns] = {}

    def _read_availability(self) -> None:
        self._available = frozen_array(np.array([_is_available(node) for node in self._nodes], dtype=np.bool_))
        self._derived: dict[Hashable, Any] = {}
        self._bare = None

    def _change_columns(self, rows: Rows, nodes: Sequence[NodeState]) -> None:
        """Write the values of some rows into copies of the columns."""
        self._capacities = MappingProxyType(
            {name: _changed(column, rows, nodes, "capacity", name) for name, column in self._capacities.items()}
        )
        self._stored = {name: _changed(column, rows, nodes, "used", name) for name, column in self._stored.items()}
        available, nested = self._available.copy(), self._nested.copy()
        available[rows] = [_is_available(node) for node in nodes]
        nested[rows] = [len(node.providers) > 1 for node in nodes]
        self._available, self._nested = frozen_array(available), frozen_array(nested)
        self._any_nested = bool(nested.any())
        providers = self._providers.get("columns")
        changed = None if providers is None else providers.changed(rows, nodes)
        self._providers = {} if changed is None else {"columns": changed}
        self._derived = {}
        self._bare = None

    def _count_foreign(self) -> None:
        measured, foreign = {}, {}
        for name, used in self._used.items():
            stored = self._stored[name]
            measured[name] = np.maximum(stored - used, 0.0) if self._tracked else stored
            agreed = np.minimum(measured[name], self._foreign_before(name)) if self._tracked else stored
            foreign[name] = frozen_array(agreed)
        self._foreign, self._bare = foreign, None
        self._last_foreign, self._last_rows = measured, self._row_of_node

    def limit_foreign(self) -> None:
        """Count no use as foreign that the known instances may explain by now.

        A reading may have had an instance before the message about it came. If it is another one that the reading did not have,
        the view now offers room that is taken: so this is for the moment before a refusal, where the store decides in the end.
        """
        if not self._tracked:
            return
        with self._lock:
            self._fold()
            limited = {
                name: np.minimum(foreign, np.maximum(self._stored[name] - self._used[name], 0.0))
                for name, foreign in self._foreign.items()
            }
            if any((limited[name] < foreign).any() for name, foreign in self._foreign.items()):
                self._foreign = {name: frozen_array(foreign) for name, foreign in limited.items()}
                self._snapshot = self._bare = None
                self._begin_era()

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
            if record.holds:
                self._use.hold(record.uuid, record.holds)
            self._add(record)

    def put_many(self, records: Sequence[InstanceRecord]) -> None:
        """Puts many instances whose records have no ``holds``; see :meth:`put`."""
        with self._lock:
            self._snapshot = None
            if not self._add_new(records):
                for record in records:
                    self._add(record)

    def drop(self, uuid: str) -> bool:
        """An instance is nowhere; False when it was not known."""
        with self._lock:
            self._snapshot = None
            self._use.release(uuid)
            return self._remove(uuid)

    def hold(self, record: InstanceRecord) -> None:
        """Count what was just claimed as used until a reading of the store has it; it does not become an instance here."""
        with self._lock:
            self._let_go(record.uuid)
            self._held[record.uuid] = record
            if record.holds:
                self._use.hold(record.uuid, record.holds)
            self._hold(record, 1)

    def held(self) -> list[str]:
        """What is held now."""
        with self._lock:
            return [*self._held, *self._use.held()]

    def let_go(self, uuid: str) -> None:
        """Hold it no more; harmless when it is not held."""
        with self._lock:
            if self._use.release(uuid):
                self._snapshot = None
            self._let_go(uuid)

    def _let_go(self, uuid: str) -> None:
        record = self._held.pop(uuid, None)
        if record is not None:
            self._hold(record, -1)

    def _hold(self, record: InstanceRecord, sign: int) -> None:
        host = self._hosts.get(record.host)
        row = None if host is None else host.rows.get(record.node)
        if row is None:
            return
        self._snapshot = None
        self._changed_rows.append(row)
        for name, amount in record.resources.items():
            if name in self._used:
                self._changeable(self._used, name)[row] += sign * amount
        self._fold_if_many()

    def overcounted(self) -> list[str]:
        """Returns the hosts with a node whose known instances use more than the store had at the last reading."""
        with self._lock:
            self._fold()
            more = np.zeros(len(self._nodes), dtype=np.bool_)
            for name, used in self._used.items():
                more |= used > self._stored[name]
            return sorted({self._nodes[row].host for row in np.flatnonzero(more)})

    def of_host(self, host: str) -> dict[str, InstanceRecord]:
        """Returns the known instances of a host by uuid."""
        with self._lock:
            rows = self._host(host).rows.values()
            if len(rows) == 1 and not self._homeless:
                return self._index.on_row(*rows).copy()
            found = {uuid: record for row in rows for uuid, record in self._index.on_row(row).items()}
            found.update({uuid: record for uuid, record in self._homeless.items() if record.host == host})
            return found

    def digest(self, host: str) -> tuple[int, str]:
        """Returns how many instances of a host are known, and their digest; computed once after each change."""
        with self._lock:
            of_host = self._host(host)
            if of_host.digest is None:
                known = self.of_host(host)
                digest = instance_digest((each.uuid, each.flavorid) for each in known.values())
                of_host.digest = (len(known), digest)
            return of_host.digest

    def get(self, uuid: str) -> InstanceRecord | None:
        """One instance, where known."""
        found = self._index.get(uuid)
        return found if found is not None else self._homeless.get(uuid)

    def group_members(self, project_id: str, group: str) -> frozenset[str]:
        """Returns the known instances of a project's server group."""
        with self._lock:
            return frozenset(self._groups.get((project_id, group), ()))

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    @property
    def tracked(self) -> bool:
        """Returns whether the view counts instances. Otherwise it knows only the use of resources."""
        return self._tracked

    @property
    def any_nested(self) -> bool:
        """Whether a node has several providers."""
        return self._any_nested

    def __len__(self) -> int:
        return len(self._index) + len(self._homeless)

    def _host(self, name: str) -> _Host:
        found = self._hosts.get(name)
        if found is None:
            found = self._hosts[name] = _Host()
        return found

    def _add(self, record: InstanceRecord) -> None:
        host = self._hosts.get(record.host)
        if host is None:
            host = self._host(record.host)
        row = host.rows.get(record.node)
        if row is None and not record.node and len(host.rows) == 1:
            # The seed's messages do not name the node; a host mostly has one.
            (row,) = host.rows.values()
        if row is not None and not self._homeless and not record.server_group and self._index.add(record, row):
            # What happens all the time.
            host.digest = None
            self._note(row, None, record)
            return
        self._change(record, self._index.row_of(record.uuid), row)

    def _add_new(self, records: Sequence[InstanceRecord]) -> bool:
        """Adds instances that the view does not have, all on nodes that it has; otherwise returns False and adds none."""
        hosts, rows = self._hosts, []
        for record in records:
            host = hosts.get(record.host)
            row = None if host is None else host.rows.get(record.node)
            if host is None or row is None:
                return False
            host.digest = None
            rows.append(row)
        if self._homeless or not self._index.add_many(records, rows):
            return False
        self._note_new(records, rows)
        for record in records:
            if record.server_group:
                self._group(None, record)
        return True

    def _change(self, record: InstanceRecord, before: int | None, row: int | None) -> None:
        uuid, index = record.uuid, self._index
        self._host(record.host).digest = None
        if before is not None and before == row:
            known = index.on_row(row)[uuid]
            index.put(record, row)
            if known.flavorid == record.flavorid and known.resources is record.resources and known.busy == record.busy:
                if known.server_group != record.server_group:
                    self._group(known, record)
                return
            self._note(row, known, record)
            self._group(known, record)
            return
        if before is not None or uuid in self._homeless:
            self._use.release(uuid)
            self._remove(uuid)
            if record.holds:
                self._use.hold(uuid, record.holds)
        if row is None:
            # Its node is not in the view yet; the next reading of the nodes finds it a place.
            self._homeless[uuid] = record
            return
        index.put(record, row)
        self._note(row, None, record)
        self._group(None, record)

    def _remove(self, uuid: str) -> bool:
        found = self._index.pop(uuid)
        if found is None:
            homeless = self._homeless.pop(uuid, None)
            if homeless is not None:
                self._host(homeless.host).digest = None
            return homeless is not None
        row, record = found
        self._host(record.host).digest = None
        self._note(row, record, None)
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

    def _note(self, row: int, before: InstanceRecord | None, after: InstanceRecord | None) -> None:
        """Notes that the row has an instance of another kind than before; None: it has one less, or one more."""
        self._changed_rows.append(row)
        if before is not None:
            kind = self._kind(before)
            self._noted_rows.append(row)
            self._noted_kinds.append(~kind)
        if after is not None:
            kind = self._kind(after)
            self._noted_rows.append(row)
            self._noted_kinds.append(kind)
        self._fold_if_many()

    def _note_new(self, records: Sequence[InstanceRecord], rows: Sequence[int]) -> None:
        """Notes one more instance on each of the rows."""
        for record, row in zip(records, rows, strict=True):
            kind = self._kind(record)
            self._noted_rows.append(row)
            self._noted_kinds.append(kind)
        self._changed_rows.extend(rows)
        self._fold_if_many()

    def _kind(self, record: InstanceRecord) -> int:
        """Returns the number of the kind: instances of one kind change the columns of their rows alike."""
        known = self._kinds.get(id(record.resources))
        if known is not None and known[0] == record.flavorid and known[1] == record.busy:
            return known[2]
        if len(self._examples) >= _KINDS:
            self._fold()
            self._forget_kinds()
        kind = len(self._examples)
        self._examples.append(record)
        # The resources are kept alive, so that their id stays theirs.
        self._kinds[id(record.resources)] = (record.flavorid, record.busy, kind, record.resources)
        return kind

    def _fold_if_many(self) -> None:
        """Bounds what is noted and remembered."""
        if len(self._changed_rows) >= _NOTED:
            self._begin_era()
        if len(self._noted_rows) >= _NOTED:
            self._fold()
            if self._index.trim():
                self._snapshot = None

    def _forget_kinds(self) -> None:
        self._kinds: dict[int, tuple[str, bool, int, Mapping[str, int]]] = {}
        self._examples: list[InstanceRecord] = []
        self._noted_rows: list[int] = []
        self._noted_kinds: list[int] = []

    def _fold(self) -> None:
        """Add what was noted to copies of the columns that it concerns."""
        if not self._noted_rows:
            return
        if len(self._noted_rows) <= _FEW:
            self._fold_few()
            return
        rows = np.array(self._noted_rows, dtype=np.intp)
        noted = np.array(self._noted_kinds, dtype=np.int64)
        signs = np.where(noted < 0, -1, 1)
        kinds = np.where(noted < 0, ~noted, noted)
        present = np.unique(kinds)
        examples = [self._examples[kind] for kind in present]
        where = np.zeros(int(present[-1]) + 1, dtype=np.intp)
        where[present] = np.arange(len(present))
        which = where[kinds]
        busy = np.array([each.busy for each in examples], dtype=np.bool_)[which]
        amounts = {
            name: np.array([each.resources.get(name, 0) for each in examples], dtype=np.float64) for name in self._used
        }
        # Nothing fails from here on: what was noted is added once.
        for name, of_kinds in amounts.items():
            if of_kinds.any():
                np.add.at(self._changeable(self._used, name), rows, of_kinds[which] * signs)
        np.add.at(self._changeable(self._totals, _INSTANCES), rows, signs)
        if busy.any():
            np.add.at(self._changeable(self._totals, _BUSY), rows[busy], signs[busy])
        self._fold_flavors(examples, which, rows, signs)
        self._noted_rows, self._noted_kinds = [], []

    def _fold_few(self) -> None:
        """As :meth:`_fold`, one after the other."""
        for row, noted in zip(self._noted_rows, self._noted_kinds, strict=True):
            sign, example = (-1, self._examples[~noted]) if noted < 0 else (1, self._examples[noted])
            for name, amount in example.resources.items():
                if name in self._used:
                    self._changeable(self._used, name)[row] += sign * amount
            self._changeable(self._totals, _INSTANCES)[row] += sign
            if example.busy:
                self._changeable(self._totals, _BUSY)[row] += sign
            if self._is_counted(example.flavorid):
                self._changeable(self._flavors, example.flavorid)[row] += sign
        self._noted_rows, self._noted_kinds = [], []

    def _is_counted(self, flavorid: str) -> bool:
        """Returns whether the instances of a flavor are counted by row; makes the column for one of the first flavors."""
        if flavorid not in self._flavors:
            if len(self._flavors) >= COUNTED_FLAVORS:
                return False
            self._flavors[flavorid] = np.zeros(len(self._nodes), dtype=np.int64)
            self._own.append(self._flavors[flavorid])
        return True

    def _changeable(self, columns: dict[str, Any], name: str) -> npt.NDArray[Any]:
        """Returns a column that no snapshot has: a copy in its place if one has it."""
        column: npt.NDArray[Any] = columns[name]
        if not column.flags.writeable:
            column = columns[name] = column.copy()
            self._own.append(column)
        return column

    def _fold_flavors(self, examples: Sequence[InstanceRecord], which: Rows, rows: Rows, signs: Counts) -> None:
        numbers: dict[str, list[int]] = {}
        for number, each in enumerate(examples):
            numbers.setdefault(each.flavorid, []).append(number)
        for flavorid, of_flavor in numbers.items():
            if not self._is_counted(flavorid):
                continue
            mine = which == of_flavor[0] if len(of_flavor) == 1 else np.isin(which, of_flavor)
            np.add.at(self._changeable(self._flavors, flavorid), rows[mine], signs[mine])

    # -- snapshots ------------------------------------------------------------------------------------------------

    def changes(self, since: Moment | None) -> tuple[Moment, Rows | None]:
        """Returns the present moment, and the rows whose use may have changed since an earlier one, ascending.

        None in place of the rows: other things may have changed, too.
        """
        with self._lock:
            now = (self._era, len(self._changed_rows))
            if since is None or since[0] is not self._era:
                return now, None
            return now, np.unique(np.array(self._changed_rows[since[1] :], dtype=np.intp))

    def _begin_era(self) -> None:
        """Forgets which rows have changed."""
        self._changed_rows, self._era = [], object()

    def snapshot(self) -> Snapshot:
        """Returns the present fleet; one object until something changes."""
        found = self._snapshot
        if found is not None:
            return found
        with self._lock:
            if self._snapshot is None:
                self._fold()
                for column in self._own:
                    column.flags.writeable = False
                self._own = []
                self._snapshot = Snapshot(
                    self._nodes,
                    self._capacities,
                    dict(self._used),
                    self._foreign,
                    self._available,
                    self._totals[_INSTANCES],
                    self._totals[_BUSY],
                    self._row_of_node,
                    self.rows_of_host,
                    dict(self._flavors),
                    self._index.view(),
                    self._derived,
                    self._nested,
                    self._use.sums,
                    self._providers,
                    self._step_rule,
                )
            return self._snapshot

    def sample(self, choose: Callable[[int], Rows], flavorid: str) -> Sample:
        """Some nodes as they are now; costs nothing for the others.

        :param choose: returns the rows, ascending, of a fleet of so many nodes.
        :param flavorid: the flavor whose instances are likely to be counted.
        """
        with self._lock:
            return self._sample(choose(len(self._nodes)), flavorid)

    def sample_since(self, moment: Moment, rows: Rows, flavorid: str) -> Sample | None:
        """Returns the nodes that had some rows at a moment, as they are now; None: the rows may stand for other nodes now."""
        with self._lock:
            return self._sample(rows, flavorid) if moment[0] is self._era else None

    def use(self, rows: Rows, flavorid: str) -> list[Use]:
        """Returns the present use of some rows. If the instances of the flavor are not counted by row, each is an empty tuple."""
        with self._lock:
            self._fold()
            counts = self._flavors.get(flavorid)
            if counts is None:
                return [()] * len(rows)
            used = [column[rows] for column in self._used.values()]
            return use_of(used, self._totals[_INSTANCES][rows], self._totals[_BUSY][rows], counts[rows])

    def _sample(self, rows: Rows, flavorid: str) -> Sample:
        self._fold()
        if self._bare is None:
            self._bare = self._without_instances()
        counts = self._flavors.get(flavorid)
        flavors = {} if counts is None else {flavorid: counts[rows]}
        if counts is None and len(self._flavors) < COUNTED_FLAVORS:
            # No instance ever had it.
            flavors = {flavorid: np.zeros(len(rows), dtype=np.int64)}
        return Sample.of(
            self._bare,
            rows,
            {name: column[rows] for name, column in self._used.items()},
            self._totals[_INSTANCES][rows],
            self._totals[_BUSY][rows],
            flavors,
            self._index.view(),
            self._use.sums,
        )

    def _without_instances(self) -> Snapshot:
        # Copies: use is changed in place. A host_key that reads it gets what was used at the last reading of the nodes.
        return Snapshot(
            self._nodes,
            self._capacities,
            {name: frozen_array(column.copy()) for name, column in self._used.items()},
            self._foreign,
            self._available,
            frozen_array(self._totals[_INSTANCES].copy()),
            frozen_array(self._totals[_BUSY].copy()),
            self._row_of_node,
            self.rows_of_host,
            {},
            InstanceIndex(0).view(),
            self._derived,
            self._nested,
            {},
            self._providers,
            self._step_rule,
        )


def _uuid(node: NodeState) -> str:
    return node.uuid


def _is_available(node: NodeState) -> bool:
    return node.up and node.enabled and node.can_host


def _column(nodes: Sequence[NodeState], kind: str, name: str) -> Floats:
    """One resource class of all nodes."""
    values = [getattr(node, kind).get(name, 0.0) for node in nodes]
    return frozen_array(np.array(values, dtype=np.float64))


def _changed(column: Floats, rows: Rows, nodes: Sequence[NodeState], kind: str, name: str) -> Floats:
    """Returns a column with the values of nodes in some rows, or the column itself if no value differs."""
    values = np.array([getattr(node, kind).get(name, 0.0) for node in nodes], dtype=np.float64)
    if np.array_equal(column[rows], values):
        return column
    made = column.copy()
    made[rows] = values
    return frozen_array(made)
