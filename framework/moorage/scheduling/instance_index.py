# SPDX-License-Identifier: Apache-2.0
"""Which instance is where, changed by one writer and read as it was at some moment, without a copy of it.

The head is changed in place. A view of it reads the head too; what the head had before a change is put beside
it first, once for each change since that view (an undo list, as databases keep them for readers of the past). So a view costs
nothing when it is made, and a change costs one more entry in a dictionary. A reader looks into the head first and into the undo
lists afterwards, the newest first, and the writer writes in the other order; so a reader needs no lock. (The oldest list first
would be wrong: an entry that it gets after it was looked at may be followed by one for the same thing in a newer list.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from moorage.scheduling.interface import InstanceRecord

__all__ = ["IndexView", "InstanceIndex", "Overlay", "Places"]

#: Entries of an undo list after which the index looks whether a reader still needs it.
_MOST = 20_000
Here = dict[str, InstanceRecord]


class Places(Protocol):
    """Which instance is where, at one moment."""

    def row_of(self, uuid: str) -> int | None:
        """Returns the row of an instance, where known."""

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""

    def on_row(self, row: int) -> Mapping[str, InstanceRecord]:
        """Returns the instances of a row by uuid; must not be changed."""


class _Undo:
    """What the head had before the changes since a view was made; ``after`` are the changes since the next view."""

    __slots__ = ("after", "places", "rows")

    def __init__(self) -> None:
        self.places: dict[str, int | None] = {}
        self.rows: dict[int, Here] = {}
        self.after: _Undo | None = None


class IndexView:
    """The index as it was when :meth:`InstanceIndex.view` was called."""

    __slots__ = ("__weakref__", "_here", "_rows", "_undo")

    def __init__(self, rows: dict[str, int], here: list[Here], undo: _Undo) -> None:
        self._rows = rows
        self._here = here
        self._undo = undo

    def row_of(self, uuid: str) -> int | None:
        """Returns the row of an instance, where known."""
        row = self._rows.get(uuid)
        for undo in self._newest_first():
            if uuid in undo.places:
                row = undo.places[uuid]
        return row

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""
        rows = self._rows
        found = {uuid: rows.get(uuid) for uuid in uuids}
        # Only after the head was looked into.
        for undo in self._newest_first():
            found.update({uuid: undo.places[uuid] for uuid in found if uuid in undo.places})
        return {uuid: row for uuid, row in found.items() if row is not None}

    def on_row(self, row: int) -> Mapping[str, InstanceRecord]:
        """Returns the instances on a row's node, by uuid."""
        found = self._here[row]
        for undo in self._newest_first():
            found = undo.rows.get(row, found)
        return found

    def _newest_first(self) -> Sequence[_Undo]:
        first = self._undo
        undo = first.after
        if undo is None:
            return (first,)
        chain = [first]
        while undo is not None:
            chain.append(undo)
            undo = undo.after
        chain.reverse()
        return chain


class Overlay:
    """An index with other instances on some rows. ``extra``: where those are that differ; None: nowhere."""

    __slots__ = ("_base", "_extra", "_on_row")

    def __init__(self, base: Places, extra: Mapping[str, int | None], on_row: Mapping[int, Here]) -> None:
        self._base = base
        self._extra = extra
        self._on_row = on_row

    def row_of(self, uuid: str) -> int | None:
        """Returns the row of an instance, where known."""
        return self._extra[uuid] if uuid in self._extra else self._base.row_of(uuid)

    def locate(self, uuids: Iterable[str]) -> dict[str, int]:
        """Instance -> row, for the known ones."""
        return {uuid: row for uuid in uuids if (row := self.row_of(uuid)) is not None}

    def on_row(self, row: int) -> Mapping[str, InstanceRecord]:
        """Returns the instances on a row's node, by uuid."""
        found = self._on_row.get(row)
        return self._base.on_row(row) if found is None else found

    def with_row(self, row: int, here: Here) -> Overlay:
        """Returns the index with these instances on a row, and no others."""
        gone = {uuid: None for uuid in self.on_row(row) if uuid not in here}
        extra = {**self._extra, **gone, **dict.fromkeys(here, row)}
        return Overlay(self._base, extra, {**self._on_row, row: here})


