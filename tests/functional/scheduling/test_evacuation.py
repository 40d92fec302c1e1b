# SPDX-License-Identifier: Apache-2.0
"""Evacuations of fenced hosts: from the operator's word through claims and agents to the host that comes back."""

from __future__ import annotations

import contextlib
import threading
import unittest
from concurrent import futures
from typing import ClassVar
from unittest import mock
from uuid import uuid4

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup.requests import RequestStore
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import open_workers
from moorage.db import MICROSECONDS, now
from moorage.db.tables import events
from moorage.drivers.interface import DriverError, Workload
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.departures import Departures
from moorage.instances.interface import DEPARTURE, departed_consumer, move_consumer
from moorage.instances.moves import ACTIVATE, OF_PHASE, PREPARE, TRANSFER
from moorage.instances.on_node import NodeContents
from moorage.instances.reset_state import Resetter
from moorage.services.interface import Service, ServiceIdentity
from moorage.services.tables import services
from moorage_plugins.compute import operations as compute_operations
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors, servers
from tests.functional.scheduling.operation_tests import OperationTestCase
from tests.functional.scheduling.plane import SOON
from tests.servers import wait_until

DOWN_TIME = 30.0
_AWAY = DriverError("the hypervisor is away")
_NODE = {host: uuid_of_name(f"{host}-node-0") for host in ("h1", "h2", "h3")}


class EvacuationCase(OperationTestCase):
    hosts: ClassVar[tuple[str, ...]] = ("h1", "h2", "h3")

    def agent(self, host: str) -> Service:
        return self.plane.registry.list(binary="agent", host=host)[0]

    def die(self, host: str) -> None:
        """The host's agent is silent, and an operator declares it dead. What its hypervisor runs stays."""
        self.silence(host)
        self.plane.registry.set(self.agent(host).uuid, forced_down=True)

    def fence(self, host: str, reason: str = "its power cable is in my hand") -> Service:
        return self.plane.registry.fence(self.agent(host).uuid, reason, down_time=DOWN_TIME)

    def come_back(self, host: str) -> None:
        self.plane.start(Agent(), host)
        self.plane.registry.set(self.agent(host).uuid, forced_down=False)

    def evacuate(self, uuid: str, request_id: str = "evacuate", **wanted: str) -> None:
        self.move(uuid, "evacuate", f"{request_id}-{uuid}", **wanted)

    def promising(self, host: str, lease: float | None, *, silent: float) -> Service:
        """The agent of a host promised that the host fences itself, and was silent for some seconds."""
        self.plane.stop(host)
        agent = self.agent(host)
        identity = ServiceIdentity(agent.uuid, host, agent.binary, None, agent.epoch)
        self.assertTrue(self.plane.registry.beat_promising(identity, lease))
        with self.plane.database.write() as tx:
            mine = services.c.uuid == agent.uuid
            tx.execute(sa.update(services).where(mine).values(beat_at=services.c.beat_at - int(silent * MICROSECONDS)))
        return agent

    def wait_host(self, uuid: str, host: str) -> None:
        wait_until(
            lambda: (found := self.instance(uuid)).host == host and found.status == "active" and not found.pending,
            f"{uuid} runs on {host}",
            SOON,
        )


