# SPDX-License-Identifier: Apache-2.0
"""Deletions that share transactions: outcomes, rows and messages are those of deletions that are begun one by one."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from typing_extensions import override

import tests
from moorage import errors, threads
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.context import RequestContext, acting_for
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.instances import delete
from moorage.instances.create import StoreClaimer
from moorage.instances.delete import Deleter
from moorage.instances.interface import Instance, InstanceWrite
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.testing.database import create_all, empty_tables
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.schema import plugins_metadata
from tests import servers
from tests.conformance.allocation.stores import sql_store, sqlite_url
from tests.ready import ready_node
from tests.servers import wait_until

NODES = tuple(f"{number:08d}-0000-4000-8000-000000000000" for number in range(2))
_TABLES = {
    "instances": "uuid, status, host, fence, pending",
    "workers": "resource_id, operation, status, addressed_to, token, phase, attempts, project_id, request",
    "fences": "resource_id, token",
    "events": "kind, subject, version, actor, project_id, request_id, state",
}
#: What becomes of an instance before it is deleted.
BEFORE = {
    "active": ("UPDATE instances SET status='active' WHERE uuid=:uuid", "DELETE FROM workers WHERE resource_id=:uuid"),
    "building": (),
    # In an operation that its status does not show yet.
    "busy": ("UPDATE instances SET status='active' WHERE uuid=:uuid",),
    # Its fence is purged.
    "old": (
        "UPDATE instances SET status='stopped' WHERE uuid=:uuid", "DELETE FROM workers WHERE resource_id=:uuid",
        "DELETE FROM fences WHERE resource_id=:uuid",
    ),
    "failed": (
        "UPDATE instances SET status='error' WHERE uuid=:uuid", "DELETE FROM workers WHERE resource_id=:uuid",
    ),
    "homeless": (
        "UPDATE instances SET status='error', host='' WHERE uuid=:uuid", "DELETE FROM workers WHERE resource_id=:uuid",
    ),
    "deleting": ("UPDATE instances SET status='deleting' WHERE uuid=:uuid",),
    "gone": ("DELETE FROM workers WHERE resource_id=:uuid", "DELETE FROM instances WHERE uuid=:uuid"),
    # Its client may not see it.
    "hidden": ("UPDATE instances SET status='active' WHERE uuid=:uuid", "DELETE FROM workers WHERE resource_id=:uuid"),
}  # fmt: skip
PURGED = "INSERT INTO fences (resource_type, resource_id, token, raised_at) VALUES ('instance', '', 7, 0)"


class DeletionTests(unittest.TestCase):
    server: ClassVar[str | None] = None
    examples: ClassVar[int] = tests.cases(20)
    #: Of nine deletions.
    statements: ClassVar[int] = 9
    database: ClassVar[Database]

    @classmethod
    def setUpClass(cls) -> None:
        url = sqlite_url(cls) if cls.server is None else servers.fresh_database(servers.shared(cls.server))
        cls.database = Database(url, service="api:a")
        cls.addClassCleanup(cls.database.close)
        create_all(cls.database)

    @override
    def setUp(self) -> None:
        # No thread shall stop waiting for its turn and delete alone.
        patience = mock.patch.object(delete, "_PATIENCE", 60.0)
        patience.start()
        self.addCleanup(patience.stop)

    def begin(self, kinds: Sequence[str]) -> list[str]:
        """Instances of these kinds; their uuids."""
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)
        store = sql_store(self.database)
        room = (InventoryItem("VCPU", 100),)
        store.ensure_providers([ResourceProvider(each, each, inventories=room) for each in NODES])
        for number, each in enumerate(NODES):
            availability = ready_node(self.database, each, f"host-{number}")
        self.instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        names: Any = mock.Mock(node_name=lambda uuid: f"node-{uuid[:8]}")
        claimer = StoreClaimer(
            store, self.instances, self.workers, names, GroupStore(self.database), availability, self.database
        )
        uuids = [f"{number:08d}-0000-4000-8000-00000000000a" for number in range(len(kinds))]
        for number, uuid in enumerate(uuids):
            spec = RequestSpec(uuid, Flavor("f1", {"VCPU": 1}), f"project-{number % 2}")
            claimer.claim(spec, NODES[number % 2], f"host-{number % 2}", f"r-{uuid}")
        with self.database.write() as tx:
            for kind, uuid in zip(kinds, uuids, strict=True):
                for statement in BEFORE[kind]:
                    tx.execute(sa.text(statement), {"uuid": uuid})
            tx.execute(sa.text(PURGED))
            tx.execute(sa.text("DELETE FROM events"))
        self.messages: list[dict[str, list[tuple[str, int]]]] = []
        self.gone: list[str] = []
        self.deleter = Deleter(
            self.database, self.instances, self.workers,
            lambda told: self.messages.append({host: list(several) for host, several in told.items()}), self.gone.append,
        )  # fmt: skip
        return uuids

    def delete(self, uuid: str, kind: str) -> type[Exception] | None:
        """Delete an instance for a request of its own; the error."""

        def check(instance: Instance) -> None:
            if kind == "hidden":
                raise errors.NotFound("No such instance.")

        with acting_for(RequestContext(request_id=f"req-{uuid}", user_id=f"user-{kind}", overwrite=False)):
            try:
                self.deleter.delete(uuid, check=check)
            except errors.MoorageError as error:
                return type(error)
        return None

    def delete_together(self, uuids: Sequence[str], kinds: Sequence[str]) -> list[type[Exception] | None]:
        """Delete instances while the leader of the first turn is held, so that all others share the second one."""
        held, go, gathering = threads.event(), threads.event(), self.deleter._gathering

        def hold(turn: Sequence[Any]) -> None:
            held.set()
            go.wait(60.0)
            turn[0].outcome = True

        work, gathering._work = gathering._work, hold
        with ThreadPoolExecutor(len(uuids) + 1) as pool:
            first = pool.submit(self.deleter.delete, "held")
            held.wait(60.0)
            gathering._work = work
            found: list[Future[Any]] = []
            for number, (uuid, kind) in enumerate(zip(uuids, kinds, strict=True)):
                found.append(pool.submit(self.delete, uuid, kind))
                wait_until(lambda number=number: len(gathering._waiting) > number, "it waits")  # type: ignore[misc]
            go.set()
            first.result(60.0)
            return [each.result(60.0) for each in found]

    def state(self) -> tuple[Any, ...]:
        """The rows, and what was told."""
        rows = {}
        with self.database.read() as tx:
            for table, columns in _TABLES.items():
                found = tx.execute(sa.text(f"SELECT {columns} FROM {table}")).all()
                rows[table] = sorted(repr(tuple(row)) for row in found)
        told = sorted(
            (host, *each) for message in self.messages for host, several in message.items() for each in several
        )
        return rows, told, sorted(self.gone)

    def test_outcomes_rows_and_messages_are_those_of_deletions_begun_one_by_one(self) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.sampled_from(sorted(BEFORE)), min_size=2, max_size=9))
        def law(kinds: Sequence[str]) -> None:
            outcomes = self.delete_together(self.begin(kinds), kinds)
            together = self.state()
            uuids = self.begin(kinds)
            self.assertEqual([self.delete(uuid, kind) for uuid, kind in zip(uuids, kinds, strict=True)], outcomes)
            self.assertEqual(self.state(), together)

        law()

    def test_deletions_that_wait_share_a_transaction_and_a_message_to_each_agent(self) -> None:
        kinds = ["active"] * 7 + ["old", "failed"]
        uuids = self.begin(kinds)
        statements: list[str] = []
        commits: list[Any] = []

        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        for name, listener in (("before_cursor_execute", note), ("commit", commits.append)):
            event.listen(sa.Engine, name, listener)
            self.addCleanup(event.remove, sa.Engine, name, listener)
        self.assertEqual([None] * 9, self.delete_together(uuids, kinds))
        written = [each for each in statements if not each.startswith(("BEGIN", "SET"))]
        # Instances; fences raised, read with their floor, lifted above it, inserted; operations, instances, their states, events.
        self.assertEqual((self.statements, 1), (len(written), len(commits)), written)
        [message] = self.messages
        told = {uuid: token for several in message.values() for uuid, token in several}
        self.assertEqual({each.uuid: each.fence for each in self.instances.list()}, told)
        self.assertEqual(
            {"host-0": set(uuids[::2]), "host-1": set(uuids[1::2])},
            {host: {uuid for uuid, _ in several} for host, several in message.items()},
        )
        # Above the floor of purged fences.
        self.assertEqual(8, told[uuids[7]])

    def test_an_instance_that_is_written_between_read_and_write_is_read_again(self) -> None:
        kinds = ["active"] * 3
        uuids = self.begin(kinds)
        find = self.instances.find

        def stale(wanted: Sequence[str], transaction: Any = None) -> Sequence[Instance]:
            found = find(wanted, transaction)
            if transaction is not None:
                return found
            with self.database.write() as tx:
                tx.execute(
                    sa.text("UPDATE instances SET host='host-1', fence=fence+1 WHERE uuid=:uuid"), {"uuid": uuids[0]}
                )
                tx.execute(sa.text("UPDATE fences SET token=token+1 WHERE resource_id=:uuid"), {"uuid": uuids[0]})
            return found

        with mock.patch.object(self.instances, "find", stale):
            self.assertEqual([None] * 3, self.delete_together(uuids, kinds))
        hosts = {uuid: host for message in self.messages for host, several in message.items() for uuid, _ in several}
        self.assertEqual({uuids[0]: "host-1", uuids[1]: "host-1", uuids[2]: "host-0"}, hosts)

    def test_an_unknown_outcome_of_the_commit_is_looked_up(self) -> None:
        kinds = ["active"] * 3
        uuids = self.begin(kinds)
        run = self.database.run
        lost: list[Any] = []

        def lose(work: Any) -> Any:
            found = run(work)
            if not lost:
                lost.append(found)
                raise errors.StoreUnavailable("The connection ended at the commit.", outcome="unknown")
            return found

        with mock.patch.object(self.database, "run", lose):
            self.assertEqual([None] * 3, self.delete_together(uuids, kinds))
        self.assertEqual(dict.fromkeys(uuids, "deleting"), {each.uuid: each.status for each in self.instances.list()})
        # Their agents find them; none was begun twice.
        self.assertEqual([], self.messages)
        self.assertEqual(set(lost[0].values()), {each.fence for each in self.instances.list()})

    def test_writes_of_a_set_are_refused_where_the_fence_is_another_one(self) -> None:
        uuids = self.begin(["active"] * 2)
        [first, second] = self.instances.find(uuids)
        for fence, written in ((second.fence + 1, False), (second.fence, True)):
            writes = [
                InstanceWrite(each.uuid, 9, {"status": "deleting"}, None, fence=seen)
                for each, seen in ((first, first.fence), (second, fence))
            ]
            with self.database.write() as tx, tx.begin_nested() as savepoint:
                self.assertEqual(written, self.instances.write_many(tx, writes))
                savepoint.rollback()

    def test_writes_of_a_set_take_any_mapping_as_json(self) -> None:
        uuids = self.begin(["active"] * 2)
        pending = MappingProxyType({"operation": "é"})
        writes = [InstanceWrite(each, 9, {"status": "deleting", "pending": pending}, None) for each in uuids]
        with self.database.write() as tx:
            self.assertTrue(self.instances.write_many(tx, writes))
        self.assertEqual([dict(pending)] * 2, [each.pending for each in self.instances.find(uuids)])


class PostgresqlDeletionTests(DeletionTests):
    server = "postgresql"
    examples = tests.cases(6)


class MariadbDeletionTests(DeletionTests):
    server = "mariadb"
    examples = tests.cases(6)
