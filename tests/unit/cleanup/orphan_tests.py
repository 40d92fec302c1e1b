# SPDX-License-Identifier: Apache-2.0
"""Which rows the statements of cleaners find and take, and which they leave; a mix-in for the tests of each database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup import orphans
from moorage.cleanup.conditions import ExpiredLease, NeverStarted, OrphanSelector, OrphansOfService, QueuedForDead
from moorage.cleanup.tables import cleanup_history
from moorage.clock import SystemClock
from moorage.work.interface import Operation, Phase
from moorage.work.tables import fences, workers
from tests.unit.work.operation_tests import TYPE, WorkerCase, identity

#: A moment of the database's clock that never comes, and one that has passed.
NEVER, PASSED = 2**60, 1
#: Until when a request counts what a service has done.
UNTIL = 1000
DEAD = "service-dead"
Row = Mapping[str, Any]


def _row(phase: Phase, **values: Any) -> Row:
    return {"phase": phase.value, "updated_at": UNTIL, **values}


def _of_cleaners(row: Row) -> dict[str, Row]:
    """What a cleaner had or gave back, of a row that is otherwise an orphan."""
    return {
        "of a cleaner that is gone": {**row, "phase": Phase.CLEANING.value, "expires_at": PASSED},
        "to be tried again now": {**row, "phase": Phase.RETRYING.value, "next_try_at": PASSED},
    }


def _left_to_others(row: Row) -> dict[str, Row]:
    return {
        "of a living cleaner": {**row, "phase": Phase.CLEANING.value, "expires_at": NEVER},
        "to be tried again later": {**row, "phase": Phase.RETRYING.value, "next_try_at": NEVER},
        "in quarantine": {**row, "phase": Phase.QUARANTINED.value},
    }


_WORKED_ON = _row(Phase.WORKING, worker=DEAD, worker_epoch=1)
_QUEUED = _row(Phase.WAITING, target_host="gone")
_EXPIRED = _row(Phase.WORKING, worker=DEAD, worker_epoch=2, expires_at=PASSED)
_WAITS = _row(Phase.WAITING, target_host="gone", next_try_at=PASSED)
#: For each kind of orphan: how it is asked for, rows that are such orphans, and rows that one condition alone keeps from it.
KINDS: Sequence[tuple[OrphanSelector, Mapping[str, Row], Mapping[str, Row]]] = (
    (
        OrphansOfService(DEAD, 2, until=UNTIL),
        {"begun": _WORKED_ON, **_of_cleaners(_WORKED_ON)},
        {
            "of another service": {**_WORKED_ON, "worker": "service-c"},
            "of the next incarnation": {**_WORKED_ON, "worker_epoch": 2},
            "touched since": {**_WORKED_ON, "updated_at": UNTIL + 1},
            "not begun": {**_WORKED_ON, "phase": Phase.WAITING.value},
            **_left_to_others(_WORKED_ON),
        },
    ),
    (
        QueuedForDead("gone", DEAD, 2, until=UNTIL),
        {"queued": _QUEUED},
        {
            "for another host": {**_QUEUED, "target_host": "here"},
            "of a service": {**_QUEUED, "worker": "service-c"},
            "touched since": {**_QUEUED, "updated_at": UNTIL + 1},
            "begun": {**_QUEUED, "phase": Phase.WORKING.value},
        },
    ),
    (
        ExpiredLease(DEAD, 2, timeout=0),
        {"begun": _EXPIRED, **_of_cleaners(_EXPIRED)},
        {
            "of another service": {**_EXPIRED, "worker": "service-c"},
            "of the incarnation before": {**_EXPIRED, "worker_epoch": 1},
            "renewed": {**_EXPIRED, "expires_at": NEVER, "owner": DEAD, "epoch": 1},
            "not begun": {**_EXPIRED, "phase": Phase.WAITING.value},
            **_left_to_others(_EXPIRED),
        },
    ),
    (
        NeverStarted(("gone", "away"), timeout=0),
        {"waits": _WAITS, **_of_cleaners(_WAITS)},
        {
            "for another host": {**_WAITS, "target_host": "here"},
            "of a service": {**_WAITS, "worker": "service-c"},
            "announced": {**_WAITS, "next_try_at": NEVER},
            "begun": {**_WAITS, "phase": Phase.WORKING.value},
            **_left_to_others(_WAITS),
        },
    ),
)


def kept(wanted: OrphanSelector, row: Row) -> dict[str, Row]:
    """Orphans that a search may find, and that must not be taken over: each has an owner, or is newer than the search."""
    dead, epoch = wanted.parameters["dead"], wanted.parameters["dead_epoch"]
    owned = {"expires_at": NEVER, "owner": dead, "epoch": epoch - 1}
    given_back = {"phase": Phase.RETRYING.value, "next_try_at": PASSED}
    rows: dict[str, Row] = {
        "created since the fences were raised": {**row, "token": NEVER},
        "of a cleaner whose lease runs": {**row, **owned, "phase": Phase.CLEANING.value},
    }
    for name, before in (("", row), ("released, ", {**row, **given_back})):
        rows |= {
            f"{name}of a living owner": {**before, **owned, "owner": "service-c"},
            f"{name}of the living incarnation": {**before, **owned, "epoch": epoch},
        }
    return rows


class OrphanTests(WorkerCase):
    """Subclasses give ``url``."""

    def setUp(self) -> None:
        super().setUp()
        self.orphans = orphans.OrphanStore(self.database, self.store, identity("cleaner"), SystemClock())

    def clear(self) -> None:
        """Remove all rows, for another case of the same test."""
        with self.database.write() as tx:
            for table in (workers, fences, cleanup_history):
                tx.execute(sa.delete(table))

    def rows(self, rows: Mapping[str, Row], kind: str = TYPE) -> None:
        with self.database.write() as tx:
            for uuid, values in rows.items():
                self.store.create(tx, kind, uuid, "build", "building", target_host="elsewhere")
                here = (workers.c.resource_type == kind, workers.c.resource_id == uuid)
                tx.execute(sa.update(workers).where(*here).values(**values))

    def test_each_search_finds_its_orphans_and_nothing_else(self) -> None:
        for wanted, good, bad in KINDS:
            with self.subTest(type(wanted).__name__):
                self.clear()
                self.rows({**good, **bad})
                self.rows(bad, "of a type without orphans")
                self.assertEqual(set(good), set(self.found(wanted)))
                search = orphans._SEARCHES[type(wanted)]
                with self.database.read() as tx:
                    self.assertEqual([TYPE], list(tx.execute(search.types, wanted.parameters).scalars()))
                    seen = [(row.resource_type, row.resource_id) for row in tx.execute(search.look, wanted.parameters)]
                self.assertEqual(sorted((TYPE, uuid) for uuid in good), sorted(seen))

    def found(self, wanted: OrphanSelector, **page: Any) -> list[str]:
        """The ids that a search finds, of what other cleaners had last."""
        ids: list[str] = []
        for alone in (0, 1):
            values = {
                "of_type": TYPE,
                "only": "",
                "after": "",
                "last": orphans.LAST,
                "page": 100,
                "alone": alone,
                **page,
            }
            search = orphans._SEARCHES[type(wanted)]
            with self.database.read() as tx:
                rows = tx.execute(search.find, {**wanted.parameters, **values}).all()
            self.assertEqual({bool(alone)}, {row.phase == Phase.CLEANING.value for row in rows} or {bool(alone)})
            ids += [row.resource_id for row in rows]
        return ids

    def test_a_search_is_of_the_type_the_range_and_the_resource_that_were_asked_for(self) -> None:
        for wanted, good, _ in KINDS:
            with self.subTest(type(wanted).__name__):
                self.clear()
                (row, *_) = good.values()
                self.rows(dict.fromkeys("abcd", row))
                self.rows(dict.fromkeys("bx", row), "other")
                self.assertEqual(["b", "c"], self.found(wanted, after="a", last="c"))
                self.assertEqual(["c"], self.found(wanted, only="c"))
                self.assertEqual(["a", "b"], self.found(wanted, page=2))

    def test_what_changed_between_the_search_and_the_take_is_left(self) -> None:
        for wanted, good, bad in KINDS:
            with self.subTest(type(wanted).__name__):
                self.clear()
                (row, *_) = good.values()
                left = {**bad, **kept(wanted, row)}
                # As if their fences had been raised too.
                self.rows({**good, **left, "not asked for": {**row, "token": 0}})
                self.rows({uuid: {**values, "token": 0} for uuid, values in good.items()}, "other")
                ids = [*good, *left]
                before = self.seen([*left, "not asked for"], good)
                with self.database.write() as tx:
                    key = {"of_type": TYPE, "of_resources": sorted(ids), **wanted.parameters}
                    taken = self.orphans._take(tx, TYPE, None, wanted, key, "")
                self.assertEqual(set(good), set(taken.leases))
                self.assertEqual(before, self.seen([*left, "not asked for"], good))

    def seen(self, uuids: Iterable[str], others: Iterable[str]) -> dict[tuple[str, str], Operation | None]:
        """Operations as they are, of the type and of another one."""
        keys = [*((TYPE, uuid) for uuid in uuids), *(("other", uuid) for uuid in others)]
        return {key: self.store.get(*key) for key in keys}

    def test_a_dead_owner_has_lost_its_lease_at_once(self) -> None:
        for owner, epoch, taken in ((DEAD, 1, True), (DEAD, 2, False), ("service-c", 1, False)):
            with self.subTest(owner=owner, epoch=epoch):
                self.clear()
                self.rows({"one": {**_WORKED_ON, "owner": owner, "epoch": epoch, "expires_at": NEVER}})
                wanted = OrphansOfService(DEAD, 2, until=UNTIL)
                with self.database.write() as tx:
                    key = {"of_type": TYPE, "of_resources": ["one"], **wanted.parameters}
                    found = self.orphans._take(tx, TYPE, None, wanted, key, "")
                self.assertEqual(taken, bool(found.leases))

    def test_a_cleaner_that_was_overtaken_ends_nothing_and_gives_nothing_back(self) -> None:
        wanted = OrphansOfService(DEAD, 2, until=UNTIL)
        self.rows(dict.fromkeys(("one", "two"), _WORKED_ON))
        claimed = self.orphans.claim(TYPE, None, wanted, after="", last=orphans.LAST, limit=10)
        held = claimed.leases["one"]
        with self.database.write() as tx:
            self.store.create(tx, TYPE, "one", "delete", "deleting", target_host="here", force=True)
        before = self.others("none")
        with self.assertRaises(errors.Fenced), self.database.write() as tx:
            self.orphans.end_many(tx, [held], "done")
        self.assertFalse(self.orphans.requeue(held, "it failed", delay=0, quarantine=False))
        self.assertEqual(before, self.others("none"))
        self.assertEqual([], self.history())

    def test_what_ends_or_is_given_back_is_one_row_with_one_line_of_history(self) -> None:
        wanted = OrphansOfService(DEAD, 2, until=UNTIL)
        self.rows(dict.fromkeys(("one", "two", "three"), _WORKED_ON))
        self.rows(dict.fromkeys(("one", "two"), _WORKED_ON), "other")
        for kind in (TYPE, "other"):
            claimed = self.orphans.claim(kind, None, wanted, after="", last=orphans.LAST, limit=10)
            if kind == TYPE:
                leases = claimed.leases
        untouched = [row for row in self.others("one") if "two" not in row or "other" in row]
        with self.database.write() as tx:
            self.orphans.end_many(tx, [leases["one"]], "done")
        self.assertTrue(self.orphans.requeue(leases["two"], "it failed", delay=60, quarantine=False))
        self.assertEqual(untouched, [row for row in self.others("one") if "two" not in row or "other" in row])
        self.assertIsNone(self.store.get(TYPE, "one"))
        given = self.store.get(TYPE, "two")
        assert given is not None
        self.assertEqual((Phase.RETRYING.value, None), (given.phase, given.owner))
        self.assertEqual([("one", "done"), ("two", "retry")], self.history())

    def history(self) -> list[tuple[str, str]]:
        with self.database.read() as tx:
            line = cleanup_history.c
            rows = tx.execute(sa.select(line.resource_id, line.outcome).order_by(line.resource_id))
            return [(row.resource_id, row.outcome) for row in rows]