class _KeyEvacuationTests(EvacuationCase):
    def test_nothing_is_evacuated_from_a_host_that_may_run_it(self) -> None:
        uuid = self.on_h1()
        before, held = self.instance(uuid), self.held()
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced: it may run there"):
            self.evacuate(uuid)
        with self.assertRaisesRegex(errors.Conflict, "its agent is not declared dead.*--forced-down"):
            self.fence("h1")
        self.die("h1")
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.fence("h1")
        # The agent is believed again, so its host is, too.
        self.plane.registry.set(self.agent("h1").uuid, forced_down=False)
        self.assertFalse(self.agent("h1").fenced)
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.plane.registry.set(self.agent("h1").uuid, forced_down=True)
        self.assertFalse(self.agent("h1").fenced)
        scheduler = self.plane.registry.list(binary="scheduler")[0]
        with self.assertRaisesRegex(errors.Conflict, "is no agent but scheduler"):
            self.plane.registry.fence(scheduler.uuid, "no", down_time=DOWN_TIME)
        self.assertEqual((before, held), (self.instance(uuid), self.held()))
        self.assertIsNone(open_workers(self.plane.client, self.plane.conf).get("instance", uuid))

    def test_a_fence_ends_the_agent_once_and_is_in_the_journal(self) -> None:
        epoch = self.agent("h1").epoch
        self.die("h1")
        first, second = self.fence("h1"), self.fence("h1")
        self.assertEqual((epoch + 1, epoch + 1), (first.epoch, second.epoch))
        self.assertTrue(first.fenced)
        with self.plane.database.read() as tx:
            told = [row.state for row in tx.execute(events.select()) if row.kind == "service.fence"]
        self.assertEqual(["its power cable is in my hand"], [each["fence_reason"] for each in told])
        self.assertEqual(("h1", True), (told[0]["host"], told[0]["fenced"]))

    def test_a_fence_given_again_takes_the_new_reason_and_no_other_epoch(self) -> None:
        self.die("h1")
        first, again = self.fence("h1"), self.fence("h1", "its rack burns")
        self.assertEqual((first.epoch, "its rack burns"), (again.epoch, again.fence_reason))
        self.plane.registry.enlist("agent", "h1", rpc_version="1.0")
        started = self.agent("h1")
        self.assertEqual((False, None, ""), (started.fenced, started.fenced_epoch, started.fence_reason))

    def test_the_host_of_an_agent_that_beats_is_not_fenced(self) -> None:
        self.plane.registry.set(self.agent("h1").uuid, forced_down=True)
        epoch = self.agent("h1").epoch
        with self.assertRaisesRegex(errors.Conflict, r"its agent beat [0-9.]+ seconds ago, so its host is not off"):
            self.fence("h1")
        self.assertEqual((epoch, False), (self.agent("h1").epoch, self.agent("h1").fenced))

    def test_a_cleanup_in_the_midst_of_an_evacuation_keeps_the_fence(self) -> None:
        uuids, stays = [self.on_h1(), self.on_h1(), self.on_h1()], self.on_h1()
        self.die("h1")
        self.fence("h1")
        self.evacuate(uuids[0], host="h2")
        requests = RequestStore(self.plane.database, self.plane.registry)
        before = self.agent("h1")
        for kind in ("manual", "automatic"):
            requests.open(self.agent("h1"), evict=True, kind=kind, requested_by="me")
        self.assertGreater(self.agent("h1").epoch, before.epoch)
        now = self.agent("h1")
        self.assertEqual((True, before.fence_reason, 1), (now.fenced, now.fence_reason, now.evacuated))
        self.evacuate(uuids[1], host="h2")
        self.plane.database.run(lambda tx: self.plane.registry.evict_forced(tx, "agent", "h1"))
        self.evacuate(uuids[2], host="h2")
        for uuid in uuids:
            self.wait_host(uuid, "h2")
        self.come_back("h1")
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(stays)
        self.assert_whole()

    def test_a_host_that_fences_itself_is_fenced_when_its_lease_and_a_margin_are_over(self) -> None:
        uuid = self.on_h1()
        before = self.promising("h1", 600.0, silent=640.0)
        self.assertFalse(self.agent("h1").self_fenced)
        with self.assertRaisesRegex(
            errors.Conflict,
            r"h1 is not fenced. It fences itself 660 seconds after .* 64\d\.\d seconds ago. Try again in [12]\d\.\d seconds, at 2",
        ):
            self.plane.registry.fence_itself(before.uuid)
        self.assertEqual((before.epoch, False), (self.agent("h1").epoch, self.agent("h1").forced_down))
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.promising("h1", 600.0, silent=661.0)
        self.assertTrue(self.agent("h1").self_fenced)
        first, second = (self.plane.registry.fence_itself(before.uuid) for _ in range(2))
        self.assertEqual((True, True, before.epoch + 1), (first.fenced, first.forced_down, first.epoch))
        self.assertEqual(first.epoch, second.epoch)
        with self.plane.database.read() as tx:
            told = [row.state for row in tx.execute(events.select()) if row.kind == "service.fence"]
        self.assertEqual(
            ["The host fenced itself: its agent did not renew the lease."], [e["fence_reason"] for e in told]
        )
        self.evacuate(uuid, host="h2")
        self.wait_host(uuid, "h2")
        self.come_back("h1")
        self.assertIsNone(self.agent("h1").self_fence)
        self.assert_whole()

    def test_a_host_is_not_fenced_by_itself_without_the_promise_of_its_agent(self) -> None:
        self.promising("h1", None, silent=10_000.0)
        uuid = self.agent("h1").uuid
        with self.assertRaisesRegex(errors.Conflict, "h1 is not fenced and does not fence itself.*--fenced --reason"):
            self.plane.registry.fence_itself(uuid)
        # A start ends the promise: the new agent may have workloads that go on.
        for start in (self.start_now, self.start_of_an_earlier_release):
            self.promising("h1", 10.0, silent=10_000.0)
            start(uuid)
            with self.plane.database.write() as tx:
                tx.execute(sa.update(services).where(services.c.uuid == uuid).values(beat_at=0))
            self.assertEqual((None, False), (self.agent("h1").self_fence, self.agent("h1").self_fenced))
            with self.assertRaisesRegex(errors.Conflict, "does not fence itself"):
                self.plane.registry.fence_itself(uuid)
        scheduler = self.plane.registry.list(binary="scheduler")[0]
        with self.assertRaisesRegex(errors.Conflict, "is no agent but scheduler"):
            self.plane.registry.fence_itself(scheduler.uuid)

    def start_now(self, uuid: str) -> None:
        self.plane.registry.enlist("agent", "h1", rpc_version="1.0")

    def start_of_an_earlier_release(self, uuid: str) -> None:
        """It writes what it knows of, and leaves the promise as it is."""
        with self.plane.database.write() as tx:
            tx.execute(
                sa.update(services)
                .where(services.c.uuid == uuid)
                .values(
                    epoch=services.c.epoch + 1, beat=services.c.beat + 1, beat_at=now(), started_at=now(), fenced_epoch=None,
                    fence_reason="",
                )
            )  # fmt: skip

    def test_an_eviction_keeps_the_promise_of_the_host(self) -> None:
        agent = self.promising("h1", 10.0, silent=100.0)
        before = self.agent("h1")
        self.assertTrue(self.plane.registry.evict(agent.uuid, before.epoch, before.beat))
        self.assertTrue(self.plane.registry.fence_itself(agent.uuid).fenced)

    def test_heartbeats_and_a_fence_of_the_host_by_itself_take_turns(self) -> None:
        """Either the heartbeat comes first, and nothing is fenced, or the heartbeat changes no row."""
        registry = self.plane.registry
        for _ in range(12):
            agent = self.promising("h2", 1.0, silent=1000.0)
            identity = ServiceIdentity(agent.uuid, "h2", agent.binary, None, agent.epoch)
            begun = threading.Barrier(2)

            def fence(uuid: str = agent.uuid, begun: threading.Barrier = begun) -> bool:
                begun.wait(SOON)
                try:
                    return registry.fence_itself(uuid).fenced
                except errors.Conflict:
                    return False

            def beat(identity: ServiceIdentity = identity, begun: threading.Barrier = begun) -> bool:
                begun.wait(SOON)
                return registry.beat_promising(identity, 1.0)

            with futures.ThreadPoolExecutor(2) as pool:
                outcomes = [each.result(SOON) for each in (pool.submit(fence), pool.submit(beat))]
            self.assertEqual(1, sum(outcomes), outcomes)
            registry.set(agent.uuid, forced_down=False)

    def test_an_eviction_of_what_is_not_fenced_makes_no_fence(self) -> None:
        self.plane.stop("h1")
        self.plane.registry.set(self.agent("h1").uuid, forced_down=True)
        self.plane.database.run(lambda tx: self.plane.registry.evict_forced(tx, "agent", "h1"))
        self.assertIsNone(self.agent("h1").fenced_epoch)
        self.assertFalse(self.agent("h1").fenced)

    def test_evacuated_instances_run_elsewhere_and_the_host_that_comes_back_removes_them_first(self) -> None:
        uuids = [self.on_h1(), self.on_h1()]
        stays = self.on_h1()
        # What an earlier release stored does not hinder it.
        self.plane.store_extra_specs(uuids[0], {"resources1:VCPU": "1", "resources2:VCPU": "1"})
        self.die("h1")
        self.fence("h1")
        for uuid in uuids:
            self.evacuate(uuid, host="h2")
            # A repetition finds the first one.
            self.evacuate(uuid, host="h2")
        for uuid in uuids:
            self.wait_host(uuid, "h2")
        self.assertEqual(2, self.agent("h1").evacuated)
        kept = {(departed_consumer(uuid), _NODE["h1"]): 2 for uuid in uuids}
        self.assertEqual({**{(uuid, _NODE["h2"]): 2 for uuid in uuids}, **kept, (stays, _NODE["h1"]): 2}, self.held())
        self.assertEqual({*uuids, stays}, self.running()["h1"])
        self.come_back("h1")
        # Before it took anything: its start has returned.
        self.assertEqual({stays}, self.running()["h1"])
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(stays)
        self.assert_whole()

    def assert_does_not_serve(self, sentence: str) -> None:
        """The agent of h1 refuses to start."""
        agent = Agent()
        with self.assertRaisesRegex(errors.Unavailable, sentence):
            agent.start(self.plane.platform("agent", "h1"), self.plane.conf)
        # Its process would end now.
        self.plane.heartbeats["h1"].stop()
        agent._subscription.stop(SOON)

    def test_a_host_that_comes_back_serves_nothing_while_it_may_run_what_was_evacuated(self) -> None:
        stays, uuid = self.on_h1(), self.on_h1()
        self.die("h1")
        self.fence("h1")
        self.evacuate(uuid, host="h2")
        self.wait_host(uuid, "h2")
        with mock.patch.object(SimulatedDriver, "inspect", side_effect=_AWAY):
            self.assert_does_not_serve("It cannot be seen what runs on host h1.*takes no work: the hypervisor is away")
        with mock.patch.object(SimulatedDriver, "destroy", side_effect=_AWAY):
            self.assert_does_not_serve(f"Instance {uuid} has left host h1.*takes no work: the hypervisor is away")
        self.assertEqual({stays, uuid}, self.running()["h1"])
        self.come_back("h1")
        self.assertEqual({stays}, self.running()["h1"])
        self.assert_whole()

    def test_so_does_one_whose_instance_was_evacuated_from_its_next_host_too(self) -> None:
        uuid = self.on_h1()
        for host, to in (("h1", "h2"), ("h2", "h3")):
            self.die(host)
            self.fence(host)
            self.evacuate(uuid, host, host=to)
            self.wait_host(uuid, to)
        with mock.patch.object(SimulatedDriver, "destroy", side_effect=_AWAY):
            self.assert_does_not_serve(f"Instance {uuid} has left host h1")
        for host in ("h1", "h2"):
            self.come_back(host)
        self.assert_whole()

    def test_other_leftovers_that_cannot_be_destroyed_keep_no_agent_from_serving(self) -> None:
        self.plane.stop("h1")
        stranger = str(uuid4())
        hypervisors.put(self.plane.folder, "h1", stranger, 0)
        with mock.patch.object(SimulatedDriver, "destroy", side_effect=_AWAY) as destroy:
            self.plane.start(Agent(), "h1")
        destroy.assert_called_with(stranger, 0)
        self.assertEqual({stranger}, self.running()["h1"])

    def test_an_instance_leaves_a_second_dead_host_although_the_first_never_came_back(self) -> None:
        uuid = self.on_h1()
        for host in ("h1", "h2"):
            self.die(host)
            self.fence(host)
            to = {"h1": "h2", "h2": "h3"}[host]
            self.evacuate(uuid, host, host=to)
            if to == "h3":
                break
            self.wait_host(uuid, to)
        self.wait_host(uuid, "h3")
        # The room on the first host is free by its fence, that on the second waits for its agent.
        self.assertEqual({(uuid, _NODE["h3"]): 2, (departed_consumer(uuid), _NODE["h2"]): 2}, self.held())
        departure = open_workers(self.plane.client, self.plane.conf).get(DEPARTURE, uuid)
        assert departure is not None
        self.assertEqual("h2", departure.target_host)
        self.come_back("h1")
        self.come_back("h2")
        self.assert_whole()

    def test_a_host_that_may_run_what_left_it_before_keeps_an_instance_where_it_is(self) -> None:
        uuid = self.on_h1()
        self.leave(uuid, "h2")
        self.die("h2")
        self.fence("h2")
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.come_back("h1")
        wait_until(lambda: self.held() == {(uuid, _NODE["h2"]): 2}, "h1 has let go", SOON)
        self.evacuate(uuid, "again", host="h3")
        self.wait_host(uuid, "h3")
        self.come_back("h2")
        self.assert_whole()

    def waits_in(self, step: str, uuid: str, operation: str, request_id: str) -> contextlib.ExitStack:
        """Begins a move to h2 that waits in a step until the stack is closed."""

        def unable(held: object) -> None:
            raise errors.Unavailable("The hypervisor is away.")

        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.dict(compute_operations.OPERATIONS, {step: unable}))
        self.move(uuid, operation, request_id, host="h2")
        phase = OF_PHASE[step]
        wait_until(lambda: self.instance(uuid).pending.get("phase") == phase, f"it is in {phase}", SOON)
        return stack

    def test_an_instance_leaves_a_host_that_died_while_it_moved_away(self) -> None:
        moving = {operation: self.on_h1() for operation in ("live_migrate", "migrate")}
        with contextlib.ExitStack() as stack:
            for operation, uuid in moving.items():
                stack.enter_context(self.waits_in(TRANSFER, uuid, operation, f"away-{operation}"))
            self.die("h1")
            with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
                self.evacuate(moving["migrate"])
            self.fence("h1")
            for uuid in moving.values():
                self.evacuate(uuid, host="h3")
        for uuid in moving.values():
            self.wait_host(uuid, "h3")
            self.assertNotIn((move_consumer(uuid), _NODE["h2"]), self.held())
        wait_until(lambda: not self.running()["h2"], "h2 has removed what it had prepared", SOON)
        self.come_back("h1")
        self.assert_whole()

    def test_an_instance_leaves_a_destination_that_died_after_the_commit(self) -> None:
        uuid = self.on_h1()
        stack = self.waits_in(ACTIVATE, uuid, "migrate", "to")
        wait_until(lambda: uuid not in self.running()["h1"], "the source has let go", SOON)
        self.die("h2")
        self.fence("h2")
        with self.assertRaisesRegex(errors.Conflict, "cannot be active yet"):
            Resetter(
                self.plane.database, self.plane.instances, open_workers(self.plane.client, self.plane.conf),
                self.plane.store,
            ).reset(uuid, "active")  # fmt: skip
        with self.assertRaisesRegex(errors.Conflict, "has passed the point of no return"):
            self.in_place.revert_move(uuid, "no")
        self.evacuate(uuid, host="h3")
        stack.close()
        self.wait_host(uuid, "h3")
        self.come_back("h2")
        self.assert_whole()

    def test_a_move_to_a_host_that_is_declared_dead_is_reverted_without_a_request(self) -> None:
        uuid = self.on_h1()
        stack = self.waits_in(PREPARE, uuid, "live_migrate", "to")
        self.die("h2")
        wait_until(lambda: not self.instance(uuid).pending, "the move has ended", SOON)
        found = self.instance(uuid)
        self.assertEqual(("active", "h1"), (found.status, found.host))
        self.assertIn("declared dead before it had prepared the move", found.fault)
        stack.close()
        self.come_back("h2")
        self.assert_whole()

    def test_a_build_that_fails_leaves_the_instance_shelved_and_it_can_come_back(self) -> None:
        uuid = self.on_h1()
        self.die("h1")
        self.fence("h1")
        with mock.patch.object(SimulatedDriver, "check", side_effect=DriverError("no image")):
            self.evacuate(uuid)
            wait_until(lambda: self.instance(uuid).fault == "no image", "it has failed", SOON)
        self.assertEqual(("shelved_offloaded", ""), (self.instance(uuid).status, self.instance(uuid).host))
        self.move(uuid, "unshelve", "back")
        wait_until(lambda: self.instance(uuid).status == "active", "it is back", SOON)
        self.come_back("h1")
        self.assert_whole()

    def group(self, policy: str, count: int) -> list[str]:
        """Members of a server group in the order of their creation."""
        made = []
        for _ in range(count):
            made.append(self.plane.create(server_group={"name": policy, "policy": policy})["uuid"])
            self.plane.wait_status(made[-1], "active")
        return made

    def test_an_affinity_group_leaves_a_dead_host_together(self) -> None:
        uuids = self.group("affinity", 3)
        (dead,) = {self.instance(uuid).host for uuid in uuids}
        self.die(dead)
        self.fence(dead)
        self.evacuate(uuids[0])
        host = self.instance(uuids[0]).host
        (other,) = set(self.hosts) - {dead, host}
        # The group holds: a host that is named is refused where no member is.
        with self.assertRaises(errors.NoValidHost):
            self.evacuate(uuids[1], "apart", host=other)
        for uuid in uuids[1:]:
            self.evacuate(uuid)
        for uuid in uuids:
            self.wait_host(uuid, host)
        self.come_back(dead)
        self.assert_whole()

    def test_members_of_an_affinity_group_that_leave_at_the_same_time_meet(self) -> None:
        uuids = self.group("affinity", 3)
        (dead,) = {self.instance(uuid).host for uuid in uuids}
        self.die(dead)
        self.fence(dead)
        with futures.ThreadPoolExecutor(len(uuids)) as pool:
            list(pool.map(self.evacuate, uuids))
        (host,) = {self.instance(uuid).host for uuid in uuids}
        self.assertNotEqual(dead, host)
        for uuid in uuids:
            self.wait_host(uuid, host)
        self.come_back(dead)
        self.assert_whole()

    def test_members_of_an_anti_affinity_group_stay_apart(self) -> None:
        uuids = self.group("anti-affinity", 2)
        first, second = (self.instance(uuid).host for uuid in uuids)
        (third,) = set(self.hosts) - {first, second}
        self.die(first)
        self.fence(first)
        with self.assertRaises(errors.NoValidHost):
            self.evacuate(uuids[0], "beside the other", host=second)
        self.evacuate(uuids[0])
        self.wait_host(uuids[0], third)
        self.come_back(first)
        self.assert_whole()

    def test_the_node_of_a_host_that_never_comes_back_can_be_removed(self) -> None:
        plane, uuid = self.plane, self.on_h1()
        workers = open_workers(plane.client, plane.conf)
        departures = Departures(plane.database, plane.store, workers, plane.registry)
        contents = NodeContents(plane.database, plane.instances, plane.store, departures)
        enrolment = Enrolment(
            plane.database, NodeStore(plane.database), plane.store, plane.registry, lambda: None, contents=contents
        )
        self.die("h1")
        self.fence("h1")
        with self.assertRaisesRegex(errors.InUse, "1 instance is on it"):
            enrolment.remove(_NODE["h1"])
        self.evacuate(uuid, host="h2")
        self.wait_host(uuid, "h2")
        self.assertEqual({"instances": 0, "departures": 1}, contents.counts(_NODE["h1"]))
        plane.registry.set(self.agent("h1").uuid, forced_down=False)
        with self.assertRaisesRegex(
            errors.InUse, rf"1 evacuated or moved instance that host h1 has not let go \({uuid}\)"
        ):
            enrolment.remove(_NODE["h1"])
        plane.registry.set(self.agent("h1").uuid, forced_down=True)
        self.fence("h1")
        enrolment.remove(_NODE["h1"])
        self.assertEqual({(uuid, _NODE["h2"]): 2}, self.held())
        self.assertIsNone(workers.get(DEPARTURE, uuid))
        self.move(uuid, "live_migrate", "on", host="h3")
        self.wait_host(uuid, "h3")
        # Should it start after all, it removes what it finds.
        self.assertEqual({uuid}, self.running()["h1"])
        plane.start(Agent(), "h1")
        self.assertEqual(set(), self.running()["h1"])

    def test_its_destination_unshelves_it_and_nobody_can_say_that_it_is_active(self) -> None:
        uuid = self.on_h1(**{"sim:unshelve_delay_ms": "2000"})
        self.die("h1")
        self.fence("h1")
        self.evacuate(uuid, host="h2")
        workers = open_workers(self.plane.client, self.plane.conf)
        begun = workers.get("instance", uuid)
        assert begun is not None
        # Agents of earlier releases know no other word for it.
        self.assertEqual(("unshelve", "evacuating", "h2"), (begun.operation, begun.status, begun.target_host))
        resetter = Resetter(self.plane.database, self.plane.instances, workers, self.plane.store)
        with self.assertRaisesRegex(
            errors.Conflict, "is being built or started on its new host, so it cannot be active yet"
        ):
            resetter.reset(uuid, "active")
        self.wait_host(uuid, "h2")
        self.come_back("h1")
        self.assert_whole()

    def test_an_operation_on_a_host_that_was_declared_dead_does_not_hold_up_its_evacuation(self) -> None:
        uuid = self.on_h1()
        self.die("h1")
        before = self.instance(uuid)
        for operation in ("stop", "reboot", "shelve_offload", "rebuild"):
            with self.assertRaisesRegex(errors.Conflict, "was declared dead by an operator") as refused:
                self.in_place.begin(uuid, operation, {})
            self.assertNotIn("h1", str(refused.exception))
        self.assertEqual(before, self.instance(uuid))
        self.fence("h1")
        self.evacuate(uuid, host="h2")
        self.wait_host(uuid, "h2")
        self.in_place.begin(uuid, "rebuild", {})
        self.wait_host(uuid, "h2")
        self.come_back("h1")
        self.assert_whole()

    def test_without_room_elsewhere_it_stays_where_it_is(self) -> None:
        uuid = self.on_h1()
        for host in ("h2", "h3"):
            self.plane.registry.set(self.agent(host).uuid, disabled=True)
        self.die("h1")
        self.fence("h1")
        before, held = self.instance(uuid), self.held()
        with self.assertRaises(errors.NoValidHost):
            self.evacuate(uuid)
        self.assertEqual((before, held), (self.instance(uuid), self.held()))

    def test_evacuations_and_the_return_of_the_host_take_turns(self) -> None:
        """What an agent that starts finds on its host is never evacuated afterwards."""
        uuids = [self.on_h1() for _ in range(7)]
        self.die("h1")
        self.fence("h1")
        refused: list[str] = []
        found: list[str] = []
        begun = threading.Barrier(4)

        def evacuate(mine: list[str]) -> None:
            begun.wait(SOON)
            for uuid in mine:
                try:
                    self.evacuate(uuid)
                except errors.Conflict as error:
                    self.assertIn("host h1 is not fenced", error.message)
                    refused.append(uuid)

        def come_back() -> None:
            begun.wait(SOON)
            wait_until(lambda: self.agent("h1").evacuated >= 2, "some have left", SOON)
            self.plane.registry.enlist("agent", "h1", rpc_version="1.0")
            found.extend(each.uuid for each in self.plane.instances.by_hosts(["h1"]))

        threads = [threading.Thread(target=evacuate, args=(uuids[number::3],)) for number in range(3)]
        threads.append(threading.Thread(target=come_back))
        for each in threads:
            each.start()
        for each in threads:
            each.join(SOON)
        self.assertEqual(sorted(refused), sorted(found))
        self.assertEqual({"h1"}, {self.instance(uuid).host for uuid in refused} | {"h1"})
        self.come_back("h1")
        self.assert_whole()
        self.assertEqual(set(found), self.running()["h1"])


