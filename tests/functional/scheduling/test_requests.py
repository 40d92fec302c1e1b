# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a scheduler, and what it says."""

from __future__ import annotations

import threading
import unittest
import uuid as uuid_module
from typing import Any
from unittest import mock

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import open_workers
from moorage.control_plane.scheduler_client import Schedulers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.in_place import InPlace
from tests.functional.scheduling.plane import SOON, OneByOne, Plane
from tests.servers import wait_until


class RequestTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = Plane(
            self,
            scheduling__enabled_filters=[
                "compute", "capacity", "same_host", "different_host", "server_group_anti_affinity",
                "server_group_affinity",
            ],
        ).up(("h1", "h2", "h3"), schedulers=2)  # fmt: skip

    def many(self, count: int, vcpus: int = 1, **more: Any) -> list[str]:
        request = self.plane.request(vcpus, **more)
        uuids = [str(uuid_module.uuid4()) for _ in range(count)]
        made = self.plane.ask("create_instances", {"request": request, "uuids": uuids, "request_id": uuids[0]})
        self.assertEqual([(each["uuid"], each["status"]) for each in made], [(uuid, "building") for uuid in uuids])
        return uuids

    def hosts(self, uuids: list[str]) -> list[str]:
        return sorted(self.plane.instances.get(uuid).host for uuid in uuids)

    def select(self, count: int = 1, vcpus: int = 1, **more: Any) -> Any:
        request = self.plane.request(vcpus, **more)
        return self.plane.ask("select", {"request": request, "count": count, "explain": True})

    # -- hosts and nodes ------------------------------------------------------------------------------------------

    def test_forced_requested_and_ignored_hosts(self) -> None:
        self.assertEqual(self.plane.create(force_hosts=["H2"])["host"], "h2")
        self.assertEqual(self.plane.create(requested_host="h3")["host"], "h3")
        self.assertEqual(self.plane.create(requested_node="h1-node-0")["host"], "h1")
        self.assertEqual(self.plane.create(ignore_hosts=["h1", "H2"])["host"], "h3")
        self.assertEqual(self.plane.create(force_nodes=["h2-node-0"])["host"], "h2")

    def test_a_forced_host_is_not_asked_of_the_filters_unless_that_is_wanted(self) -> None:
        there = self.plane.create(force_hosts=["h1"])["uuid"]
        self.plane.wait_agreement()
        apart = {"different_host": [there]}
        self.assertEqual(self.plane.create(force_hosts=["h1"], hints=apart)["host"], "h1")
        with self.assertRaises(errors.NoValidHost):
            self.plane.create(requested_host="h1", hints=apart)
        with self.assertRaises(errors.NoValidHost):
            hints = {"different_host": [there], "_nova_check_type": ["rebuild"]}
            self.plane.create(force_hosts=["h1"], hints=hints)
        # The store still has the last word.
        with self.assertRaises(errors.NoValidHost):
            self.plane.create(17, force_hosts=["h1"])

    def test_what_does_not_exist_is_named(self) -> None:
        wrongs: tuple[tuple[str, Any], ...] = (
            ("force_hosts", ["nowhere"]),
            ("requested_host", "nowhere"),
            ("force_nodes", ["nowhere"]),
            ("requested_node", "nowhere"),
        )
        for name, wrong in wrongs:
            with self.subTest(name), self.assertRaisesRegex(errors.InvalidInput, "no (host|node) nowhere"):
                self.plane.create(1, scheduler=None, **{name: wrong})
        self.assertEqual(list(self.plane.store.allocations()), [])

    def test_the_next_best_are_told(self) -> None:
        found = self.plane.create()
        self.assertEqual(len(found["alternates"]), 2)
        self.assertNotIn(found["host"], [each["host"] for each in found["alternates"]])

    def test_nothing_lands_where_nothing_may_whichever_filters_there_are(self) -> None:
        plane = Plane(self, scheduling__enabled_filters=["capacity"]).up(("h1",))
        plane.store.update_provider(uuid_of_name("h1-node-0"), can_host=False)  # type: ignore[attr-defined]
        plane.roles["scheduler-1"]._scheduler.refresh()
        with self.assertRaises(errors.NoValidHost) as caught:
            plane.create()
        self.assertEqual(caught.exception.details["reasons"], {"can_host": 1})

    def test_a_node_that_was_removed_is_passed_over_although_nobody_has_told_of_it(self) -> None:
        plane = Plane(self, scheduling__refresh_interval=600.0).up(("h1", "h2"))
        plane.create(4, requested_host="h2")
        nodes = NodeStore(plane.database)
        Enrolment(plane.database, nodes, plane.store, plane.registry, lambda: None).remove(uuid_of_name("h1-node-0"))
        self.assertEqual([plane.create()["host"] for _ in range(3)], ["h2"] * 3)

    def test_what_was_placed_is_answered_again_although_the_fleet_is_full_of_it(self) -> None:
        plane = Plane(self)
        plane.enrol({"h1": 1}, vcpus=3)
        plane.start(Agent(), "h1")
        for name in ("scheduler-1", "scheduler-2"):
            plane.start(SchedulerRole(), name)
        one, several = plane.request(1), plane.request(1)
        uuids = [str(uuid_module.uuid4()) for _ in range(2)]
        single = {"request": one, "request_id": one["uuid"]}
        many = {"request": several, "uuids": uuids, "request_id": uuids[0]}
        first = plane.ask("create_instance", single, scheduler="scheduler-1")
        plane.ask("create_instances", many, scheduler="scheduler-1")
        for uuid in (one["uuid"], *uuids):
            plane.wait_status(uuid, "active")
        plane.wait_agreement()
        for name in ("scheduler-1", "scheduler-2"):
            self.assertEqual(plane.ask("create_instance", single, scheduler=name)["node"], first["node"])
            self.assertEqual(plane.ask("create_instances", many, scheduler=name), [{}, {}])
        with self.assertRaises(errors.NoValidHost):
            plane.create()
        self.assertEqual(len(plane.instances.list()), 3)

    def test_a_repetition_finds_an_instance_that_has_lost_its_claim(self) -> None:
        # Found by the simulation: a build that had failed was refused as deleted when its create was repeated.
        plane = Plane(self, scheduling__alternates=0)
        plane.enrol({"h1": 1}, vcpus=3)
        plane.start(Agent(), "h1")
        for name in ("scheduler-1", "scheduler-2"):
            plane.start(SchedulerRole(), name)
        failing = plane.request(1)
        failing["flavor"]["extra_specs"] = {"sim:fail": "no such image"}
        uuids = [str(uuid_module.uuid4()) for _ in range(2)]
        single = {"request": failing, "request_id": failing["uuid"]}
        many = {"request": plane.request(1), "uuids": uuids, "request_id": uuids[0]}
        plane.ask("create_instance", single)
        plane.wait_status(failing["uuid"], "error")
        plane.ask("create_instances", many)
        for uuid in uuids:
            plane.wait_status(uuid, "active")
        actions = InPlace(plane.database, plane.instances, open_workers(plane.client, plane.conf), lambda *cast: None)
        actions.begin(uuids[1], "shelve_offload", {})
        plane.wait_status(uuids[1], "shelved_offloaded")
        for _ in range(2):
            # With room on the node, and then without.
            plane.wait_agreement()
            for name in ("scheduler-1", "scheduler-2"):
                answer = plane.ask("create_instance", single, scheduler=name)
                self.assertEqual((answer["uuid"], answer["host"], answer["instance"]), (failing["uuid"], "", {}))
                self.assertEqual(plane.ask("create_instances", many, scheduler=name), [{}, {}])
                self.assertEqual(plane.view(name).keys(), plane.records().keys())
                self.assertEqual(
                    plane.ask("decision", {"request_id": failing["uuid"]}, scheduler=name)["outcome"], "exists"
                )
            self.assertEqual(plane.status(failing["uuid"]), "error")
            if len(plane.instances.list()) == 3:
                plane.wait_status(plane.create(2)["uuid"], "active")
        self.assertEqual(
            sorted(each.status for each in plane.instances.list()), ["active", "active", "error", "shelved_offloaded"]
        )

    def test_a_refusal_waits_for_nodes_that_were_enrolled_before_it_was_asked_for(self) -> None:
        plane = Plane(self, scheduling__refresh_interval=600.0)
        plane.start(Agent(), "h1")
        plane.start(SchedulerRole(), "scheduler-1")
        # Nobody has told of them, and the last reading is young.
        plane.enrol({"h1": 1})
        plane.create()
        plane.enrol({"h1": 2})
        plane.client.sender.fanout("scheduler", "fleet_changed")
        scheduler = plane.roles["scheduler-1"]._scheduler
        wait_until(lambda: scheduler.view.snapshot().size == 2, "the reading that was asked for", SOON)
        read = mock.Mock(side_effect=scheduler._freshness._source.changes)
        with mock.patch.object(scheduler._freshness._source, "changes", read):
            for _ in range(50):
                plane.client.sender.call("scheduler", "fleet_changed")
            changed = scheduler._freshness._changed_at
            wait_until(lambda: scheduler._freshness._refreshed_at >= changed, "the last change is read", SOON)

    def test_what_can_never_fit_does_not_have_the_fleet_read_again(self) -> None:
        # So that nobody else reads meanwhile.
        plane = Plane(self, scheduling__refresh_interval=600.0).up(("h1", "h2"))
        scheduler = plane.roles["scheduler-1"]._scheduler
        read = mock.Mock(side_effect=scheduler._freshness._source.changes)
        with mock.patch.object(scheduler._freshness._source, "changes", read):
            scheduler._freshness._refreshed_at = -1e9
            for _ in range(3):
                with self.assertRaises(errors.NoValidHost):
                    plane.create(1000, scheduler="scheduler-1")
            self.assertEqual(read.call_count, 0)
            # What would fit into an empty node is looked for again, and not for each of many refusals.
            scheduler._freshness._reading_took = 100.0
            with self.assertRaises(errors.NoValidHost):
                for _ in range(20):
                    plane.create(16, scheduler="scheduler-1")
            with self.assertRaises(errors.NoValidHost):
                plane.create(16, scheduler="scheduler-1")
            self.assertLessEqual(read.call_count, 3)
            self.assertGreater(read.call_count, 0)

    # -- several alike --------------------------------------------------------------------------------------------

    def test_several_apart(self) -> None:
        group = {"name": "g", "policy": "anti-affinity"}
        made = self.many(3, server_group=group)
        self.assertEqual(self.hosts(made), ["h1", "h2", "h3"])
        # A scheduler that has not heard of all three would be refused by the store, for another reason.
        self.plane.wait_agreement()
        with self.assertRaises(errors.NoValidHost) as caught:
            self.plane.create(server_group=group)
        self.assertIn("server_group_anti_affinity", caught.exception.details["reasons"])
        # Of another project, or name, it is another group.
        self.plane.create(server_group={**group, "name": "other"})

    def test_several_together(self) -> None:
        made = self.many(3, server_group={"name": "g", "policy": "affinity"})
        self.assertEqual(len(set(self.hosts(made))), 1)
        for uuid in made:
            self.plane.wait_status(uuid, "active")
        self.plane.wait_agreement()
        later = self.plane.create(server_group={"name": "g", "policy": "affinity"})
        self.assertEqual([later["host"]], list(set(self.hosts(made))))

    def test_all_or_none(self) -> None:
        with self.assertRaises(errors.NoValidHost):
            self.many(4, server_group={"name": "g", "policy": "anti-affinity"})
        self.assertEqual(list(self.plane.store.allocations()), [])
        self.assertEqual(self.plane.instances.list(), [])
        self.plane.wait_agreement()
        self.assertEqual(len(self.many(3, server_group={"name": "g", "policy": "anti-affinity"})), 3)

    def test_all_or_none_also_when_something_nobody_foresaw_goes_wrong(self) -> None:
        scheduler = self.plane.roles["scheduler-1"]._scheduler
        real = scheduler._claimer

        class Wrong(OneByOne):
            claims = releases = 0

            def claim(self, *arguments: Any) -> Any:
                self.claims += 1
                if self.claims == 4:
                    raise KeyError("anybody's mistake")
                return real.claim(*arguments)

            def earlier(self, *arguments: Any) -> Any:
                return real.earlier(*arguments)

            def release(self, uuid: str) -> None:
                self.releases += 1
                if self.releases == 1:
                    raise errors.StoreUnavailable("away, for a moment")
                real.release(uuid)

        uuids = [str(uuid_module.uuid4()) for _ in range(5)]
        args = {"request": self.plane.request(1), "uuids": uuids, "request_id": uuids[0]}
        wrong = Wrong()
        with (
            mock.patch.object(scheduler, "_claimer", wrong),
            mock.patch.object(scheduler, "_set_claimer", wrong),
            self.assertRaises(errors.MoorageError),
        ):
            self.plane.client.sender.call("scheduler", "create_instances", args, server="scheduler-1")
        self.assertEqual((list(self.plane.store.allocations()), self.plane.instances.list()), ([], []))
        self.plane.wait_agreement()

    def test_what_a_later_try_has_found_is_not_given_back(self) -> None:
        # Found by the simulation: a call that was slow gave back what its repetition had been answered with.
        answers, error = self.repeat_meanwhile(errors.QuotaExceeded("Nothing is left.", project="p"))
        self.assertEqual(set(), {"undone", "left_behind"} & set(error.details), error.details)
        self.assertEqual(["", "", answers[2].get("uuid")], [each.get("uuid", "") for each in answers])

    def test_what_a_later_try_has_made_is_not_given_back(self) -> None:
        # Found by the simulation: it was taken for a claim of this try that had got no answer.
        lost = errors.StoreUnavailable("The answer of the commit was lost.", outcome="unknown")
        self.repeat_meanwhile(lost)

    def repeat_meanwhile(self, error: errors.MoorageError) -> tuple[Any, errors.MoorageError]:
        """A request for three is repeated while it claims for the last one, which ends in an error.

        :returns: the answer of the repetition, and the error of the request.
        """
        uuids = [str(uuid_module.uuid4()) for _ in range(3)]
        args = {"request": self.plane.request(1), "uuids": uuids, "request_id": uuids[0]}
        plane, scheduler = self.plane, self.plane.roles["scheduler-1"]._scheduler
        real, answers = scheduler._claimer, list[Any]()

        class Slow(OneByOne):
            claims = 0

            def claim(self, *arguments: Any) -> Any:
                self.claims += 1
                if self.claims == 3:
                    answers.append(plane.ask("create_instances", args, scheduler="scheduler-2"))
                    raise error
                return real.claim(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        slow = Slow()
        with (
            mock.patch.object(scheduler, "_claimer", slow),
            mock.patch.object(scheduler, "_set_claimer", slow),
            self.assertRaises(type(error)) as caught,
        ):
            plane.client.sender.call("scheduler", "create_instances", args, server="scheduler-1")
        for uuid in uuids:
            plane.wait_status(uuid, "active")
        self.assertEqual(3, len({each.consumer for each in plane.store.allocations()}))
        plane.wait_agreement()
        return answers[0], caught.exception

    def test_a_try_whose_findings_were_given_back_is_refused(self) -> None:
        uuids = [str(uuid_module.uuid4()) for _ in range(3)]
        args = {"request": self.plane.request(1), "uuids": uuids, "request_id": uuids[0]}
        plane, scheduler = self.plane, self.plane.roles["scheduler-1"]._scheduler
        first = self.plane.roles["scheduler-2"]._scheduler._claimer
        plane.ask("create_instances", {**args, "uuids": uuids[:2]}, scheduler="scheduler-2")
        real = scheduler._set_claimer

        class Late(OneByOne):
            def claim(self, *arguments: Any) -> Any:
                return real.claim(*arguments)

            def confirm(self, *arguments: Any) -> None:
                first.release(uuids[0])
                real.confirm(*arguments)

        with (
            mock.patch.object(scheduler, "_set_claimer", Late()),
            mock.patch.object(scheduler._bulk, "_set_claimer", Late()),
            self.assertRaisesRegex(errors.Conflict, "earlier try of the request has given its instances back"),
        ):
            plane.client.sender.call("scheduler", "create_instances", args, server="scheduler-1")
        # Its own one is given back; what the earlier try keeps stays.
        self.assertEqual({uuids[1]}, {each.consumer for each in plane.store.allocations()})
        plane.wait_agreement()

    def test_several_fill_the_fleet_to_the_last_place(self) -> None:
        made = self.many(12, 4)
        self.assertEqual(self.hosts(made), ["h1"] * 4 + ["h2"] * 4 + ["h3"] * 4)
        with self.assertRaises(errors.NoValidHost):
            self.plane.create(1)

    # -- explaining -----------------------------------------------------------------------------------------------

    def test_a_dry_run_of_several_claims_nothing_and_says_where_each_would_go(self) -> None:
        found = self.select(4, server_group={"name": "g", "policy": "anti-affinity"})
        self.assertEqual((found["asked"], found["found"]), (4, 3))
        self.assertEqual(sorted(each["host"] for each in found["selections"]), ["h1", "h2", "h3"])
        self.assertEqual(found["removed"]["server_group_anti_affinity"], 3)
        self.assertEqual(list(self.plane.store.allocations()), [])
        self.assertEqual(self.plane.view(), {})

    def test_an_explanation_says_for_each_node_why(self) -> None:
        there = self.plane.create(requested_host="h1")["uuid"]
        self.plane.wait_agreement()
        found = self.select(vcpus=17, hints={"different_host": [there]})
        self.assertEqual(set(found["refused_nodes"]), {"h1-node-0", "h2-node-0", "h3-node-0"})
        self.assertEqual(set(found["refused_nodes"]["h1-node-0"]), {"capacity", "different_host"})
        self.assertIn("VCPU", found["refused_nodes"]["h2-node-0"]["capacity"])

    def test_a_decision_is_found_afterwards_by_whichever_scheduler_made_it(self) -> None:
        ask = Schedulers(self.plane.client.sender, self.plane.clock, 2, SOON)
        for scheduler in ("scheduler-1", "scheduler-2"):
            made = self.plane.create(scheduler=scheduler)
            decision = ask.find("decision", {"request_id": made["uuid"]})
            self.assertEqual((decision["outcome"], decision["host"]), ("placed", made["host"]))
            self.assertEqual(decision["considered"], 3)
            self.assertEqual(decision["best"][0]["host"], made["host"])
            args = {"request_id": made["uuid"], "node": "h1-node-0"}
            self.assertEqual(ask.find("decision", args)["reasons_now"], {})
        with self.assertRaises(errors.NotFound):
            ask.find("decision", {"request_id": "never asked"})

    def test_a_refusal_is_found_after_the_scheduler_has_gone(self) -> None:
        request = self.plane.request(99)
        with self.assertRaises(errors.NoValidHost) as caught:
            self.plane.ask(
                "create_instance", {"request": request, "request_id": request["uuid"]}, scheduler="scheduler-1"
            )
        self.assertIn("VCPU", caught.exception.message)
        self.assertEqual(caught.exception.details["reasons"], {"capacity": 3})
        refused = self.plane.roles["scheduler-1"]._scheduler._refused
        wait_until(lambda: refused.find(request["uuid"]) is not None, "it is written", SOON)
        self.plane.stop("scheduler-1")
        found = self.plane.ask("decision", {"request_id": request["uuid"]})
        self.assertEqual(found["removed"]["capacity"], 3)
        self.assertIn("refused: no node has enough VCPU free", found["outcome"])


class ManySchedulersTests(unittest.TestCase):
    def test_two_schedulers_at_once_fill_the_fleet_exactly_although_one_is_ended_and_replaced(self) -> None:
        plane = Plane(self, scheduling__host_subset_size=2).up(("h1", "h2", "h3"), schedulers=2)
        outcomes: list[str] = []
        lock = threading.Lock()

        def work() -> None:
            for _ in range(8):
                request = plane.request(2)
                for _ in range(10):
                    try:
                        plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})
                        outcome = "placed"
                        break
                    except errors.NoValidHost:
                        outcome = "refused"
                        break
                    except errors.Unavailable:
                        outcome = "lost"
                with lock:
                    outcomes.append(outcome)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        wait_until(lambda: len(outcomes) >= 4, "some are placed", SOON)
        plane.stop("scheduler-1")
        plane.start(SchedulerRole(), "scheduler-3")
        for each in threads:
            each.join()
        # 3 nodes of 16, each instance 2: 24 fit.
        self.assertEqual(sorted(set(outcomes)), ["placed", "refused"])
        self.assertEqual(outcomes.count("placed"), 24)
        used = [item.used for item in plane.store.allocations() if item.resource_class == "VCPU"]
        self.assertEqual((len(used), sum(used)), (24, 48))
        for uuid in plane.records():
            plane.wait_status(uuid, "active")
        plane.wait_agreement()
