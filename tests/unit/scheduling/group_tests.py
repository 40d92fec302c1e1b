# SPDX-License-Identifier: Apache-2.0
"""Server groups in the store, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import functools
import unittest
import uuid
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.allocation import options as allocation_options
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.instances.create import StoreClaimer
from moorage.scheduling.groups import GroupStore, StoredGroup
from moorage.scheduling.interface import Flavor, RequestSpec, ServerGroup
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.stores import options as store_options
from moorage_plugins.stores.sql import SqlStore
from tests.ready import ready_node
from tests.unit.fleet.aggregate_tests import together

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

NODES = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")


class NodeNames:
    def node_name(self, uuid: str) -> str:
        return f"name-of-{uuid[-1]}"


class GroupTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.groups = GroupStore(self.database)
        self.project = self.id().rpartition(".")[2]
        conf = cfg.ConfigOpts()
        for module in (allocation_options, store_options):
            module.register_opts(conf)
        conf([], default_config_files=[])
        clock = SystemClock()
        self.store = SqlStore(conf=conf, database=self.database, clock=clock)
        self.instances = ComputeInstances(conf=conf, database=self.database, clock=clock)
        workers = SqlOperationStore(self.database, lease_seconds=60)
        for node in NODES:
            availability = ready_node(self.database, node, "host")
        self.claimer = StoreClaimer(self.store, self.instances, workers, NodeNames(), self.groups, availability)
        self.store.ensure_providers(
            [ResourceProvider(each, each, inventories=(InventoryItem("VCPU", 1000),)) for each in NODES]
        )

    def claim(self, group: StoredGroup, node: str) -> str:
        spec = RequestSpec(
            str(uuid.uuid4()),
            Flavor("small", {"VCPU": 1}),
            self.project,
            server_group=ServerGroup(group.uuid, group.policy, group.max_server_per_host),
        )
        self.claimer.claim(spec, node, "host", spec.instance_uuid)
        return spec.instance_uuid

    def members(self, group: StoredGroup) -> set[str]:
        return {each for each, _ in self.instances.group_members(group.uuid)}

    def test_it_is_found_by_name_and_uuid_within_its_project(self) -> None:
        made = self.groups.create("web", self.project, "affinity")
        self.assertEqual(made, self.groups.get("web", self.project))
        self.assertEqual(made, self.groups.get(made.uuid, None))
        self.assertEqual([made], self.groups.list(self.project))
        with self.assertRaisesRegex(errors.NotFound, "There is no server group web; moorage server group list"):
            self.groups.get("web", "another project")
        with self.assertRaisesRegex(errors.AlreadyExists, "has a server group web already"):
            self.groups.create("web", self.project, "affinity")
        other = self.groups.create("web", self.project + "-other", "affinity")
        with self.assertRaisesRegex(errors.InvalidInput, "Several projects"):
            self.groups.get("web", None)
        for each in (made, other):
            self.groups.remove(each.uuid)
        with self.assertRaisesRegex(errors.NotFound, "There is no server group"):
            self.groups.remove(made.uuid)

    def test_a_limit_is_for_anti_affinity_only(self) -> None:
        self.assertEqual(3, self.groups.create("apart", self.project, "anti-affinity", 3).max_server_per_host)
        with self.assertRaisesRegex(errors.InvalidInput, "anti-affinity only"):
            self.groups.create("together", self.project, "affinity", 3)

    def test_members_are_those_whose_claims_hold(self) -> None:
        group = self.groups.create("web", self.project, "soft-affinity")
        first, second = self.claim(group, NODES[0]), self.claim(group, NODES[1])
        self.assertEqual({first, second}, self.members(group))
        records = {each.uuid: each for each in self.instances.by_hosts(["host"])}
        self.assertEqual((group.uuid, True), (records[first].server_group, records[first].busy))
        with self.database.write() as tx:
            self.instances.remove(tx, first, 10)
            self.instances.set_status(tx, second, "error", 10)
        self.assertEqual(set(), self.members(group))

    def test_anti_affinity_holds_however_many_claim_at_the_same_moment(self) -> None:
        group = self.groups.create("apart", self.project, "anti-affinity", 2)
        answers = together(*[functools.partial(self.claim, group, NODES[0])] * 6)
        refused = [each for each in answers if isinstance(each, errors.ConstraintViolated)]
        self.assertEqual(4, len(refused), answers)
        self.assertIn("has 2 members of server group", str(refused[0]))
        self.assertEqual(2, len(self.members(group)))
        self.assertIsInstance(self.claim(group, NODES[1]), str)

    def test_anti_affinity_holds_also_for_a_group_that_requests_bring_along(self) -> None:
        def claim(project: str) -> str:
            group = ServerGroup("brought-along", "anti-affinity")
            spec = RequestSpec(str(uuid.uuid4()), Flavor("small", {"VCPU": 1}), project, server_group=group)
            self.claimer.claim(spec, NODES[0], "host", spec.instance_uuid)
            return spec.instance_uuid

        answers = together(*[functools.partial(claim, self.project)] * 4)
        self.assertEqual(3, sum(isinstance(each, errors.ConstraintViolated) for each in answers), answers)
        self.assertIsInstance(claim(f"{self.project}-other"), str)

    def test_affinity_holds_however_many_claim_at_the_same_moment(self) -> None:
        group = self.groups.create("together", self.project, "affinity")
        answers = together(*(functools.partial(self.claim, group, NODES[number % 2]) for number in range(6)))
        refused = [each for each in answers if isinstance(each, errors.ConstraintViolated)]
        self.assertEqual(3, len(refused), answers)
        self.assertEqual(1, len({node for _, node in self.instances.group_members(group.uuid)}))

    def test_affinity_holds_also_for_a_group_that_requests_bring_along(self) -> None:
        def claim(name: str, project: str, node: str) -> str:
            spec = RequestSpec(
                str(uuid.uuid4()), Flavor("small", {"VCPU": 1}), project, server_group=ServerGroup(name, "affinity")
            )
            self.claimer.claim(spec, node, "host", spec.instance_uuid)
            return spec.instance_uuid

        for number in range(5):
            name = f"together-{number}"
            calls = [functools.partial(claim, name, self.project, NODES[each % 2]) for each in range(6)]
            answers = together(*calls)
            refused = [each for each in answers if isinstance(each, errors.ConstraintViolated)]
            self.assertEqual(3, len(refused), answers)
            members = self.instances.group_members(name, project_id=self.project)
            self.assertEqual((3, 1), (len(members), len({node for _, node in members})))

    def test_a_soft_policy_takes_no_turns(self) -> None:
        statements: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            statements.append(statement)

        group = self.groups.create("soft", self.project, "soft-affinity")
        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
        self.claim(group, NODES[0])
        self.assertTrue(any("instances" in each for each in statements))
        self.assertEqual([], [each for each in statements if "server_groups" in each or "group_turns" in each])

    def test_what_filters_promised_holds_however_many_claim_at_the_same_moment(self) -> None:
        node = str(uuid.uuid4())
        ready_node(self.database, node, "host")
        self.store.ensure_providers([ResourceProvider(node, node, inventories=(InventoryItem("VCPU", 1000),))])

        def claim(**limits: int) -> str:
            spec = RequestSpec(str(uuid.uuid4()), Flavor("small", {"VCPU": 1}), self.project, limits=limits)
            self.claimer.claim(spec, node, "host", spec.instance_uuid)
            return spec.instance_uuid

        answers = together(*[functools.partial(claim, num_instances=3, num_io_ops=50)] * 6)
        refused = [each for each in answers if isinstance(each, errors.ConstraintViolated)]
        self.assertEqual(3, len(refused), answers)
        self.assertIn("has 3 instances by now, and filters take 3 for too many", str(refused[0]))
        self.assertEqual({"VCPU": 3}, self.store.usages(providers=[node])[0].used)
        made = next(each for each in answers if isinstance(each, str))
        self.assertEqual(50, self.instances.get(made).pending["limits"]["num_io_ops"])
        # Those that are being built are busy; whoever has no limit is not held up.
        with self.assertRaisesRegex(errors.ConstraintViolated, "has 3 busy instances"):
            claim(num_io_ops=3)
        with self.database.write() as tx:
            self.instances.set_status(tx, made, "active", 10)
        claim(num_io_ops=3)
        claim(something_else=0)

    def test_a_refused_member_leaves_nothing(self) -> None:
        group = self.groups.create("apart", self.project, "anti-affinity")
        kept = self.claim(group, NODES[0])
        before: Any = self.store.usages(providers=[NODES[0]])[0].used
        with self.assertRaises(errors.ConstraintViolated):
            self.claim(group, NODES[0])
        self.assertEqual(before, self.store.usages(providers=[NODES[0]])[0].used)
        self.assertEqual({kept}, self.members(group))