class _KeyDestinationTests(EvacuationCase):
    """The destination of an evacuation, or of an unshelving, dies in the midst of it and is not fenced."""

    settings: ClassVar = {"agent__cluster": "c", "cleanup__lease_seconds": 2, "cleanup__interval": 1}

    def lost(self, *, built: bool, shelved: bool = False) -> str:
        """An instance whose destination h2 died before the end of the build, with what a cleaner has made of it."""
        uuid = self.on_h1()
        if shelved:
            self.in_place.begin(uuid, "shelve_offload", {})
            self.plane.wait_status(uuid, "shelved_offloaded")
        else:
            self.die("h1")
            self.fence("h1")
        begun, end = threading.Event(), threading.Event()
        self.addCleanup(end.set)
        real = SimulatedDriver.spawn

        def spawn(driver: SimulatedDriver, workload: Workload, token: int) -> None:
            if built:
                real(driver, workload, token)
            begun.set()
            end.wait(SOON)

        with mock.patch.object(SimulatedDriver, "spawn", spawn):
            self.move(uuid, "unshelve" if shelved else "evacuate", f"lost-{uuid}", host="h2")
            self.assertTrue(begun.wait(SOON))
        self.silence("h2")
        requests = RequestStore(self.plane.database, self.plane.registry)
        self.assertIsNotNone(requests.open(self.agent("h2"), evict=True, kind="manual", requested_by="me"))
        self.plane.wait_status(uuid, "stopped")
        found = self.instance(uuid)
        self.assertEqual(("h2", _NODE["h2"], "unknown"), (found.host, found.node_uuid, found.actual_state))
        self.assertIn("may run it", found.fault)
        self.assertEqual(2, self.held()[uuid, _NODE["h2"]])
        return uuid

    def assert_runs_when_back(self, uuid: str) -> None:
        with self.assertRaisesRegex(errors.Conflict, "is stopped; unshelve needs"):
            self.move(uuid, "unshelve", "again")
        with self.assertRaisesRegex(errors.Conflict, "host h2 is not fenced"):
            self.evacuate(uuid, "again")
        self.plane.start(Agent(), "h2")
        self.wait_host(uuid, "h2")

    def test_it_runs_there_when_the_destination_is_back(self) -> None:
        self.assert_runs_when_back(self.lost(built=True))
        self.come_back("h1")
        self.assert_whole()

    def test_so_does_one_that_was_unshelved(self) -> None:
        self.assert_runs_when_back(self.lost(built=True, shelved=True))
        self.assert_whole()

    def test_a_fence_takes_it_away(self) -> None:
        uuid = self.lost(built=True)
        self.plane.registry.set(self.agent("h2").uuid, forced_down=True)
        self.fence("h2")
        self.evacuate(uuid, "again", host="h3")
        self.wait_host(uuid, "h3")
        for host in ("h2", "h1"):
            self.come_back(host)
        self.assert_whole()

    def test_what_was_never_built_is_rebuilt_or_deleted(self) -> None:
        uuid = self.lost(built=False)
        self.come_back("h1")
        self.plane.start(Agent(), "h2")
        self.in_place.begin(uuid, "rebuild", {})
        self.wait_host(uuid, "h2")
        self.assert_whole()
        self.plane.deleter().delete(uuid)
        wait_until(lambda: not self.held(), "it is gone", SOON)


class SqliteDestinationTests(_KeyDestinationTests):
    pass


class PostgresqlDestinationTests(_KeyDestinationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbDestinationTests(_KeyDestinationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


class SqliteEvacuationTests(_KeyEvacuationTests):
    pass


class PostgresqlEvacuationTests(_KeyEvacuationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbEvacuationTests(_KeyEvacuationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (
        SqliteEvacuationTests, PostgresqlEvacuationTests, MariadbEvacuationTests, SqliteDestinationTests,
        PostgresqlDestinationTests, MariadbDestinationTests,
    ):  # fmt: skip
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
