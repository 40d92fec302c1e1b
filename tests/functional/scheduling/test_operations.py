# SPDX-License-Identifier: Apache-2.0
"""Operations on instances, from the request through scheduler, claims, agents and hypervisors back to every scheduler."""

from __future__ import annotations

import threading
import unittest
import uuid as uuid_module
from collections.abc import Mapping
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import AllocationLedger, FullStore, InventoryItem, ResourceProvider
from moorage.allocation.pools import PoolKeeper
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.drivers.interface import Workload
from moorage.fleet.interface import uuid_of_name
from moorage.instances.interface import (
    DEPARTURE,
    departed_consumer,
    holds_of,
    move_consumer,
)
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.resource_request import with_held_resources
from moorage.services.tables import services
from moorage_plugins.compute.orphaned_claims import InstanceDetector
from moorage_plugins.compute.tables import instances
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import servers
from tests.functional.scheduling.operation_tests import OperationTestCase
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

#: Extra specs that instances of earlier releases may have.
BROKEN = (
    {"resources1:CUSTOM_GPU": "1"},
    {"group_policy": "x"},
    {"resources1:VCPU": "1", "resources2:VCPU": "1", "sim:free_of": "meaning"},
)


class _KeyOperationTests(OperationTestCase):
    def test_an_instance_is_not_moved_off_a_host_whose_agent_is_silent(self) -> None:
        uuid = self.on_h1()
        before, held = self.instance(uuid), self.held()
        self.silence("h1")
        big = {"flavorid": "big", "resources": {"VCPU": 12, "MEMORY_MB": 64}, "extra_specs": {}}
        for operation, wanted in (("live_migrate", {}), ("resize", {"flavor": big, "host": "h2"})):
            with self.assertRaisesRegex(errors.Conflict, "The agent of the host.* is down.*Start the agent"):
                self.move(uuid, operation, f"to-{operation}", **wanted)
        self.assertEqual((before, held), (self.instance(uuid), self.held()))
        self.assertIsNone(open_workers(self.plane.client, self.plane.conf).get("instance", uuid))
        self.plane.start(Agent(), "h1")
        self.move(uuid, "live_migrate", "again")
        wait_until(lambda: self.instance(uuid).host == "h2", "it has moved", SOON)
        self.assert_whole()

    def test_the_source_of_a_move_holds_its_room_until_its_own_agent_has_let_go(self) -> None:
        uuid = self.on_h1()
        source, destination = uuid_of_name("h1-node-0"), uuid_of_name("h2-node-0")
        self.leave(uuid, "h2")
        self.assertEqual(["h2"], self.executing(uuid))
        self.assertEqual({(uuid, destination): 2, (departed_consumer(uuid), source): 2}, self.held())
        self.assertEqual(self.running(), {"h1": {uuid}, "h2": {uuid}})
        departure = open_workers(self.plane.client, self.plane.conf).get(DEPARTURE, uuid)
        assert departure is not None
        self.assertEqual(("let_go", "h1", None), (departure.operation, departure.target_host, departure.owner))
        detector = InstanceDetector(conf=self.plane.conf, database=self.plane.database, clock=self.plane.clock)
        stray = move_consumer(uuid)
        self.assertEqual({stray}, detector.missing([uuid, stray]))
        assert isinstance(self.plane.store, AllocationLedger)
        source_type = {each.uuid: each.consumer_type for each in self.plane.store.consumers()}[departed_consumer(uuid)]
        self.assertEqual("MIGRATION_SOURCE", source_type)
        self.assertNotIn(source_type, detector.consumer_types)
        with self.assertRaisesRegex(errors.Conflict, "the agent of its last host has not removed") as refused:
            self.move(uuid, "live_migrate", "back")
        # Members see this error, and no hosts.
        self.assertNotIn("h1", refused.exception.message)
        self.assertEqual({"instance": uuid}, refused.exception.details)
        # What is on the destination can be worked with meanwhile.
        self.in_place.begin(uuid, "rebuild", {})
        self.plane.wait_status(uuid, "active")
        self.assertIn((departed_consumer(uuid), source), self.held())
        self.plane.start(Agent(), "h1")
        wait_until(lambda: self.held() == {(uuid, destination): 2}, "the source has let go", SOON)
        self.assert_whole()
        self.move(uuid, "live_migrate", "back")
        wait_until(lambda: self.instance(uuid).host == "h1", "it is back", SOON)
        self.assert_whole()

    def test_what_a_source_holds_outlives_the_instance_until_the_source_has_let_go(self) -> None:
        uuid = self.on_h1()
        self.leave(uuid, "h2")
        self.plane.deleter().delete(uuid)
        self.plane.wait_status(uuid, "gone")
        self.assertEqual({(departed_consumer(uuid), uuid_of_name("h1-node-0")): 2}, self.held())
        self.plane.start(Agent(), "h1")
        wait_until(lambda: self.held() == {} and self.running() == {"h1": set(), "h2": set()}, "nothing is left", SOON)

    def test_a_resize_moves_room_and_instance_and_shows_everywhere(self) -> None:
        uuid, other = self.made(2), self.made(2)
        before = self.instance(uuid)
        flavor = {"flavorid": "big", "resources": {"VCPU": 12, "MEMORY_MB": 64}, "extra_specs": {}}
        self.move(uuid, "resize", flavor=flavor)
        self.plane.wait_status(uuid, "active")
        after = self.instance(uuid)
        self.assertEqual((after.flavorid, after.resources["VCPU"], after.pending), ("big", 12, {}))
        self.assertGreater(after.fence, before.fence)
        self.assert_whole()
        self.assertEqual(self.plane.view("scheduler-2")[uuid].flavorid, "big")
        self.assertIn(other, self.plane.view())
        self.assert_owned(uuid)

    def test_an_instance_without_an_allocation_has_its_owner_and_type_again_after_it_moved(self) -> None:
        moves: Mapping[str, Any] = {
            "resize": {"flavor": {"flavorid": "big", "resources": {"VCPU": 3, "MEMORY_MB": 64}, "extra_specs": {}}},
            "live_migrate": {},
        }
        for operation, wanted in moves.items():
            with self.subTest(operation):
                uuid = self.made(2)
                with self.plane.database.write() as tx:
                    owned = sa.update(instances).where(instances.c.uuid == uuid)
                    tx.execute(owned.values(project_id="p", user_id="u"))
                before = self.instance(uuid)
                self.plane.store.release(uuid)
                self.move(uuid, operation, **wanted)
                moved = lambda before=before: (  # noqa: E731
                    (after := self.instance(before.uuid)).fence > before.fence and not after.pending
                )
                wait_until(moved, "it has moved", SOON)
                self.assert_owned(uuid)

    def assert_owned(self, uuid: str) -> None:
        """The allocation says whose it is."""
        assert isinstance(self.plane.store, AllocationLedger)
        held, instance = self.plane.store.consumer(uuid), self.instance(uuid)
        assert held is not None
        consumer = held.consumer
        self.assertEqual(
            ("INSTANCE", instance.project_id, instance.user_id),
            (consumer.consumer_type, consumer.project, consumer.user),
        )

    def test_a_live_migration_leaves_nothing_on_its_source(self) -> None:
        uuid = self.made()
        source = self.instance(uuid).host
        answer = self.move(uuid, "live_migrate")
        self.assertNotEqual(answer["host"], source)
        wait_until(lambda: self.instance(uuid).host != source, "it has moved", SOON)
        self.assert_whole()

    def test_shelving_gives_the_room_back_and_unshelving_takes_some_again(self) -> None:
        uuid = self.made(16)
        self.in_place.begin(uuid, "shelve_offload", {})
        self.plane.wait_status(uuid, "shelved_offloaded")
        self.assertEqual(self.instance(uuid).host, "")
        self.assert_whole()
        self.assertEqual(self.plane.view(), {})
        fillers = [self.made(16), self.made(16)]
        with self.assertRaises(errors.NoValidHost):
            self.move(uuid, "unshelve", "r1")
        self.plane.deleter().delete(fillers[0])
        self.plane.wait_status(fillers[0], "gone")
        self.plane.wait_agreement()
        self.move(uuid, "unshelve", "r2")
        self.plane.wait_status(uuid, "active")
        self.assert_whole()

    def test_what_has_disk_of_a_pool_can_be_moved_resized_and_shelved(self) -> None:
        pool = str(uuid_module.uuid4())
        members = {uuid_of_name(f"{host}-node-0") for host in ("h1", "h2")}
        PoolKeeper(self.plane.store).set(pool, f"pool-{pool}", [InventoryItem("DISK_GB", 100)], members)
        for name in ("scheduler-1", "scheduler-2"):
            self.plane.roles[name]._scheduler.refresh()
        request = self.plane.request(2)
        request["flavor"]["resources"]["DISK_GB"] = 10
        uuid = self.plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})["uuid"]
        self.plane.wait_status(uuid, "active")

        def held() -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            for item in self.plane.store.allocations():
                self.assertEqual(item.consumer, uuid)
                found.setdefault(item.provider, {})[item.resource_class] = item.used
            return found

        source = self.instance(uuid).host
        self.move(uuid, "live_migrate", "r1")
        wait_until(lambda: self.instance(uuid).host != source and not self.instance(uuid).pending, "it moved", SOON)
        self.wait_departures()
        self.assertEqual(held(), {self.instance(uuid).node_uuid: {"VCPU": 2, "MEMORY_MB": 128}, pool: {"DISK_GB": 10}})
        flavor = {"flavorid": "big", "resources": {"VCPU": 3, "DISK_GB": 30}, "extra_specs": {}}
        self.move(uuid, "resize", "r2", flavor=flavor)
        wait_until(lambda: self.instance(uuid).flavorid == "big" and not self.instance(uuid).pending, "resized", SOON)
        self.wait_departures()
        self.assertEqual(held(), {self.instance(uuid).node_uuid: {"VCPU": 3}, pool: {"DISK_GB": 30}})
        self.in_place.begin(uuid, "shelve_offload", {})
        self.plane.wait_status(uuid, "shelved_offloaded")
        self.assertEqual(held(), {})
        self.move(uuid, "unshelve", "r3")
        self.plane.wait_status(uuid, "active")
        self.assertEqual(held(), {self.instance(uuid).node_uuid: {"VCPU": 3}, pool: {"DISK_GB": 30}})

    def test_devices_of_request_groups_are_claimed_by_every_operation(self) -> None:
        gpus: dict[str, set[str]] = {}
        store = self.plane.store
        assert isinstance(store, FullStore)
        told: list[Workload] = []
        for name in ("spawn", "prepare"):
            real = getattr(SimulatedDriver, name)

            def listen(driver: SimulatedDriver, workload: Workload, token: int, real: Any = real) -> Any:
                told.append(workload)
                return real(driver, workload, token)

            self.enterContext(mock.patch.object(SimulatedDriver, name, listen))
        store.create_trait("CUSTOM_FAST")
        for host in ("h1", "h2"):
            node = uuid_of_name(f"{host}-node-0")
            for number in range(4):
                gpu = str(uuid_module.uuid4())
                items = (InventoryItem("PGPU", 1),)
                provider = ResourceProvider(gpu, f"{host}-gpu-{number}", False, inventories=items, parent=node)
                store.create_provider(provider)
                if number:
                    store.set_traits(gpu, {"CUSTOM_FAST"})
                    gpus.setdefault(node, set()).add(gpu)

        def refresh() -> None:
            """Let all schedulers know what is free now, however often they read it."""
            for name in ("scheduler-1", "scheduler-2"):
                self.plane.roles[name]._scheduler.refresh()

        refresh()

        def flavor(name: str, count: int) -> Any:
            groups = {f"resources{number}:PGPU": "1" for number in range(count)}
            traits = {f"trait{number}:CUSTOM_FAST": "required" for number in range(count)}
            specs = {**groups, **traits, "group_policy": "isolate"}
            body = {"flavor": {"flavorid": name, "resources": {"VCPU": 2}, "extra_specs": specs}}
            return with_held_resources(body)["flavor"]

        def assert_held(count: int) -> None:
            """The instance holds so many fast GPUs of its node, and nothing else is held."""
            node = self.instance(uuid).node_uuid
            held = {(item.consumer, item.provider, item.resource_class): item.used for item in store.allocations()}
            self.assertEqual(2, held.pop((uuid, node, "VCPU")))
            self.assertEqual([((uuid, "PGPU"), 1)] * count, [((key[0], key[2]), held[key]) for key in held])
            self.assertLessEqual({provider for _, provider, _ in held}, gpus[node])
            self.assertEqual({"VCPU": 2, "PGPU": count}, self.instance(uuid).resources)
            # The agent was told by the claim.
            made = told[-1]
            self.assertEqual(holds_of(store, uuid), {name: dict(taken) for name, taken in made.holds.items()})

        with self.plane.database.write() as tx:
            # As the agents of an earlier release say at their start.
            offers = " compute compute.live_migrate compute.powers "
            tx.execute(sa.update(services).where(services.c.binary == "agent").values(offers=offers))
        refused = self.plane.request(2) | {"flavor": flavor("gpu2", 2)}
        with self.assertRaisesRegex(errors.NoValidHost, "no agent .* offers compute.holds"):
            self.plane.ask("create_instance", {"request": refused, "request_id": refused["uuid"]})
        with self.plane.database.write() as tx:
            # As the agents of this release say at their start.
            offers = " compute compute.holds compute.live_migrate compute.migrate compute.powers "
            tx.execute(sa.update(services).where(services.c.binary == "agent").values(offers=offers))
        request = self.plane.request(2) | {"flavor": flavor("gpu2", 2)}
        answer = self.plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})
        uuid = answer["uuid"]
        again = self.plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})
        self.assertEqual((uuid, answer["node"]), (again["uuid"], again["node"]))
        self.plane.wait_status(uuid, "active")
        assert_held(2)
        full = self.plane.request(2) | {"flavor": flavor("gpu4", 4)}
        with self.assertRaises(errors.NoValidHost):
            self.plane.ask("create_instance", {"request": full, "request_id": full["uuid"]})
        source = self.instance(uuid).host
        self.move(uuid, "live_migrate", "r1")
        wait_until(lambda: self.instance(uuid).host != source and not self.instance(uuid).pending, "it moved", SOON)
        self.wait_departures()
        assert_held(2)
        refresh()
        self.move(uuid, "resize", "r2", flavor=flavor("gpu3", 3), host=source)
        wait_until(lambda: self.instance(uuid).flavorid == "gpu3" and not self.instance(uuid).pending, "resized", SOON)
        self.wait_departures()
        assert_held(3)
        self.in_place.begin(uuid, "shelve_offload", {})
        self.plane.wait_status(uuid, "shelved_offloaded")
        self.assertEqual([], list(store.allocations()))
        refresh()
        self.move(uuid, "unshelve", "r3")
        self.plane.wait_status(uuid, "active")
        assert_held(3)
        self.plane.deleter().delete(uuid)
        wait_until(lambda: not store.allocations(), "it is deleted", SOON)

    def test_members_of_a_stored_group_that_move_at_the_same_moment_keep_its_policy(self) -> None:
        # The filters are not asked here: the store alone must hold it.
        group = GroupStore(self.plane.database).create("apart", "", "anti-affinity")
        made = []
        for host in ("h1", "h2"):
            request = self.plane.request(1, server_group={"name": group.uuid, "policy": "anti-affinity"})
            request |= {"requested_host": host}
            request["flavor"]["extra_specs"] = {"sim:live_migrate_delay_ms": "500"}
            args = {"request": request, "request_id": request["uuid"]}
            made.append(self.plane.ask("create_instance", args)["uuid"])
        for uuid in made:
            self.plane.wait_status(uuid, "active")
        with self.assertRaisesRegex(errors.NoValidHost, "others claimed every node|No node of"):
            self.move(made[0], "live_migrate", "r1")
        self.plane.enrol({"h3": 1})
        self.plane.start(Agent(), "h3")
        for name in ("scheduler-1", "scheduler-2"):
            wait_until(lambda name=name: self.plane.roles[name]._scheduler.refresh() and self.up(name), "h3", SOON)  # type: ignore[misc]
        outcomes: list[str] = []

        def go(uuid: str) -> None:
            try:
                outcomes.append(self.move(uuid, "live_migrate", f"r-{uuid}")["host"])
            except errors.NoValidHost:
                outcomes.append("refused")

        threads = [threading.Thread(target=go, args=(uuid,)) for uuid in made]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        # Whoever was first has the third node; the other one may follow to where it was only when it has left.
        self.assertIn("h3", outcomes)
        for uuid in made:
            wait_until(lambda uuid=uuid: not self.instance(uuid).pending, "it has ended", SOON)  # type: ignore[misc]
        self.assertEqual(len({self.instance(uuid).node_uuid for uuid in made}), 2)

    def up(self, scheduler: str) -> bool:
        fleet = self.plane.roles[scheduler]._scheduler.view.snapshot()
        return bool(fleet.available.all() and fleet.size == 3)

    def test_a_deletion_by_force_during_a_move_leaves_nothing(self) -> None:
        uuid = self.made(2, **{"sim:live_migrate_delay_ms": "3000"})
        self.move(uuid, "live_migrate")
        wait_until(lambda: self.plane.status(uuid) == "migrating", "it moves", SOON)
        self.plane.deleter().delete(uuid, force=True)
        self.plane.wait_status(uuid, "gone")
        # On a slow machine it may have moved before: then its source lets go after the deletion.
        wait_until(lambda: not list(self.plane.store.allocations()), "nothing is held", SOON)
        wait_until(lambda: self.running() == {"h1": set(), "h2": set()}, "nothing runs", SOON)
        self.plane.wait_agreement()


