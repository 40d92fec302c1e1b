# SPDX-License-Identifier: Apache-2.0
"""Nodes of a shard to another host, agents that see their shard alone, and hosts with new names."""

from __future__ import annotations

import unittest
import uuid as uuid_module
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest, InventoryItem, ResourceProvider
from moorage.cli import manage
from moorage.clock import SystemClock
from moorage.control_plane.agent_role import nodes_of_agent
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.tables import nodes
from moorage.instances.departures import Departures
from moorage.instances.interface import DEPARTURE, departed_consumer
from moorage.instances.reassign import Reassignment
from moorage.work.operations import SqlOperationStore
from tests.commands import in_process
from tests.conformance.allocation.stores import sql_store
from tests.functional.sharding.case import FleetCase


class ReassignCase(FleetCase):
    def setUp(self) -> None:
        super().setUp()
        self.store = sql_store(self.database)
        self.workers = SqlOperationStore(self.database, lease_seconds=60.0, clock=SystemClock())
        self.departures = Departures(self.database, self.store, self.workers, self.registry)
        self.work = Reassignment(self.database, self.registry, self.nodes, self.instances, self.departures)
        self.agents = {
            host: self.registry.enlist("agent", host, rpc_version="1.0") for host in ("old-1", "old-2", "new")
        }
        self.fleet(a=6, b=2)
        for number, host in enumerate(("old-1", "old-1", "old-2", "old-2", "new", None)):
            self.own(f"a-{number:03}", host)
        self.own("b-000", "old-1")
        self.own("b-001", "old-2")

    def own(self, name: str, host: str | None) -> None:
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).where(nodes.c.name == name).values(host=host))

    def force_down(self, *hosts: str, down: bool = True) -> None:
        for host in hosts:
            self.registry.set(self.agents[host].uuid, forced_down=down)

    def hosts(self) -> dict[str, str | None]:
        return {node.name: node.host for node in self.nodes.list()}

    def test_all_nodes_of_the_shard_move_with_their_instances_and_nothing_else(self) -> None:
        inside, outside = self.instance("a-000", "old-1"), self.instance("b-000", "old-1")
        others = [self.instance(f"a-{number:03}", self.hosts()[f"a-{number:03}"] or "") for number in (1, 2)]
        self.force_down("old-1", "old-2")
        preview = self.work.preview("a", "new")
        self.assertEqual(({"old-1": 2, "old-2": 2, "": 1}, 1, ()), (preview.sources, preview.already, preview.problems))
        report = self.work.execute(preview)
        self.assertEqual((5, 3), (report.nodes, report.instances))
        self.assertEqual({"new"}, {self.instances.get(each).host for each in others})
        self.assertEqual({"new"}, {host for name, host in self.hosts().items() if name.startswith("a")})
        self.assertEqual(("old-1", "old-2"), (self.hosts()["b-000"], self.hosts()["b-001"]))
        self.assertEqual(("new", "old-1"), (self.instances.get(inside).host, self.instances.get(outside).host))
        self.assertEqual(
            (
                "old-1 still has 1 nodes and 1 instances of other shards.",
                "old-2 still has 1 nodes and 0 instances of other shards.",
            ),
            report.left,
        )
        # Whoever was declared dead and lives has lost its right to go on.
        self.assertFalse(self.registry.beat(self.agents["old-1"]))
        self.assertTrue(self.registry.beat(self.agents["new"]))

    def test_what_nova_manage_refuses_is_refused_and_nothing_changes(self) -> None:
        before = self.hosts()
        cases: list[tuple[str, Any]] = [
            ("is not declared dead: stop it", lambda: self.force_down("old-1")),
            ("Agent new is declared dead", lambda: self.force_down("old-1", "old-2", "new")),
            ("More than one instance is on 1 nodes: a-000", self.crowd),
            ("are being built or deleted", lambda: self.instance("a-001", "old-1", "building")),
            ("The resizes of 1 instances are not confirmed", self.keep),
        ]
        for words, prepare in cases:
            prepare()
            preview = self.work.preview("a", "new")
            self.assertIn(words, " ".join(preview.problems))
            with self.assertRaises(errors.Conflict):
                self.work.execute(preview)
            self.assertEqual(before, self.hosts())
        self.assertIn("There is no agent nobody", " ".join(self.work.preview("a", "nobody").problems))
        self.assertIn("No node is in shard zzz", " ".join(self.work.preview("zzz", "new").problems))

    def keep(self, status: str = "resized") -> None:
        """An instance of another shard may go back to a node of this one."""
        self._set_kept(self.instance("b-001", "old-2"), status)

    def _set_kept(self, uuid: str, status: str) -> None:
        (node,) = [node for node in self.nodes.list() if node.name == "a-002"]
        place = {"host": "old-2", "node": node.name, "node_uuid": node.uuid}
        pending = {"operation": "resize", "kept": place}
        if status == "resizing":
            # Its revert, which goes there.
            pending |= {"operation": "revert_resize", "phase": "transfer", **place}
        with self.database.write() as tx:
            self.assertTrue(self.instances.change(tx, uuid, 0, {"status": status, "pending": pending}))

    def test_a_place_that_is_kept_for_a_revert_is_not_given_away_whatever_is_in_progress(self) -> None:
        self.force_down("old-1", "old-2")
        before = self.hosts()
        uuid = self.instance("b-001", "new")
        for status in ("resized", "resizing", "deleting"):
            with self.subTest(status=status):
                self._set_kept(uuid, "active")
                with self.database.write() as tx:
                    self.assertTrue(self.instances.change(tx, uuid, 0, {"pending": {}}))
                preview = self.work.preview("a", "new")
                self.assertEqual((), preview.problems)
                self._set_kept(uuid, status)
                self.assertIn(
                    f"1 instances are not confirmed: {uuid}", " ".join(self.work.preview("a", "new").problems)
                )
                # It was kept after the preview.
                with self.assertRaisesRegex(errors.Conflict, uuid):
                    self.work.execute(preview)
                self.assertEqual(before, self.hosts())

    def test_what_departs_from_the_nodes_goes_to_their_new_host(self) -> None:
        inside, outside = (str(uuid_module.uuid4()) for _ in range(2))
        tokens = {}
        for uuid, node in ((inside, "a-000"), (outside, "b-000")):
            provider = ResourceProvider(uuid_of_name(node), node, inventories=(InventoryItem("VCPU", 4),))
            self.store.ensure_providers([provider])
            self.store.claim(ClaimRequest(departed_consumer(uuid), {provider.uuid: {"VCPU": 1}}, f"departs-{uuid}"))
            with self.database.write() as tx:
                tokens[uuid] = self.workers.create(tx, DEPARTURE, uuid, "let_go", "leaving", target_host="old-1")
        self.force_down("old-1", "old-2")
        self.work.execute(self.work.preview("a", "new"))
        found = {uuid: self.workers.get(DEPARTURE, uuid) for uuid in (inside, outside)}
        self.assertEqual({inside: "new", outside: "old-1"}, {uuid: each.target_host for uuid, each in found.items()})  # type: ignore[union-attr]
        self.assertGreater(found[inside].token, tokens[inside])  # type: ignore[union-attr]
        # Where the new host is lost, too, its fence can end the departure.
        self.assertEqual(("new", [inside]), self._departures_of("a-000"))
        self.assertEqual(("old-1", [outside]), self._departures_of("b-000"))

    def _departures_of(self, node: str) -> tuple[str, list[str]]:
        found = self.departures.of_node(uuid_of_name(node))
        return found.host, list(found.instances)

    def crowd(self) -> None:
        self.force_down("new", down=False)
        for _ in range(2):
            self.instance("a-000", "old-1")

    def test_what_changes_between_preview_and_act_undoes_all_of_it(self) -> None:
        mine = self.instance("a-000", "old-1")
        for change in (
            lambda: self.force_down("old-2", down=False),
            lambda: self.force_down("new"),
            lambda: self.start_deletion(mine),
        ):
            self.force_down("old-1", "old-2")
            self.force_down("new", down=False)
            preview = self.work.preview("a", "new")
            self.assertEqual((), preview.problems)
            before = self.hosts()
            change()
            with self.assertRaises(errors.Conflict):
                self.work.execute(preview)
            self.assertEqual(before, self.hosts())

    def start_deletion(self, uuid: str) -> None:
        with self.database.write() as tx:
            self.assertTrue(self.instances.set_status(tx, uuid, "deleting", 0))

    def test_the_command_previews_acts_and_says_what_is_left(self) -> None:
        def command(*words: str) -> tuple[int, str, str]:
            given = ["--config-file", "/dev/null", "--set", f"database.connection={self.url}", "node", "reassign"]
            return in_process(manage.main, [*given, *words])

        status, said, refused = command("a", "new")
        self.assertEqual(1, status)
        self.assertIn("Refused: Agent old-1", refused)
        self.force_down("old-1", "old-2")
        before = self.hosts()
        status, said, refused = command("a", "new", "--preview")
        self.assertEqual((0, before), (status, self.hosts()))
        self.assertIn("2 nodes of old-1 would go to new.", said)
        status, said, left = command("a", "new")
        self.assertEqual(1, status)  # nodes of another shard are left with a dead host, and that is said
        self.assertIn("5 nodes and 0 instances are new's now.", said)
        self.assertIn("Left: old-1 still has 1 nodes", left)
        for host in ("b",):
            command(host, "new")
        self.assertEqual({"new"}, set(self.hosts().values()))

    def test_an_agent_with_a_shard_sees_that_shard_and_never_the_whole_fleet(self) -> None:
        names = lambda **where: [node.name for node in nodes_of_agent(self.nodes, "old-1", where.get("shard"))()]  # noqa: E731
        self.assertEqual({"a-000", "a-001", "b-000"}, set(names()))
        self.assertEqual({"b-000", "b-001"}, set(names(shard="b")))
        self.assertEqual([], names(shard="empty"))
        for shard in ("", "none", "a,b", " a"):
            with self.assertRaisesRegex(errors.ConfigError, "my_shard"):
                nodes_of_agent(self.nodes, "old-1", shard)

    def test_an_agent_that_comes_back_with_another_name_costs_nobody_a_node(self) -> None:
        """Nova deleted the nodes of a host that was renamed (LP 1419785)."""
        mine = self.instance("a-000", "old-1")
        before = self.hosts()
        self.registry.retire(self.agents["old-1"])
        self.agents["renamed"] = self.registry.enlist("agent", "renamed", rpc_version="1.0")
        self.own("a-005", "old-2")
        self.enrolment.assign()
        self.enrolment.reconcile()
        self.assertEqual({**before, "a-005": "old-2"}, self.hosts())
        self.assertEqual("old-1", self.instances.get(mine).host)
        self.force_down("old-1", "old-2", "new")
        report = self.work.execute(self.work.preview("a", "renamed"))
        self.assertEqual((6, 1), (report.nodes, report.instances))
        self.assertEqual("renamed", self.instances.get(mine).host)


class TestSqlite(ReassignCase, unittest.TestCase):
    pass


class TestPostgresql(ReassignCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(ReassignCase, unittest.TestCase):
    kind = "mariadb"
