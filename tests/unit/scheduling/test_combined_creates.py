# SPDX-License-Identifier: Apache-2.0
"""Creates whose claims share transactions: outcomes and rows are those of creates that are made one by one."""

from __future__ import annotations

import dataclasses
import unittest
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oslo_context import context as oslo_context
from sqlalchemy import event

import tests
from moorage import errors
from moorage.allocation.interface import ClaimOutcome, ClaimRequest, Companion, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.fleet.interface import check_states
from moorage.fleet.properties import change_node
from moorage.instances.create import StoreClaimer
from moorage.instances.delete import Deleter
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec, ServerGroup
from moorage.testing.allocation import inconsistencies
from moorage.testing.database import create_all, empty_tables
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.stores.checks import as_change
from moorage_plugins.stores.combiner import Combiner, Member
from tests import servers
from tests.conformance.allocation.stores import sql_store, sqlite_url
from tests.ready import ready_node

NODES = tuple(f"{number:08d}-0000-4000-8000-000000000000" for number in range(4))
#: In maintenance.
CLOSED = NODES[3]
#: A uuid that an instance had which is gone.
USED = "99999999-0000-4000-8000-000000000000"
STORED = "11111111-0000-4000-8000-000000000001"
GROUPS = (
    None, None,
    ServerGroup(STORED, "anti-affinity"), ServerGroup("near", "affinity"), ServerGroup("apart", "anti-affinity", 2),
    ServerGroup("soft", "soft-affinity"),
)  # fmt: skip
_TABLES = {
    "instances": "uuid, status, host, node_uuid, project_id, server_group, fence, pending",
    "workers": "resource_id, operation, status, addressed_to, token, phase, project_id, request",
    "fences": "resource_id, token",
    "events": "kind, subject, version, actor, project_id, request_id, state",
    "consumers": "uuid, generation, project_id, request_id",
    "inventories": "resource_provider_id, resource_class_id, used",
}
CREATES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 12), st.just(99)),
        st.sampled_from(NODES),
        st.sampled_from([1, 1, 2, 4]),
        st.sampled_from(["p", "p", "q"]),
        st.sampled_from(GROUPS),
        st.sampled_from([{}, {}, {"num_instances": 2}, {"num_io_ops": 1}]),
    ),
    min_size=1,
    max_size=10,
)
WAYS = st.lists(st.integers(1, 10), min_size=1, max_size=4)


class NodeNames:
    def node_name(self, uuid: str) -> str:
        return f"node-{uuid[:8]}"


class _CollectedError(Exception):
    pass


