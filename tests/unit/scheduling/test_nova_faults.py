# SPDX-License-Identifier: Apache-2.0
"""The faults of Nova's instance tracking that were reproduced on its release 34, each as what happens here instead."""

from __future__ import annotations

import dataclasses
import sys
import threading
import unittest
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from moorage.rpc.interface import Origin
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import InstanceRecord, NodeState
from moorage.scheduling.view_repair import UntrackedHosts
from tests.unit.scheduling.simulation import SIZES, DictStore, Simulation


class NovaFaultTests(unittest.TestCase):
    def test_1_a_resize_whose_message_was_lost_is_found_by_the_next_comparison(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        agent.create("i", "small")
        simulation.network.deliver_all()
        agent.resize("i", "large")
        simulation.network.pending.clear()
        # The same uuids: Nova's comparison agrees, and the flavor stays old for ever.
        simulation.sync_period()
        self.assertEqual(scheduler.known()["i"], ("h1", "h1-node", "large"))
        self.assertEqual(scheduler.used(), {"h1-node": 4})

    def test_2_the_full_list_of_a_start_replaces_and_is_not_merged(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        for uuid in ("1", "2", "3"):
            agent.create(uuid)
        simulation.network.deliver_all()
        del simulation.store.rows["1"]
        # A new epoch is looked up in the table of services at most once a second.
        simulation.clock.advance(2)
        agent.restart()
        simulation.network.deliver_all()
        self.assertEqual(set(scheduler.known()), {"2", "3"})
        simulation.store.rows.clear()
        simulation.clock.advance(2)
        agent.restart()
        simulation.network.deliver_all()
        self.assertEqual(scheduler.known(), {})

    def test_3_a_host_that_nobody_knew_and_that_has_one_instance_is_trusted_at_once(self) -> None:
        for count in (0, 1, 2):
            simulation = Simulation(["h1"])
            (agent,), (scheduler,) = simulation.agents, simulation.schedulers
            for number in range(count):
                simulation.store.rows[f"i{number}"] = InstanceRecord(
                    f"i{number}", "h1", "h1-node", "small", {"VCPU": 1}
                )
            agent.restart()
            simulation.network.deliver_all()
            scheduler.silent.freshen(scheduler.view.snapshot().rows_of_host)
            self.assertEqual(set(scheduler.known()), {f"i{number}" for number in range(count)})
            self.assertTrue(scheduler.tracker.has_spoken("h1"))
            self.assertEqual(simulation.store.queries, [])

    def test_4_after_a_difference_requests_do_not_read_the_store_each(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        simulation.sync_period()
        agent.create("i")
        simulation.network.pending.clear()
        agent.sync_instances()
        simulation.network.deliver_all()
        self.assertIsNotNone(scheduler.tracker.stale_since("h1"))
        for _ in range(5):
            # The host can be chosen meanwhile.
            fleet = scheduler.view.snapshot()
            scheduler.silent.freshen(fleet.rows_of_host)
            self.assertTrue(fleet.available[0])
        self.assertEqual(simulation.store.queries, [])
        simulation.pass_time(1)
        # The host told; the store was not asked at all.
        self.assertEqual(set(scheduler.known()), {"i"})
        self.assertIsNone(scheduler.tracker.stale_since("h1"))
        self.assertEqual(simulation.store.queries, [])

    def test_5_an_update_that_comes_after_the_deletion_leaves_no_ghost(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        simulation.network.deliver_all()
        agent.create("i")
        agent.delete("i")
        simulation.network.reorder(0, 1)
        simulation.network.deliver_all()
        self.assertEqual(scheduler.known(), {})

    def test_6_a_live_migration_shows_on_its_destination_at_once(self) -> None:
        for lost in (None, 0, 1):
            simulation = Simulation(["h1", "h2"])
            (first, second), (scheduler,) = simulation.agents, simulation.schedulers
            first.create("i")
            simulation.network.deliver_all()
            first.migrate("i", second)
            if lost is not None:
                simulation.network.drop(lost)
            simulation.network.deliver_all()
            if lost == 0:
                # Only the source was heard: it is gone from there, and the comparison finds it.
                self.assertEqual(scheduler.known(), {})
                simulation.sync_period()
            # The word of the destination is enough: nothing is on two hosts.
            self.assertEqual(scheduler.known(), {"i": ("h2", "h2-node", "small")})

    def test_6_whichever_end_is_heard_first(self) -> None:
        simulation = Simulation(["h1", "h2"])
        (first, second), (scheduler,) = simulation.agents, simulation.schedulers
        first.create("i")
        simulation.network.deliver_all()
        first.migrate("i", second)
        simulation.network.reorder(0, 1)
        simulation.network.deliver_all()
        self.assertEqual(scheduler.known(), {"i": ("h2", "h2-node", "small")})

    def test_7_what_was_placed_and_never_built_does_not_stay(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        placed = InstanceRecord("i", "h1", "h1-node", "small", SIZES["small"], "p", server_group="g")
        scheduler.tracker.reserve(placed)
        self.assertEqual(scheduler.view.group_members("p", "g"), {"i"})
        agent.reporter.deleted(["i"])
        simulation.network.deliver_all()
        self.assertEqual((scheduler.known(), scheduler.used()), ({}, {"h1-node": 0}))
        self.assertEqual(scheduler.view.group_members("p", "g"), frozenset())

    def test_7_also_when_nobody_says_so(self) -> None:
        simulation = Simulation(["h1"])
        (scheduler,) = simulation.schedulers
        scheduler.tracker.reserve(InstanceRecord("i", "h1", "h1-node", "small", SIZES["small"], "p"))
        # One period is enough, also when it begins at once: the host may have made its list before the claim.
        simulation.sync_period()
        self.assertEqual((scheduler.known(), scheduler.used()), ({}, {"h1-node": 0}))

    def test_8_a_filter_goes_through_instances_while_updates_arrive(self) -> None:
        view = FleetView()
        view.set_nodes([NodeState("u", "n", "h", {"VCPU": 100.0}, {})])
        tracker = InstanceTracker(view)
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)
        ended, faults, reads = threading.Event(), [], 0

        def write() -> None:
            for number in range(1, 6000):
                record = InstanceRecord(f"i{number % 97}", "h", "n", "small", {"VCPU": 1})
                tracker.update("h", [record], Origin("s", 1, 2 * number))
                tracker.delete("h", f"i{(number * 31) % 97}", Origin("s", 1, 2 * number + 1))
            ended.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not ended.is_set():
            host = view.snapshot().host_state(0)
            try:
                count = sum(each.flavorid == "small" for each in host.instances.values())
            except RuntimeError as error:
                faults.append(str(error))
            else:
                self.assertEqual(count, host.num_instances)
            reads += 1
        writer.join()
        self.assertGreater(reads, 10)
        self.assertEqual(faults, [])

    def test_9_a_start_reads_every_instance_once_whatever_nodes_share_a_host(self) -> None:
        class Counting(DictStore):
            read = 0

            @override
            def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
                page = super().all(after=after, limit=limit)
                self.read += len(page)
                return page

        for hosts in (1, 1000):
            nodes = [
                NodeState(f"u{number:04}", f"n{number}", f"h{number % hosts}", {"VCPU": 1.0}, {})
                for number in range(1000)
            ]
            store = Counting()
            for number, node in enumerate(nodes):
                store.rows[f"i{number}"] = InstanceRecord(f"i{number}", node.host, node.name, "small", {"VCPU": 1})
            view = FleetView()
            view.set_nodes(nodes)
            self.assertEqual(InstanceTracker(view).load(store), 1000)
            self.assertEqual((store.read, store.loads, store.queries), (1000, 1, []))
            # Each on its own node: an instance of one node of a host is not on the others.
            self.assertEqual(set(view.snapshot().num_instances), {1})

    def test_10_what_a_message_said_while_instances_were_loaded_is_not_undone(self) -> None:
        simulation = Simulation(["h1", "h2"])
        (first, second), (scheduler,) = simulation.agents, simulation.schedulers
        first.create("deleted")
        first.create("moved")
        first.create("resized")
        simulation.network.pending.clear()

        class Meanwhile(DictStore):
            @override
            def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
                page = super().all(after=after, limit=limit)
                first.delete("deleted")
                first.migrate("moved", second)
                first.resize("resized", "large")
                simulation.network.deliver_all()
                return page

        source = Meanwhile()
        source.rows = dict(simulation.store.rows)
        scheduler.tracker.load(source)
        self.assertEqual(scheduler.known(), simulation.truth())
        self.assertEqual(scheduler.used(), simulation.used())


class ReservedTests(unittest.TestCase):
    def test_an_instance_that_runs_stays_where_it_is_although_its_uuid_is_asked_for_again(self) -> None:
        simulation = Simulation(["h1", "h2"])
        (first, _), (scheduler,) = simulation.agents, simulation.schedulers
        first.create("i")
        simulation.network.deliver_all()
        again = InstanceRecord("i", "h2", "h2-node", "small", SIZES["small"], "p")
        scheduler.tracker.reserve(again)
        scheduler.tracker.unreserve(again)
        self.assertEqual(scheduler.known(), {"i": ("h1", "h1-node", "small")})
        other = InstanceRecord("j", "h2", "h2-node", "small", SIZES["small"], "p")
        scheduler.tracker.reserve(dataclasses.replace(other, host="h1", node="h1-node"))
        scheduler.tracker.reserve(other)
        self.assertEqual(scheduler.known()["j"], ("h2", "h2-node", "small"))
        scheduler.tracker.unreserve(other)
        self.assertNotIn("j", scheduler.known())


class BareMessageTests(unittest.TestCase):
    """The seed's messages, as an agent without numbers, digests and replace flags sends them."""

    def setUp(self) -> None:
        self.simulation = Simulation(["h1", "h2"])
        (self.scheduler,) = self.simulation.schedulers
        self.endpoint = self.scheduler.endpoint

    def test_an_instance_alone_or_in_a_list_is_added(self) -> None:
        self.endpoint.update_instance_info("h1", {"uuid": "a", "flavorid": "small", "resources": {"VCPU": 1}})
        self.endpoint.update_instance_info("h1", [{"uuid": "b"}, {"uuid": "c", "node": "h1-node"}])
        self.assertEqual(set(self.scheduler.known()), {"a", "b", "c"})
        self.assertTrue(self.scheduler.tracker.has_spoken("h1"))
        self.assertEqual(self.scheduler.used()["h1-node"], 1)
        self.assertFalse(self.scheduler.tracker.has_spoken("h2"))

    def test_they_apply_in_the_order_in_which_they_come(self) -> None:
        self.endpoint.update_instance_info("h1", {"uuid": "a"})
        self.endpoint.delete_instance_info("h1", "a")
        self.assertEqual(self.scheduler.known(), {})
        self.endpoint.update_instance_info("h1", {"uuid": "a"})
        self.assertEqual(set(self.scheduler.known()), {"a"})
        self.endpoint.update_instance_info("h2", {"uuid": "a"})
        self.endpoint.delete_instance_info("h1", "a")
        self.assertEqual(self.scheduler.known()["a"][0], "h2")

    def test_a_comparison_by_uuids_alone(self) -> None:
        self.endpoint.update_instance_info("h1", [{"uuid": "a"}, {"uuid": "b"}])
        self.endpoint.sync_instance_info("h1", ["b", "a"])
        self.assertEqual(self.scheduler.tracker.stale(), {})
        self.endpoint.sync_instance_info("h1", ["a"])
        self.assertEqual(set(self.scheduler.tracker.stale()), {"h1"})

    def test_what_cannot_be_read_is_said_in_plain_words(self) -> None:
        uuid: dict[str, object] = {"uuid": "a"}
        wrongs: list[object] = ["text", {"flavorid": "small"}, [3], {"uuid": 7}]
        wrongs += [{**uuid, "resources": each} for each in (["VCPU"], {"VCPU": 10**400}, {"VCPU": -1}, {"VCPU": True})]
        wrongs += [{**uuid, "server_group": ["x"]}, {**uuid, "fields": "x"}, {**uuid, "resources": {"VCPU": 1.5}}]
        for wrong in wrongs:
            with (
                self.subTest(wrong=wrong),
                self.assertRaisesRegex(Exception, "host h1 has an instance that cannot be read"),
            ):
                self.endpoint.update_instance_info("h1", wrong)
        self.assertEqual(self.scheduler.known(), {})


class RollingUpgradeTests(unittest.TestCase):
    def test_half_a_fleet_that_never_speaks_is_read_by_one_query_and_not_for_each_request(self) -> None:
        simulation = Simulation([f"h{number}" for number in range(10)], silent=5)
        (scheduler,) = simulation.schedulers
        for agent in simulation.agents:
            agent.create(f"i-{agent.host}")
        simulation.sync_period()
        silent = [agent.host for agent in simulation.agents if not agent.speaks]
        self.assertNotIn("i-h0", scheduler.known())

        def request() -> dict[str, tuple[str, str, str]]:
            scheduler.silent.freshen(scheduler.view.snapshot().rows_of_host)
            return scheduler.known()

        for _ in range(5):
            self.assertEqual(request(), simulation.truth())
        self.assertEqual(simulation.store.queries, [silent])
        simulation.agents[0].delete("i-h0")
        simulation.clock.now += 11
        self.assertEqual(request(), simulation.truth())
        self.assertEqual(simulation.store.queries, [silent, silent])

    def test_a_store_that_is_slow_is_not_read_for_every_request(self) -> None:
        simulation = Simulation(["h0", "h1"], silent=1)
        (scheduler,) = simulation.schedulers
        simulation.sync_period()

        class Slow(DictStore):
            @override
            def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
                simulation.clock.now += 60
                return super().by_hosts(hosts)

        slow = Slow()
        silent = UntrackedHosts(scheduler.tracker, slow, simulation.clock, max_age=10.0)
        hosts = scheduler.view.snapshot().rows_of_host
        # It takes longer than a reading is believed otherwise.
        for _ in range(5):
            silent.freshen(hosts)
        self.assertEqual(slow.queries, [["h0"]])
        simulation.clock.now += 61
        silent.freshen(hosts)
        self.assertEqual(slow.queries, [["h0"], ["h0"]])

    def test_a_host_is_trusted_from_its_first_word(self) -> None:
        simulation = Simulation(["h0", "h1"], silent=1)
        (scheduler,) = simulation.schedulers
        simulation.sync_period()
        hosts = scheduler.view.snapshot().rows_of_host
        self.assertEqual(scheduler.tracker.silent(hosts), ["h0"])
        upgraded = simulation.agents[0]
        upgraded.speaks = True
        upgraded.restart()
        simulation.network.deliver_all()
        simulation.clock.now += 60
        self.assertFalse(scheduler.silent.freshen(hosts))
        self.assertEqual(simulation.store.queries, [])

    def test_hosts_that_have_all_spoken_are_not_compared_for_each_request(self) -> None:
        simulation = Simulation(["h0", "h1"])
        (scheduler,) = simulation.schedulers
        simulation.sync_period()
        compared: list[int] = []

        class Hosts(dict[str, object]):
            @override
            def keys(self) -> Any:
                compared.append(1)
                return super().keys()

        hosts = Hosts(scheduler.view.snapshot().rows_of_host)
        for _ in range(3):
            self.assertEqual([], scheduler.tracker.silent(hosts))
        self.assertEqual(1, len(compared))
        # Other hosts are another object.
        self.assertEqual(["h2"], scheduler.tracker.silent(Hosts(hosts, h2=None)))
        self.assertEqual(2, len(compared))


class NewFieldTests(unittest.TestCase):
    def test_a_field_that_only_a_filter_of_somebody_elses_knows_travels(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        record = InstanceRecord("i", "h1", "h1-node", "small", SIZES["small"], "p", {"license": "gold"})
        agent.reporter.created([record])
        simulation.network.deliver_all()
        host = scheduler.view.snapshot().host_state(0)
        self.assertEqual([each.fields["license"] for each in host.instances.values()], ["gold"])

    def test_what_is_busy_and_in_a_group_travels_too(self) -> None:
        simulation = Simulation(["h1"])
        (agent,), (scheduler,) = simulation.agents, simulation.schedulers
        record = InstanceRecord("i", "h1", "h1-node", "small", SIZES["small"], "p", busy=True, server_group="g")
        agent.reporter.created([record])
        simulation.network.deliver_all()
        self.assertEqual(scheduler.view.snapshot().host_state(0).num_io_ops, 1)
        self.assertEqual(scheduler.view.group_members("p", "g"), {"i"})
        agent.reporter.created([dataclasses.replace(record, busy=False, server_group="")])
        simulation.network.deliver_all()
        self.assertEqual(scheduler.view.snapshot().host_state(0).num_io_ops, 0)
        self.assertEqual(scheduler.view.group_members("p", "g"), frozenset())