class OperationTests(_KeyOperationTests):
    """On SQLite, and in more ways."""

    def test_a_resize_in_its_place(self) -> None:
        self.plane.registry.set(self.service("h2"), disabled=True)
        for name in ("scheduler-1", "scheduler-2"):
            self.plane.roles[name]._scheduler.refresh()
        uuid = self.made(2)
        self.assertEqual(self.instance(uuid).host, "h1")
        self.move(uuid, "resize", flavor={"flavorid": "f4", "resources": {"VCPU": 4, "MEMORY_MB": 64}})
        wait_until(lambda: self.instance(uuid).flavorid == "f4", "it is resized", SOON)
        self.assertEqual(self.instance(uuid).host, "h1")
        self.assert_whole()

    def service(self, host: str) -> str:
        return next(each.uuid for each in self.plane.registry.list(binary="agent") if each.host == host)

    def test_a_request_that_is_repeated_begins_nothing_twice(self) -> None:
        uuid = self.made(2, **{"sim:live_migrate_delay_ms": "3000"})
        first = self.move(uuid, "live_migrate", "again")
        again = self.move(uuid, "live_migrate", "again")
        self.assertEqual((first["host"], first["instance"]["fence"]), (again["host"], again["instance"]["fence"]))
        with self.assertRaises(errors.Conflict):
            self.move(uuid, "live_migrate", "another")
        wait_until(lambda: self.instance(uuid).host == first["host"], "it has moved", SOON)
        self.assert_whole()

    def test_a_move_that_is_asked_for_again_after_its_end_moves_nothing_again(self) -> None:
        for fault in ({}, {"sim:live_migrate_fail": "no route"}):
            uuid = self.made(2, **fault)
            first = self.move(uuid, "live_migrate", "once")
            wait_until(lambda uuid=uuid: not self.instance(uuid).pending, "it has ended", SOON)  # type: ignore[misc]
            after = self.instance(uuid)
            answer = self.move(uuid, "live_migrate", "once")
            self.assertEqual((answer["host"], self.instance(uuid)), (after.host, after))
            if not fault:
                self.assertEqual((first["host"], first["node"]), (answer["host"], answer["node"]))
        self.assert_whole()

    def test_a_move_that_fails_leaves_everything_where_it_was(self) -> None:
        uuid = self.made(2, **{"sim:live_migrate_fail": "no route"})
        before = self.instance(uuid)
        self.move(uuid, "live_migrate")
        wait_until(lambda: self.instance(uuid).fault == "no route", "it has failed", SOON)
        after = self.instance(uuid)
        self.assertEqual((after.status, after.host, after.node_uuid), ("active", before.host, before.node_uuid))
        self.assert_whole()
        self.assertIsNone(self.plane.store.consumer(move_consumer(uuid)))  # type: ignore[attr-defined]

    def test_what_is_shelved_can_be_deleted(self) -> None:
        uuid = self.made()
        self.in_place.begin(uuid, "shelve_offload", {})
        self.plane.wait_status(uuid, "shelved_offloaded")
        self.plane.deleter().delete(uuid)
        self.assertEqual(self.plane.status(uuid), "gone")
        self.assert_whole()

    def test_an_unshelving_that_fails_stays_shelved(self) -> None:
        uuid = self.made(2, **{"sim:unshelve_fail": "no image"})
        self.in_place.begin(uuid, "shelve_offload", {})
        self.plane.wait_status(uuid, "shelved_offloaded")
        self.move(uuid, "unshelve")
        wait_until(lambda: self.instance(uuid).fault == "no image", "it has failed", SOON)
        self.assertEqual((self.instance(uuid).status, self.instance(uuid).host), ("shelved_offloaded", ""))
        self.assert_whole()

    def test_a_rebuild_stays_in_its_place_with_another_image(self) -> None:
        uuid = self.made()
        before = self.instance(uuid)
        self.move(uuid, "rebuild", image={"id": "new"})
        wait_until(lambda: self.instance(uuid).request.get("image") == {"id": "new"}, "it is rebuilt", SOON)
        after = self.instance(uuid)
        self.assertEqual((after.status, after.node_uuid), ("active", before.node_uuid))
        self.assert_whole()

    def test_a_rebuild_that_fails_says_so(self) -> None:
        uuid = self.made(2, **{"sim:rebuild_fail": "bad image"})
        self.move(uuid, "rebuild", image={"id": "new"})
        wait_until(lambda: self.instance(uuid).fault == "bad image", "it has failed", SOON)
        self.assertNotIn("image", self.instance(uuid).request)

    def test_extra_specs_of_a_release_that_did_not_check_them_hinder_no_operation(self) -> None:
        for number, broken in enumerate(BROKEN):
            with self.subTest(broken):
                uuid = self.made()
                self.plane.store_extra_specs(uuid, broken)
                held = dict(self.instance(uuid).resources)
                for operation, status in (
                    ("live_migrate", "active"),
                    ("rebuild", "active"),
                    ("shelve_offload", "shelved_offloaded"),
                    ("unshelve", "active"),
                ):
                    if operation == "shelve_offload":
                        self.in_place.begin(uuid, operation, {})
                    else:
                        self.move(uuid, operation, f"{operation}-{number}")
                    wait_until(lambda: not self.instance(uuid).pending, f"the {operation} has ended", SOON)  # noqa: B023
                    found = self.instance(uuid)
                    self.assertEqual(
                        (status, held, broken), (found.status, found.resources, found.request["extra_specs"])
                    )
                    self.assert_whole()
                self.move(uuid, "resize", f"resize-{number}", flavor={"flavorid": "own", "resources": {"VCPU": 1}})
                wait_until(lambda: self.instance(uuid).flavorid == "own", "it is resized", SOON)  # noqa: B023
                self.assertEqual({}, self.instance(uuid).request["extra_specs"])

    def test_what_cannot_begin_is_said_in_plain_words(self) -> None:
        uuid = self.made()
        for begin in (lambda: self.move(uuid, "unshelve"), lambda: self.in_place.begin("none", "rebuild", {})):
            with self.assertRaises((errors.Conflict, errors.NotFound)):
                begin()
        with self.assertRaisesRegex(errors.Conflict, "is active; unshelve needs one that is shelved_offloaded"):
            self.move(uuid, "unshelve")
        with self.assertRaisesRegex(errors.InvalidInput, "no host nowhere"):
            self.move(uuid, "live_migrate", host="nowhere")
        self.assert_whole()