class CombinedCreateTests(unittest.TestCase):
    server: ClassVar[str | None] = None
    examples: ClassVar[int] = tests.cases(15)
    #: Of a batch of creates.
    statements: ClassVar[int] = 11
    database: ClassVar[Database]

    @classmethod
    def setUpClass(cls) -> None:
        url = sqlite_url(cls) if cls.server is None else servers.fresh_database(servers.shared(cls.server))
        cls.database = Database(url, service="scheduler:s")
        cls.addClassCleanup(cls.database.close)
        create_all(cls.database)

    def begin(self) -> None:
        """Empty tables, four nodes, a stored group, and the fence of an instance that is gone."""
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)
        self.store = sql_store(self.database)
        room = (InventoryItem("VCPU", 6),)
        self.store.ensure_providers([ResourceProvider(each, each, inventories=room) for each in NODES])
        for number, each in enumerate(NODES):
            availability = ready_node(self.database, each, f"host-{number % 2}")
        change_node(self.database, CLOSED, {}, check_states({"maintenance": True}))
        self.groups = GroupStore(self.database)
        with mock.patch("moorage.randomness.new_uuid", lambda: STORED):
            self.groups.create("stored", "p", "anti-affinity")
        instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        self.claimer = StoreClaimer(
            self.store, instances, self.workers, NodeNames(), self.groups, availability, self.database
        )
        spec = RequestSpec(USED, Flavor("f1", {"VCPU": 1}), "p")
        self.claimer.claim(spec, NODES[0], "host-0", "r")
        self.claimer.release(USED)
        with self.database.write() as tx:
            tx.execute(sa.text("DELETE FROM events"))

    def members(self, creates: Sequence[Any]) -> list[Member]:
        """The claims of these creates, as the scheduler hands them to the store."""
        found: list[Member] = []

        def collect(request: ClaimRequest, companion: Companion | None = None) -> ClaimOutcome:
            found.append(Member(as_change(request), companion))
            raise _CollectedError

        with mock.patch.object(self.store, "claim", collect):
            for number, (instance, node, vcpus, project, group, limits) in enumerate(creates):
                uuid = f"{instance:08d}-0000-4000-8000-000000000000" if instance != 99 else USED
                context = oslo_context.RequestContext(request_id=f"req-{number}", user_id=project, overwrite=False)
                spec = RequestSpec(
                    uuid, Flavor(f"f{vcpus}", {"VCPU": vcpus}), project, server_group=group, limits=limits
                )
                context.update_store()
                with self.assertRaises(_CollectedError):
                    self.claimer.claim(spec, node, f"host-{NODES.index(node) % 2}", f"r-{uuid}")
        oslo_context.RequestContext(overwrite=False).update_store()
        return found

    def state(self, members: Sequence[Member]) -> tuple[Any, ...]:
        """What each was told, and the rows of all tables."""
        self.assertEqual([], inconsistencies(self.store))
        told = [
            (each.change.consumer, None if each.outcome is None else each.outcome.repeated, type(each.error))
            for each in members
        ]
        with self.database.read() as tx:
            numbers = {row.id: row.uuid for row in tx.execute(sa.text("SELECT id, uuid FROM resource_providers")).all()}
            rows = {}
            for table, columns in _TABLES.items():
                found = [tuple(row) for row in tx.execute(sa.text(f"SELECT {columns} FROM {table}")).all()]
                if table == "inventories":
                    found = [(numbers[row[0]], *row[1:]) for row in found]
                rows[table] = sorted(map(repr, found))
        return told, rows

    def check(self, creates: Sequence[Any], ways: Sequence[int]) -> None:
        """Make creates in batches of these sizes; then one by one, in the order of the commits."""
        self.begin()
        order: list[Member] = []

        def alone(member: Member) -> ClaimOutcome:
            order.append(member)
            return self.store._alone(member)

        def together(batch: Sequence[Member]) -> None:
            self.store._together(batch)
            order.extend(each for each in batch if each.outcome is not None)

        members = self.members(creates)
        combiner = Combiner(alone, together, self.store._look_up, 64, 60)
        combiner._gathering._waiting = list(members)
        sizes = list(ways)
        while combiner._gathering._waiting:
            combiner._size = sizes.pop(0) if sizes else 64
            batch = combiner._gathering._turn(combiner._gathering._waiting.pop(0))
            combiner._make(batch)
            for each in batch:
                if each.alone:
                    combiner._make([each])
        self.assertEqual({id(each) for each in members}, {id(each) for each in order})
        combined = self.state(order)
        places = [members.index(each) for each in order]

        self.begin()
        again = self.members(creates)
        one_by_one = [again[place] for place in places]
        for each in one_by_one:
            try:
                each.outcome = self.store._alone(each)
            except errors.MoorageError as error:
                each.error = error
        self.assertEqual(self.state(one_by_one), combined)

    def test_outcomes_and_rows_are_those_of_creates_made_one_by_one(self) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(CREATES, WAYS)
        def law(creates: Sequence[Any], ways: Sequence[int]) -> None:
            self.check(creates, ways)

        law()

    def test_a_batch_of_creates_costs_few_statements_and_one_commit(self) -> None:
        self.begin()
        members = self.members([(number, NODES[number % 3], 1, "p", None, {}) for number in range(9)])
        self.store._together(members[:3])
        seen: list[str] = []
        commits: list[Any] = []

        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            seen.append(statement)

        for name, listener in (("before_cursor_execute", note), ("commit", commits.append)):
            event.listen(sa.Engine, name, listener)
            self.addCleanup(event.remove, sa.Engine, name, listener)
        self.store._together(members[3:])
        written = [each for each in seen if not each.startswith(("BEGIN", "SET"))]
        # Consumers, limits, locks (servers), turns, takes, allocations, floor, fences, operations, the time, instances, events.
        self.assertEqual((self.statements, 1), (len(written), len(commits)), written)
        self.assertEqual([], [each for each in members if each.outcome is None])

    def test_creates_of_uuids_that_were_used_cost_the_others_one_repetition(self) -> None:
        self.begin()
        used = [f"{number:08d}-0000-4000-8000-000000000000" for number in (2, 3)]
        for each in used:
            self.claimer.claim(RequestSpec(each, Flavor("f1", {"VCPU": 1}), "p"), NODES[0], "host-0", "r")
            self.claimer.release(each)
        members = self.members([(number, NODES[number % 3], 1, "p", None, {}) for number in range(9)])
        ended: list[str] = []
        for name in ("commit", "rollback"):

            def note(connection: Any, name: str = name) -> None:
                ended.append(name)

            event.listen(self.database._writers.engine, name, note)
            self.addCleanup(event.remove, self.database._writers.engine, name, note)
        self.store._together(members)
        self.assertEqual(["rollback", "commit"], ended)
        self.assertEqual(used, [each.change.consumer for each in members if each.alone])
        self.assertEqual(7, sum(each.outcome is not None for each in members))

    def test_a_create_that_is_found_after_its_commit_is_no_repetition(self) -> None:
        self.begin()
        self.store = sql_store(self.database, claims_per_transaction=8)
        claimer = dataclasses.replace(self.claimer, store=self.store)
        spec = RequestSpec("00000001-0000-4000-8000-000000000000", Flavor("f1", {"VCPU": 1}), "p")
        run = self.database.run

        def lost(work: Callable[[sa.Connection], Any], **more: Any) -> Any:
            run(work, **more)
            raise errors.StoreUnavailable("The connection ended at the commit.", outcome="unknown")

        with mock.patch.object(self.database, "run", lost):
            made = claimer.claim(spec, NODES[0], "host-0", "r")
        shown = self.claimer.instances.get(spec.instance_uuid).to_json()
        self.assertEqual((NODES[0], False, shown), (made.node_uuid, made.repeated, made.shown))
        self.assertTrue(claimer.claim(spec, NODES[0], "host-0", "r").repeated)

    def test_a_create_shows_the_instance_as_it_was_committed(self) -> None:
        self.begin()
        members = self.members([(number, NODES[0], 1, "p", None, {}) for number in range(2)])
        self.store._together(members)
        for each in members:
            creation: Any = each.companion
            self.assertEqual(self.claimer.instances.get(each.change.consumer), creation.instance)
        deleter = Deleter(self.database, self.claimer.instances, self.workers, lambda *cast: None)
        deleter.delete(members[0].change.consumer, force=True)
        self.assertEqual("deleting", self.claimer.instances.get(members[0].change.consumer).status)


class PostgresqlCombinedCreateTests(CombinedCreateTests):
    server = "postgresql"
    statements = 12
    examples = tests.cases(6)


class MariadbCombinedCreateTests(CombinedCreateTests):
    server = "mariadb"
    statements = 12
    examples = tests.cases(6)
