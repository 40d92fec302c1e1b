# SPDX-License-Identifier: Apache-2.0
"""A random part of a large fleet, which a request is decided by in place of the whole fleet.

A sample is a small fleet: filters and weighers see its nodes, with rows of their own, and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from moorage import randomness
from moorage.read_only import frozen_array
from moorage.scheduling.instance_index import Places
from moorage.scheduling.interface import Column, HostFilter, InstanceRecord, Mask, NodeState, RequestSpec, Rows
from moorage.scheduling.resource_request import is_grouped
from moorage.scheduling.snapshot import Counts, Floats, Snapshot

__all__ = ["Sample", "Sampler", "may_sample"]


def may_sample(spec: RequestSpec) -> bool:
    """Whether the request is one that most nodes can take: it names no hosts, nodes, instances, groups or single providers."""
    named = spec.force_hosts or spec.force_nodes or spec.requested_host or spec.requested_node or spec.hints
    return not (named or spec.rebuild or spec.server_group is not None or is_grouped(spec))


class Sampler:
    """Chooses the rows of samples; used under the lock of the fleet's view.

    The rows of a fleet are shuffled. Each sample begins where the last one ended, and when too few are left, they are shuffled
    again. So all nodes get their turn, and requests that are decided at the same moment look at different nodes.
    """

    def __init__(self, random: randomness.Random) -> None:
        self._random = random
        self._order: Rows = np.zeros(0, dtype=np.intp)
        self._next = 0

    def choose(self, count: int, size: int) -> Rows:
        """Returns ``count`` rows, ascending, of a fleet of ``size`` rows; all of them if there are no more."""
        count = min(count, size)
        if len(self._order) != size or self._next + count > size:
            seeded = np.random.default_rng(self._random.getrandbits(64))
            self._order, self._next = seeded.permutation(size).astype(np.intp), 0
        first, self._next = self._next, self._next + count
        return np.sort(self._order[first : first + count])


class _Nodes(Sequence[NodeState]):
    """The nodes of a sample, looked up when they are needed: a request looks at few."""

    __slots__ = ("_nodes", "_rows")

    def __init__(self, nodes: Sequence[NodeState], rows: Rows) -> None:
        self._nodes = nodes
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> NodeState: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[NodeState]: ...
    def __getitem__(self, row: int | slice) -> NodeState | Sequence[NodeState]:
        return _Nodes(self._nodes, self._rows[row]) if isinstance(row, slice) else self._nodes[self._rows[row]]


class _RowOfNode(Mapping[str, int]):
    """The rows of a sample by the uuids of their nodes."""

    __slots__ = ("_nodes", "_row_of_node", "_rows")

    def __init__(self, nodes: _Nodes, row_of_node: Mapping[str, int], rows: Rows) -> None:
        self._nodes = nodes
        self._row_of_node = row_of_node
        self._rows = rows

    def __getitem__(self, uuid: str) -> int:
        row = self._row_of_node[uuid]
        at = int(np.searchsorted(self._rows, row))
        if at == len(self._rows) or self._rows[at] != row:
            raise KeyError(uuid)
        return at

    def __iter__(self) -> Iterator[str]:
        return (node.uuid for node in self._nodes)

    def __len__(self) -> int:
        return len(self._rows)


class _Places:
    """Which instance is where, by the rows of a sample."""

    __slots__ = ("_places", "_rows")

    def __init__(self, places: Places, rows: Rows) -> None:
        self._places = places
        self._rows = rows

    def row_of(self, uuid: str) -> int | None:
        """Returns the row of an instance, where known."""
        return self.locate((uuid,)).get(uuid)

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""
        found = self._places.locate(uuids)
        here = np.searchsorted(self._rows, list(found.values())).tolist()
        return {
            uuid: at
            for (uuid, row), at in zip(found.items(), here, strict=True)
            if at < len(self._rows) and self._rows[at] == row
        }

    def on_row(self, row: int) -> Mapping[str, InstanceRecord]:
        """Returns the instances on a row's node, by uuid."""
        return self._places.on_row(int(self._rows[row]))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample(Snapshot):
    """Some nodes of a fleet.

    :param whole: the fleet, for what follows from its nodes alone; it has no instances.
    :param rows: the rows of the nodes there, ascending.
    """

    whole: Snapshot
    rows: Rows

    @classmethod
    def of(
        cls,
        whole: Snapshot,
        rows: Rows,
        used: Mapping[str, Floats],
        num_instances: Counts,
        num_io_ops: Counts,
        flavors: dict[str, Counts],
        places: Places,
        taken: Mapping[tuple[str, str], int],
    ) -> Sample:
        """Make a sample.

        :param used: what is used of each class by the nodes, as the next three a column of the sample.
        :param places: where the instances of the whole fleet are.
        """
        nodes = _Nodes(whole.nodes, rows)
        for column in (*used.values(), num_instances, num_io_ops, *flavors.values()):
            column.flags.writeable = False
        return cls(
            nodes,
            _taken(whole.capacities, rows),
            used,
            _taken(whole.foreign, rows),
            frozen_array(whole.available[rows]),
            num_instances,
            num_io_ops,
            _RowOfNode(nodes, whole.row_of_node, rows),
            {},
            flavors,
            _Places(places, rows),
            {},
            frozen_array(whole.nested[rows]),
            taken,
            {},
            whole._step_rule,
            whole=whole,
            rows=rows,
        )

    @override
    def flavor_counts(self, flavorid: str) -> Counts:
        found = self._flavors.get(flavorid)
        if found is None:
            here = (self._places.on_row(row).values() for row in range(self.size))
            counted = [sum(each.flavorid == flavorid for each in residents) for residents in here]
            found = self._flavors[flavorid] = frozen_array(np.array(counted, dtype=np.int64))
        return found

    @override
    def rows_of_hosts(self, hosts: Iterable[str]) -> Rows:
        return self._within(self.whole.rows_of_hosts(hosts))

    @override
    def rows_of_folded_hosts(self, hosts: Iterable[str]) -> Rows:
        return self._within(self.whole.rows_of_folded_hosts(hosts))

    def _within(self, rows: Rows) -> Rows:
        """Returns the rows of the sample that stand for some rows of the fleet."""
        return frozen_array(np.flatnonzero(np.isin(self.rows, rows, assume_unique=True)))

    @override
    def property_column(self, name: str) -> Column:
        return self._part(("property", name), self.whole.property_column(name))

    @override
    def property_numbers(self, name: str) -> Floats:
        return frozen_array(self.whole.property_numbers(name)[self.rows])

    @override
    def aggregate_column(self, key: str) -> Column:
        return self._part(("aggregate", key), self.whole.aggregate_column(key))

    @property
    @override
    def aggregates(self) -> Column:
        return self._part("aggregates", self.whole.aggregates)

    @property
    @override
    def traits(self) -> Column:
        return self._part("traits", self.whole.traits)

    def _part(self, name: Hashable, column: Column) -> Column:
        """Returns a column of the fleet for the rows of the sample, with only the values of these rows."""
        found: Column | None = self._derived.get(name)
        if found is None:
            codes = column.codes[self.rows]
            values = column.values
            if len(values) > 1:
                present, codes = np.unique(codes, return_inverse=True)
                values = tuple(values[code] for code in present.tolist())
            found = self._derived[name] = Column(frozen_array(codes), values)
        return found

    @override
    def key_column(self, plugin: HostFilter) -> Column | None:
        whole = self.whole.key_column(plugin)
        if whole is None:
            return None
        _, first, codes = np.unique(whole.codes[self.rows], return_index=True, return_inverse=True)
        return Column(frozen_array(codes), tuple(first.tolist()))

    @override
    def have_trait(self, names: frozenset[str]) -> Mask:
        return frozen_array(self.whole.have_trait(names)[self.rows])

    @property
    @override
    def scarce_classes(self) -> Sequence[str]:
        return self.whole.scarce_classes

    @property
    @override
    def can_host(self) -> npt.NDArray[np.bool_]:
        return frozen_array(self.whole.can_host[self.rows])

    @property
    @override
    def all_can_host(self) -> bool:
        return self.whole.all_can_host or bool(self.can_host.all())


def _taken(columns: Mapping[str, Floats], rows: Rows) -> dict[str, Floats]:
    return {name: frozen_array(column[rows]) for name, column in columns.items()}