class InstanceIndex:
    """The head. Used by one thread at a time; its views by any."""

    __slots__ = ("_here", "_rows", "_undo", "_views")

    def __init__(self, size: int) -> None:
        self._rows: dict[str, int] = {}
        self._here: list[Here] = [{} for _ in range(size)]
        self._undo: _Undo | None = None
        self._views: weakref.WeakSet[IndexView] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._rows)

    def view(self) -> IndexView:
        """Returns the present index. Later changes do not affect it."""
        undo = _Undo()
        if self._undo is not None:
            self._undo.after = undo
        self._undo = undo
        made = IndexView(self._rows, self._here, undo)
        self._views.add(made)
        return made

    def trim(self) -> bool:
        """Forget what no view needs. True when the newest view still needs it: the caller should let that one go."""
        undo = self._undo
        if undo is None or len(undo.places) + len(undo.rows) < _MOST:
            return False
        if not self._views:
            self._undo = None
            return False
        # Held by those views alone from here on, and gone with them.
        undo.after = self._undo = _Undo()
        return True

    def get(self, uuid: str) -> InstanceRecord | None:
        """One instance, where known."""
        row = self._rows.get(uuid)
        return None if row is None else self._here[row].get(uuid)

    def row_of(self, uuid: str) -> int | None:
        """Its row."""
        return self._rows.get(uuid)

    def on_row(self, row: int) -> Here:
        """Returns the instances of a row; valid until the next change."""
        return self._here[row]

    def records(self) -> Iterable[InstanceRecord]:
        """Returns all instances."""
        for here in self._here:
            yield from here.values()

    def put(self, record: InstanceRecord, row: int) -> None:
        """It is on that row, and on no other; a known one must be on that row already."""
        uuid = record.uuid
        here = self._here[row]
        undo = self._undo
        if undo is not None:
            if uuid not in undo.places:
                undo.places[uuid] = self._rows.get(uuid)
            if row not in undo.rows:
                undo.rows[row] = here
                here = self._here[row] = here.copy()
        self._rows[uuid] = row
        here[uuid] = record

    def add(self, record: InstanceRecord, row: int) -> bool:
        """As :meth:`put`, for one that is not known; False (and nothing is done) for a known one."""
        uuid, rows = record.uuid, self._rows
        if self._undo is not None:
            if uuid in rows:
                return False
            self.put(record, row)
            return True
        count = len(rows)
        rows.setdefault(uuid, row)
        if len(rows) == count:
            return False
        self._here[row][uuid] = record
        return True

    def add_many(self, records: Sequence[InstanceRecord], rows: Sequence[int]) -> bool:
        """Puts instances with different uuids that the index does not have, while no undo list is kept.

        Otherwise returns False and puts none.
        """
        places = {record.uuid: row for record, row in zip(records, rows, strict=True)}
        if self._undo is not None or len(places) < len(records) or not places.keys().isdisjoint(self._rows.keys()):
            return False
        self._rows.update(places)
        here = self._here
        for record, row in zip(records, rows, strict=True):
            here[row][record.uuid] = record
        return True

    def pop(self, uuid: str) -> tuple[int, InstanceRecord] | None:
        """It is nowhere; where it was."""
        row = self._rows.get(uuid)
        if row is None:
            return None
        here = self._here[row]
        undo = self._undo
        if undo is not None:
            if uuid not in undo.places:
                undo.places[uuid] = row
            if row not in undo.rows:
                undo.rows[row] = here
                here = self._here[row] = here.copy()
        del self._rows[uuid]
        return row, here.pop(uuid)