class RebuildTests(unittest.TestCase):
    def test_only_filters_that_are_meant_for_it_are_asked_and_of_the_new_image(self) -> None:
        plane = Plane(
            self,
            scheduling__enabled_filters=["compute", "capacity", "num_instances", "isolated_hosts"],
            filter_num_instances__max_instances_per_host=1,
            filter_isolated_hosts__isolated_images=["secret"],
            filter_isolated_hosts__isolated_hosts=["h2"],
        ).up(("h1",))
        uuid = plane.create(16)["uuid"]
        plane.wait_status(uuid, "active")
        plane.wait_agreement()

        def rebuild(image: str) -> None:
            args = {"instance_uuid": uuid, "operation": "rebuild", "wanted": {"image": {"id": image}}}
            plane.ask("move_instance", {**args, "request_id": f"to-{image}"})

        # The node is full of the instance itself, and has as many as num_instances allows: neither is asked.
        rebuild("plain")
        wait_until(lambda: plane.instances.get(uuid).request.get("image") == {"id": "plain"}, "it is rebuilt", SOON)
        with self.assertRaises(errors.NoValidHost) as caught:
            rebuild("secret")
        self.assertEqual(caught.exception.details["reasons"], {"isolated_hosts": 1})
        self.assertIn("filter isolated_hosts removed", caught.exception.message)
        self.assertEqual(plane.instances.get(uuid).request["image"], {"id": "plain"})
        self.assertEqual(plane.ask("decision", {"request_id": uuid})["outcome"][:8], "refused:")

    def test_a_rebuild_judges_the_traits_of_the_providers_that_the_instance_holds(self) -> None:
        plane = Plane(self, scheduling__enabled_filters=["compute", "capacity", "required_traits"]).up(("h1",))
        store = plane.store
        assert isinstance(store, FullStore)
        gpus = {}
        for name in ("OLD", "FAST"):
            gpus[name] = gpu = str(uuid_module.uuid4())
            items = (InventoryItem("PGPU", 1),)
            provider = ResourceProvider(gpu, name, False, inventories=items, parent=uuid_of_name("h1-node-0"))
            store.create_provider(provider)
            store.create_trait(f"CUSTOM_{name}")
            store.set_traits(gpu, {f"CUSTOM_{name}"})
        plane.roles["scheduler-1"]._scheduler.refresh()
        request = plane.request(2)
        request["flavor"] |= {"resources": {"VCPU": 2, "PGPU": 1}, "extra_specs": {"trait:CUSTOM_OLD": "required"}}
        uuid = plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})["uuid"]
        plane.wait_status(uuid, "active")
        self.assertIn(gpus["OLD"], holds_of(store, uuid))
        plane.wait_agreement()
        plane.store_extra_specs(uuid, {})
        for trait, word, passes in (
            ("CUSTOM_OLD", "required", True),
            ("CUSTOM_OLD", "forbidden", False),
            ("CUSTOM_FAST", "required", False),
            ("CUSTOM_FAST", "forbidden", True),
        ):
            image = {"id": f"{trait}-{word}", "properties": {f"trait:{trait}": word}}
            args = {
                "instance_uuid": uuid,
                "operation": "rebuild",
                "wanted": {"image": image},
                "request_id": image["id"],
            }
            with self.subTest(trait=trait, word=word):
                if passes:
                    plane.ask("move_instance", args)
                    wait_until(lambda: plane.instances.get(uuid).request.get("image") == image, "rebuilt", SOON)  # noqa: B023
                    continue
                with self.assertRaises(errors.NoValidHost) as caught:
                    plane.ask("move_instance", args)
                self.assertEqual({"required_traits": 1}, caught.exception.details["reasons"])


class PostgresqlOperationTests(_KeyOperationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbOperationTests(_KeyOperationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The key tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (OperationTests, RebuildTests, PostgresqlOperationTests, MariadbOperationTests):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
