# SPDX-License-Identifier: Apache-2.0
"""What the compute agent promises, on any database; a mix-in for the tests of each.

Store, claims, workers and hypervisor are the real ones; only the messages that leave are collected instead of sent.
"""

from __future__ import annotations

import functools
import json
import tempfile
import threading
import unittest
import uuid as uuid_module
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import sqlalchemy as sa
from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.allocation import options as allocation_options
from moorage.allocation.interface import ClaimRequest, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.context import RequestContext, acting_for
from moorage.control_plane import options as control_plane_options
from moorage.control_plane.interface import AgentTools
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.drivers.interface import Workload
from moorage.instances.availability import Availability
from moorage.instances.create import StoreClaimer
from moorage.instances.delete import Deleter
from moorage.instances.in_place import InPlace
from moorage.instances.interface import Instance, move_consumer
from moorage.instances.reset_state import Resetter
from moorage.instances.resizes import Resizes
from moorage.journal.reader import EventFilter, JournalReader
from moorage.journal.sequencer import Sequencer
from moorage.observers.interface import InstanceCreated, InstanceDeleted, InstanceFailed, InstanceRebuilt, ObserverEvent
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.scheduling.reporter import Reporter
from moorage.services.interface import ServiceIdentity
from moorage.testing.database import empty_tables
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers as workers_table
from moorage_plugins.compute import options as compute_options
from moorage_plugins.compute.agent import ComputeAgent, InstanceWork
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.compute.operations import OPERATIONS, Done, Held
from moorage_plugins.compute.tables import instances
from moorage_plugins.migrations import MIGRATIONS
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.stores import options as store_options
from moorage_plugins.stores.sql import SqlStore
from tests import hypervisors
from tests.ready import ready_node
from tests.servers import wait_until

# So that the metadata has all tables.
MIGRATIONS.import_tables()

HOST = "host-1"
NODE = "11111111-1111-4111-8111-111111111111"
#: How statements begin that are counted.
WRITES = ("DELETE", "INSERT", "SELECT", "UPDATE")
#: A delay that the clock of the tests turns into waiting for its gate.
GATED_MS = "77000"
SOON = 90.0


class GateClock(SystemClock):
    """The machine's clock; yet who sleeps 77 seconds sleeps until the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.sleepers = 0
        self._lock = threading.Lock()

    @override
    def sleep(self, seconds: float) -> None:
        if seconds == 77.0:
            with self._lock:
                self.sleepers += 1
            assert self.gate.wait(60)
        else:
            super().sleep(seconds)


class Told:
    """The messages to the schedulers, as the reporter sent them."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def fanout(self, topic: str, method: str, args: dict[str, Any]) -> None:
        assert topic == "scheduler"
        self.messages.append((method, args))

    def created(self) -> list[str]:
        return [
            each["uuid"]
            for method, args in self.messages
            if method == "update_instance_info" and not args.get("replace")
            for each in args["instance_or_list"]
        ]

    def deleted(self) -> list[str]:
        told = [args["instance_uuid"] for method, args in self.messages if method == "delete_instance_info"]
        return [uuid for each in told for uuid in ([each] if isinstance(each, str) else each)]


class NodeNames:
    def node_name(self, uuid: str) -> str:
        return f"node-{uuid[0]}"


class FlakyDatabase(Database):
    """Cannot be reached for the next few transactions that are run, or fails as nobody foresaw."""

    failures = 0
    #: Commits that end several instances and whose answer is lost.
    lost_answers = 0
    #: Commits in which others begin too, whose answer is lost.
    lost_shared = 0
    error: type[Exception] = errors.StoreUnavailable

    @override
    def run(self, work: Callable[[sa.Connection], Any], *, attempts: int | None = None, **more: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise self.error("The store is away, for this test.")
        done = super().run(work, attempts=attempts, **more)
        name = getattr(work, "func", work).__name__
        if (self.lost_answers and name == "_write") or (self.lost_shared and name == "write_and_begin"):
            self.lost_answers -= name == "_write"
            self.lost_shared -= name != "_write"
            raise errors.StoreUnavailable("The connection ended at the commit, for this test.", outcome="unknown")
        return done


class Fleet:
    """A store with one node, and its agents."""

    def __init__(
        self, url: str, state_dir: str, *, lease_seconds: float = 60.0, service: str | None = None, **compute: Any
    ) -> None:
        self.database = FlakyDatabase(url, service=service)
        self.conf = cfg.ConfigOpts()
        for module in (control_plane_options, allocation_options, store_options, compute_options):
            module.register_opts(self.conf)
        self.conf([], project="moorage", default_config_files=[])
        self.conf.set_override("state_dir", state_dir, group="control_plane")
        for name, value in compute.items():
            self.conf.set_override(name, value, group="compute")
        self.state_dir = state_dir
        self.clock = GateClock()
        self.told = Told()
        self.store = SqlStore(conf=self.conf, database=self.database, clock=self.clock)
        self.instances = ComputeInstances(conf=self.conf, database=self.database, clock=self.clock)
        self.workers = SqlOperationStore(self.database, lease_seconds=lease_seconds)
        self.casts: list[tuple[str, str, str]] = []
        #: What observers are told.
        self.events: list[ObserverEvent] = []
        self.gone: list[str] = []
        cast = lambda *cast: self.casts.append(cast)  # noqa: E731
        #: The tokens of deletions, as their messages say them.
        self.deletions: dict[str, int] = {}
        self.deleter = Deleter(self.database, self.instances, self.workers, self._tell, self.gone.append)
        self.in_place = InPlace(self.database, self.instances, self.workers, cast)
        self.resizes = Resizes(self.database, self.instances, self.workers, self.store, cast)
        self.claimer = StoreClaimer(
            self.store, self.instances, self.workers, NodeNames(), GroupStore(self.database),
            Availability(self.database, 3600.0),
        )  # fmt: skip

    def _tell(self, deletions: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        for host, several in deletions.items():
            self.casts += [(host, "delete_instance", uuid) for uuid, _ in several]
            self.deletions |= dict(several)

    def create_tables(self) -> None:
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)
        inventory = InventoryItem("VCPU", 1000)
        self.store.ensure_providers([ResourceProvider(NODE, "node-1", inventories=(inventory,))])
        ready_node(self.database, NODE, HOST)

    def place(self, extra_specs: Mapping[str, str] | None = None) -> str:
        """Claim, instance row and worker row, as a scheduler does it; the uuid."""
        uuid: str = self.place_telling(extra_specs)["instance_uuid"]
        return uuid

    def place_telling(self, extra_specs: Mapping[str, str] | None = None) -> dict[str, Any]:
        """As :meth:`place`; the message to the agent."""
        uuid = str(uuid_module.uuid4())
        flavor = Flavor("small", {"VCPU": 2}, dict(extra_specs or {}))
        made = self.claimer.claim(RequestSpec(uuid, flavor), NODE, HOST, f"req-{uuid}")
        return {"instance_uuid": uuid, "token": made.token, "instance": json.loads(json.dumps(made.shown))}

    def identity(self, epoch: int) -> ServiceIdentity:
        return ServiceIdentity("22222222-2222-4222-8222-222222222222", HOST, "agent", None, epoch)

    def tools(self, epoch: int = 1) -> AgentTools:
        return AgentTools(
            conf=self.conf,
            clock=self.clock,
            database=self.database,
            identity=self.identity(epoch),
            workers=self.workers,
            instances=self.instances,
            release=self.store.release,
            reporter=Reporter(self.told, HOST),
            store=self.store,
            confirm_resize=self.resizes.confirm_seen,
            tell=self.events.append,
        )

    def agent(self, epoch: int = 1) -> ComputeAgent:
        return ComputeAgent(self.tools(epoch))

    def running(self) -> dict[str, list[int]]:
        """What the hypervisor runs: tokens by uuid."""
        return {each.uuid: [each.token] for each in hypervisors.found(self.state_dir, HOST)}

    def used(self) -> int:
        """What is claimed, by the allocations."""
        return sum(item.used for item in self.store.allocations(providers=[NODE]))

    def rows(self) -> int:
        with self.database.read() as tx:
            return tx.execute(sa.select(sa.func.count()).select_from(workers_table)).scalar_one()

    def status(self, uuid: str) -> str | None:
        try:
            return self.instances.get(uuid).status
        except errors.NotFound:
            return None


class AgentTests(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.state_dir = folder.name
        self.fleet = self.make_fleet()
        self.fleet.create_tables()

    def make_fleet(self, **settings: Any) -> Fleet:
        fleet = Fleet(self.url, self.state_dir, **settings)
        self.addCleanup(fleet.database.close)
        return fleet

    def started(self, epoch: int = 1, fleet: Fleet | None = None) -> ComputeAgent:
        fleet = fleet or self.fleet
        agent = fleet.agent(epoch)
        agent.start()
        # In a test that failed while somebody waits at the gate.
        self.addCleanup(agent.stop)
        self.addCleanup(fleet.clock.gate.set)
        return agent

    def await_rows(self, count: int = 0) -> None:
        wait_until(lambda: self.fleet.rows() == count, f"{count} worker rows", SOON)

    def assert_consistent(self, active: int) -> None:
        """As many instances as said, each with its claim, running once under the token of its row; nothing else."""
        found = self.fleet.instances.list()
        self.assertEqual([each.status for each in found], ["active"] * active)
        self.assertEqual(self.fleet.used(), 2 * active)
        self.assertEqual(self.fleet.running(), {each.uuid: [each.fence] for each in found})

    # -- operations -----------------------------------------------------------------------------------------------

    def test_a_build_ends_active_and_is_told(self) -> None:
        agent = self.started()
        uuid = self.fleet.place()
        agent.build_instance(uuid)
        self.await_rows()
        self.assert_consistent(1)
        wait_until(lambda: self.fleet.told.created() == [uuid], "it was told", SOON)
        record = self.fleet.told.messages[-1][1]["instance_or_list"][0]
        self.assertEqual(
            (record["host"], record["node"], record["flavorid"], record["resources"]),
            (HOST, "node-1", "small", {"VCPU": 2}),
        )

    def test_a_deletion_leaves_nothing_and_is_told(self) -> None:
        agent = self.started()
        uuid = self.fleet.place()
        agent.build_instance(uuid)
        self.await_rows()
        self.fleet.deleter.delete(uuid)
        self.assertEqual(self.fleet.casts, [(HOST, "delete_instance", uuid)])
        self.assertEqual(self.fleet.status(uuid), "deleting")
        agent.delete_instance(uuid)
        self.await_rows()
        self.assert_consistent(0)
        wait_until(lambda: self.fleet.told.deleted() == [uuid], "it was told", SOON)

    def test_a_late_try_of_a_request_does_not_create_a_deleted_instance_again(self) -> None:
        # Found by the simulation: a scheduler was paused in the first try, the client repeated its request and then deleted.
        agent, claimer = self.started(), self.fleet.claimer
        uuid = self.fleet.place()
        agent.build_instance(uuid)
        self.await_rows()
        self.fleet.deleter.delete(uuid)
        agent.delete_instance(uuid)
        self.await_rows()
        with self.assertRaisesRegex(errors.Conflict, "existed before and was deleted"):
            claimer.claim(RequestSpec(uuid, Flavor("small", {"VCPU": 2}, {})), NODE, HOST, f"req-{uuid}")
        self.assertIsNone(self.fleet.status(uuid))
        self.assert_consistent(0)

    def resetter(self) -> Resetter:
        fleet = self.fleet
        return Resetter(fleet.database, fleet.instances, fleet.workers, fleet.store, self.reset_hosts.append)

    def test_reset_state_ends_what_is_in_progress_and_keeps_the_claim(self) -> None:
        self.reset_hosts: list[str] = []
        uuid = self.fleet.place()
        held = self.fleet.workers.take_many("instance", [uuid], self.fleet.identity(1))[uuid]
        found = self.resetter().reset(uuid, "error")
        self.assertEqual((found.status, found.pending, self.reset_hosts), ("error", {}, [HOST]))
        self.assertRegex(found.fault, "operator")
        self.assertEqual((self.fleet.rows(), self.fleet.used()), (0, 2))
        with self.assertRaises(errors.Fenced):
            held.finish_with(lambda tx: self.fleet.instances.change(tx, uuid, held.token, {"status": "active"}))
        with self.fleet.database.write() as tx:
            self.assertFalse(self.fleet.instances.change(tx, uuid, held.token, {"status": "active"}))
        self.assertEqual(self.resetter().reset(uuid, "active").fault, "")
        self.assertEqual((self.fleet.status(uuid), self.fleet.used()), ("active", 2))

    def test_reset_state_releases_what_a_move_holds_on_its_destination(self) -> None:
        self.reset_hosts = []
        uuid = self.fleet.place()
        self.fleet.store.claim(ClaimRequest(move_consumer(uuid), {NODE: {"VCPU": 2}}, "req-move"))
        self.assertEqual(self.fleet.used(), 4)
        before = self.fleet.store.residents(NODE)
        self.resetter().reset(uuid, "active")
        self.assertEqual(self.fleet.used(), 2)
        self.assertGreater(self.fleet.store.residents(NODE), before)
        before = self.fleet.store.residents(NODE)
        self.resetter().reset(uuid, "error")
        self.assertGreater(self.fleet.store.residents(NODE), before)

    def test_an_instance_without_host_or_claim_cannot_be_active(self) -> None:
        self.reset_hosts = []
        uuid = self.fleet.place()
        self.fleet.store.release(uuid)
        with self.assertRaisesRegex(errors.Conflict, "holds no claim"):
            self.resetter().reset(uuid, "active")
        self.assertEqual((self.fleet.status(uuid), self.fleet.rows()), ("building", 1))
        with self.fleet.database.write() as tx:
            tx.execute(sa.update(instances).where(instances.c.uuid == uuid).values(host=""))
        with self.assertRaisesRegex(errors.Conflict, "on no host"):
            self.resetter().reset(uuid, "active")
        with self.assertRaises(errors.NotFound):
            self.resetter().reset("nowhere", "error")

    def test_a_reset_looks_again_when_the_operation_ends_in_between(self) -> None:
        self.reset_hosts = []
        uuid = self.fleet.place()
        held = self.fleet.workers.take_many("instance", [uuid], self.fleet.identity(1))[uuid]
        run, ended = self.fleet.database.run, list[bool]()

        def fails_first(work: Callable[[Any], Any]) -> Any:
            if not ended:
                # The build fails, and gives its claim back, after the reset has looked.
                ended.append(True)

                def fail(tx: sa.Connection) -> None:
                    held.end(tx)
                    self.fleet.instances.change(tx, uuid, held.token, {"status": "error"})
                    self.fleet.store.release(uuid, tx)

                run(fail)
            return run(work)

        with (
            mock.patch.object(self.fleet.database, "run", fails_first),
            self.assertRaisesRegex(errors.Conflict, "is error and holds no claim"),
        ):
            self.resetter().reset(uuid, "active")
        self.assertEqual((self.fleet.status(uuid), self.fleet.used()), ("error", 0))

    def test_observers_are_told_of_what_became_of_each_operation(self) -> None:
        agent, fleet = self.started(), self.fleet
        uuid = fleet.place({"sim:rebuild_fail": "bad image"})
        wanted: list[ObserverEvent] = []

        def done(event: ObserverEvent) -> None:
            wanted.append(event)
            wait_until(lambda: len(fleet.events) >= len(wanted), f"{event}", SOON)
            self.assertEqual(wanted, fleet.events)

        agent.build_instance(uuid)
        done(InstanceCreated(uuid, "", "small", HOST, "node-1"))
        fleet.in_place.begin(uuid, "rebuild", {"image": {"id": "new"}})
        agent.operate_instance(uuid)
        done(InstanceFailed(uuid, HOST, "rebuild", "bad image"))
        other = fleet.place()
        agent.build_instance(other)
        done(InstanceCreated(other, "", "small", HOST, "node-1"))
        fleet.in_place.begin(other, "rebuild", {"image": {"id": "new"}})
        agent.operate_instance(other)
        done(InstanceRebuilt(other, HOST, "node-1"))
        fleet.deleter.delete(other)
        agent.delete_instance(other)
        done(InstanceDeleted(other, HOST))
        fleet.in_place.begin(uuid, "shelve_offload", {})
        agent.operate_instance(uuid)
        done(InstanceDeleted(uuid, HOST))
        self.await_rows()
        self.assertEqual([], fleet.gone)
        fleet.deleter.delete(uuid)
        self.assertEqual([uuid], fleet.gone, "it is on no host, so that no agent can tell")

    def test_a_build_that_fails_is_an_error_without_claim_that_can_be_deleted(self) -> None:
        agent = self.started()
        faults = {
            self.fleet.place({"sim:fail": "no such image"}): "no such image",
            self.fleet.place({"sim:fail": ""}): "the simulated build failed",
            self.fleet.place({"sim:delay_ms": "soon"}): "sim:delay_ms of the flavor is 'soon'",
        }
        for uuid in faults:
            agent.build_instance(uuid)
        self.await_rows()
        for uuid, fault in faults.items():
            instance = self.fleet.instances.get(uuid)
            self.assertEqual(instance.status, "error")
            self.assertIn(fault, instance.fault)
        self.assertEqual((self.fleet.used(), self.fleet.running()), (0, {}))
        self.assertEqual(self.fleet.instances.by_hosts([HOST]), [])
        wait_until(lambda: set(self.fleet.told.deleted()) == set(faults), "schedulers were told", SOON)
        for uuid in faults:
            spec = RequestSpec(uuid, Flavor("small", {"VCPU": 2}, {}))
            repeated = self.fleet.claimer.claim(spec, NODE, HOST, f"req-{uuid}")
            self.assertEqual((repeated.node_uuid, repeated.repeated, self.fleet.used()), ("", True, 0))
        for uuid in faults:
            self.fleet.deleter.delete(uuid)
            agent.delete_instance(uuid)
        self.await_rows()
        self.assert_consistent(0)

    def test_doubled_late_and_false_messages_change_nothing(self) -> None:
        agent = self.started()
        uuids = [self.fleet.place() for _ in range(5)]
        for uuid in uuids * 3:
            agent.build_instance(uuid)
        agent.build_instance("no such instance")
        agent.delete_instance(uuids[0])
        self.await_rows()
        for uuid in uuids:
            agent.build_instance(uuid)
            agent.delete_instance(uuid)
        last = self.fleet.place()
        agent.build_instance(last)
        self.await_rows()
        self.assert_consistent(6)
        wait_until(lambda: len(self.fleet.told.created()) >= 6, "they were told", SOON)
        self.assertEqual(Counter(self.fleet.told.created()), Counter([*uuids, last]))

    def test_a_build_keeps_the_token_that_its_message_says(self) -> None:
        agent = self.started()
        messages = [self.fleet.place_telling() for _ in range(3)]
        # Doubled, then late.
        for message in [*messages, *messages]:
            agent.build_instance(**message)
        self.await_rows()
        for message in messages:
            agent.build_instance(**message)
        # Behind it no transaction of the late messages holds a lock. MariaDB passes over locked rows, whose token is raised then.
        between = self.fleet.place()
        agent.build_instance(between)
        self.await_rows()
        last = self.fleet.place_telling()
        agent.build_instance(**last)
        self.await_rows()
        self.assert_consistent(5)
        tokens = {each.uuid: each.fence for each in self.fleet.instances.list() if each.uuid != between}
        self.assertEqual({each["instance_uuid"]: each["token"] for each in (*messages, last)}, tokens)

    def test_one_message_brings_several_deletions(self) -> None:
        agent, uuids = self.started(), [self.fleet.place() for _ in range(3)]
        for uuid in uuids:
            agent.build_instance(uuid)
        self.await_rows()
        for uuid in uuids:
            self.fleet.deleter.delete(uuid)
        (uuid, token), *others = self.fleet.deletions.items()
        for _ in range(2):
            agent.delete_instance(uuid, token, [{"instance_uuid": each, "token": its} for each, its in others])
        self.await_rows()
        self.assert_consistent(0)
        wait_until(lambda: set(self.fleet.told.deleted()) == set(uuids), "schedulers were told", SOON)

    def test_a_deletion_keeps_the_token_that_its_message_says(self) -> None:
        agent, uuids = self.started(), [self.fleet.place() for _ in range(3)]
        for uuid in uuids:
            agent.build_instance(uuid)
        self.await_rows()
        seen: list[tuple[str, int]] = []
        destroy = agent._driver.destroy

        def note(uuid: str, token: int) -> None:
            seen.append((uuid, token))
            destroy(uuid, token)

        with mock.patch.object(agent._driver, "destroy", note):
            for uuid in uuids:
                self.fleet.deleter.delete(uuid)
            told = dict(self.fleet.deletions)
            # Doubled; one of them says the token of an earlier operation.
            for uuid in (*uuids, *uuids):
                agent.delete_instance(uuid, told[uuid] - (uuid == uuids[1]))
            self.await_rows()
            # Late.
            for uuid in uuids:
                agent.delete_instance(uuid, told[uuid])
            wait_until(lambda: not any(agent.loop.depth), "nothing waits", SOON)
        self.assert_consistent(0)
        self.assertEqual({uuid: told[uuid] + (uuid == uuids[1]) for uuid in uuids}, dict(seen))
        self.assertEqual(3, len(seen))

    def test_a_deletion_of_unknown_outcome_under_its_first_token_is_known(self) -> None:
        """The row of the instance has that token before the deletion ends."""
        agent = self.started()
        for lost, answers in ((True, 1), (False, 0)):
            uuid = self.fleet.place()
            agent.build_instance(uuid)
            self.await_rows()
            self.fleet.deleter.delete(uuid)
            work = agent._work
            self.assertEqual(self.fleet.deletions[uuid], self.fleet.instances.get(uuid).fence)
            begin = functools.partial(
                work.begin_told, resource_type="instance", told={uuid: (self.fleet.deletions[uuid], None)}
            )
            (job,) = self.fleet.database.run(begin)
            done = work.do(job)
            self.assertFalse(work.is_written(job, done))
            job.unknown = True
            self.fleet.database.lost_answers = answers
            agent.loop.run(job)
            self.assertEqual((None, 0, lost), (self.fleet.status(uuid), self.fleet.rows(), lost))
            self.assertTrue(work.is_written(job, done))

    def test_a_message_of_a_later_version_is_no_obstacle(self) -> None:
        agent = self.started()
        message = self.fleet.place_telling()
        message["instance"]["colour"] = "blue"
        agent.build_instance(**message)
        self.await_rows()
        self.assert_consistent(1)

    def test_a_late_message_of_a_build_gives_a_later_operation_nothing(self) -> None:
        message = self.fleet.place_telling()
        uuid = message["instance_uuid"]
        self.fleet.deleter.delete(uuid, force=True)
        agent = self.started()
        agent.build_instance(**message)
        self.await_rows()
        self.assert_consistent(0)
        agent.build_instance(**message)
        last = self.fleet.place_telling()
        agent.build_instance(**last)
        self.await_rows()
        self.assert_consistent(1)

    def test_the_next_epoch_builds_what_an_earlier_one_began_with_the_first_token(self) -> None:
        """An agent was killed after it took the build; the doubled message comes to its next incarnation."""
        for built in (False, True):
            message = self.fleet.place_telling()
            uuid = message["instance_uuid"]
            work = InstanceWork(self.fleet.tools(1), self.fleet.agent(1)._driver)
            work.told(**{"uuid": uuid, "token": message["token"], "instance": message["instance"]})
            told = work.told_of("instance", [uuid])
            begin = functools.partial(work.begin_told, resource_type="instance", told=told)
            (job,) = self.fleet.database.run(begin)
            self.assertEqual((message["token"], self.fleet.instances.get(uuid)), (job.lease.token, job.item))
            if built:
                work.do(job)
            agent = self.started(2)
            agent.build_instance(**message)
            self.await_rows()
            agent.stop()
            self.assertGreater(self.fleet.instances.get(uuid).fence, message["token"])
        self.assert_consistent(2)

    def test_a_finish_of_unknown_outcome_under_the_first_token_is_known(self) -> None:
        """The commit was done, and its answer was lost."""
        agent = self.started()
        self.fleet.database.lost_answers = 1
        message = self.fleet.place_telling()
        agent.build_instance(**message)
        self.await_rows()
        self.assert_consistent(1)
        wait_until(lambda: self.fleet.told.created() == [message["instance_uuid"]], "schedulers were told", SOON)

    def test_what_another_host_has_to_do_is_left_to_it(self) -> None:
        # A message of an earlier operation can come when a later one is another host's.
        uuid = self.fleet.place()
        instances = self.fleet.instances
        self.fleet.database.run(lambda tx: instances.change(tx, uuid, 10**6, {"host": "other"}))
        with self.assertLogs("moorage.work.operations", "WARNING") as logs:
            agent = self.fleet.agent()
            self.addCleanup(agent.stop)
            agent.start()
            wait_until(lambda: "is other's to do" in "".join(logs.output), "it is given back", SOON)
        self.assertEqual((self.fleet.status(uuid), self.fleet.running()), ("building", {}))
        self.assertEqual(self.fleet.rows(), 1)

    def test_the_sweep_finds_operations_whose_message_was_lost(self) -> None:
        agent = self.started()
        self.fleet.place()
        self.fleet.place()
        agent.sweep()
        self.await_rows()
        self.assert_consistent(2)

    def test_messages_beyond_the_queue_are_found_by_the_sweep(self) -> None:
        fleet = self.fleet = self.make_fleet(queue=2, operations=1, batch=1)
        agent = fleet.agent()
        uuids = [fleet.place() for _ in range(5)]
        with self.assertLogs("moorage.work.waiting", "WARNING"):
            for uuid in uuids:
                agent.build_instance(uuid)
            agent.start()
        self.addCleanup(agent.stop)

        def done() -> bool:
            agent.sweep()
            return fleet.rows() == 0

        wait_until(done, "all are built", SOON)
        self.assert_consistent(5)

    def test_what_waits_is_taken_in_few_transactions(self) -> None:
        uuids = [self.fleet.place() for _ in range(64)]
        taken: list[str] = []

        def count(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            if statement.startswith("UPDATE workers SET"):
                taken.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", count)
        agent = self.fleet.agent()
        for uuid in uuids:
            agent.build_instance(uuid)
        agent.start()
        self.addCleanup(agent.stop)
        self.await_rows()
        self.assert_consistent(64)
        # A loop that has ended nothing yet takes 16 at a time. It was four each time but once, beside other tests; then five.
        self.assertLessEqual(len(taken), 64 / 16 + 2)

    def ended_together(
        self,
        agent: ComputeAgent,
        ask: Callable[[str], None],
        uuids: Sequence[str],
        before: Callable[[], None] = lambda: None,
        rows: int | None = 0,
    ) -> list[str]:
        """Has operations end in one transaction; the statements of the thread that ends them.

        :param before: called when the operations are done and not ended yet.
        :param rows: how many do not end; None: it is not waited for.
        """
        seen: list[str] = []
        entered, gate = threading.Event(), threading.Event()
        self.addCleanup(gate.set)

        def hold() -> None:
            entered.set()
            gate.wait(SOON)

        def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            if threading.current_thread().name == "compute-finish" and statement.startswith(WRITES):
                seen.append(statement)

        agent.loop.in_order(hold)
        self.assertTrue(entered.wait(SOON))
        for uuid in uuids:
            ask(uuid)
        wait_until(lambda: agent.loop._done.qsize() == len(uuids), "all are done", SOON)
        before()
        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        try:
            gate.set()
            if rows is not None:
                self.await_rows(rows)
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", note)
        return seen

    def test_what_ends_together_costs_as_many_statements_as_two(self) -> None:
        self.fleet = self.make_fleet(operations=8, batch=8, service="agent:test")
        agent, costs = self.started(), []
        users: dict[str, str] = {}
        for count in (2, 8):
            placed = []
            for number in range(count):
                with acting_for(RequestContext(user_id=f"user-{number}", project_id="p", overwrite=False)):
                    placed.append(self.fleet.place())
            build = self.ended_together(agent, agent.build_instance, placed)
            self.assert_consistent(count)
            users |= {uuid: f"user-{number}" for number, uuid in enumerate(placed)}
            for uuid in placed:
                with acting_for(RequestContext(user_id=users[uuid], project_id="p", overwrite=False)):
                    self.fleet.deleter.delete(uuid)
            delete = self.ended_together(agent, agent.delete_instance, placed)
            self.assert_consistent(0)
            costs.append((len(build), len(delete)))
        # The ends of the operations, the instances and how they are then, the events. A deletion has five for the claims.
        self.assertEqual((4, 8 if self.fleet.database.dialect != "mysql" else 9), costs[0])
        self.assertEqual(costs[0], costs[1])
        Sequencer(self.fleet.database).number()
        found = JournalReader(self.fleet.database).page(None, EventFilter(), 1000).events
        of_agent = [each for each in found if each.kind in ("operation.end", "instance.change", "instance.delete")]
        for uuid, user in users.items():
            events = [each for each in of_agent if each.subject == f"instance/{uuid}"]
            kinds = ["operation.end", "instance.change", "instance.change", "operation.end", "instance.delete"]
            self.assertEqual(kinds, [each.kind for each in events])
            self.assertEqual({user}, {each.actor for each in events})
            self.assertEqual(["active", "deleting"], [each.state["status"] for each in events[1:3]])

    def test_some_begin_in_the_transaction_that_ends_others(self) -> None:
        self.begun_and_ended(lambda uuid: None)

    def test_what_ends_does_not_hinder_what_begins(self) -> None:
        self.begun_and_ended(lambda uuid: self.fleet.deleter.delete(uuid, force=True), refused=1)

    def test_what_begins_in_a_transaction_of_unknown_outcome_is_done(self) -> None:
        self.begun_and_ended(lambda uuid: setattr(self.fleet.database, "lost_shared", 1))

    def test_what_begins_in_a_transaction_that_fails_is_done(self) -> None:
        self.begun_and_ended(lambda uuid: setattr(self.fleet.database, "failures", 1))

    def begun_and_ended(self, happens: Callable[[str], object], *, refused: int = 0) -> None:
        """Has three builds end in a transaction in which others begin, one of which was told twice; each is done once.

        :param happens: called before that transaction, with the instance of one of the builds.
        :param refused: how many are deleted.
        """
        self.fleet = self.make_fleet(operations=8, batch=8, lease_seconds=2.0)
        agent, transactions, commit = self.started(), list[int](), InstanceWork.commit
        messages = [self.fleet.place_telling() for _ in range(6)]
        uuids = [each["instance_uuid"] for each in messages]

        def hand_over() -> None:
            for each in (*messages[3:], messages[3]):
                agent.build_instance(**each)
                wait_until(lambda: agent.loop.depth[0] == 0, "it was handed over", SOON)
            happens(uuids[0])

        def count(work: InstanceWork, batch: Any, write: Any) -> None:
            transactions.append(len(batch))
            commit(work, batch, write)

        def swept() -> bool:
            agent.sweep()
            return self.fleet.rows() == 0

        #: Who had the operation, and with which tokens of the row and of the workload, when a workload was made.
        made: list[tuple[str | None, int, int]] = []
        spawn = agent._driver.spawn

        def note(workload: Workload, token: int) -> None:
            row = self.fleet.workers.get("instance", workload.uuid)
            made.append((row.owner, row.token, token) if row is not None else (None, 0, token))
            spawn(workload, token)

        with mock.patch.object(InstanceWork, "commit", count), mock.patch.object(agent._driver, "spawn", note):
            self.ended_together(agent, agent.build_instance, uuids[:3], hand_over, rows=None)
            # A sweep takes what has not begun yet.
            wait_until(lambda: len(transactions) > 0, "the first ones are written", SOON)
            wait_until(swept, "nothing is left", SOON)
        self.assertEqual(3, transactions[0], "they were written together")
        # No work begins before its beginning is recorded.
        self.assertEqual([(self.fleet.identity(1).uuid, token, token) for _, _, token in made], made)
        self.assertEqual(6, len(made))
        self.assert_consistent(6 - refused)
        wait_until(lambda: not any(agent.loop.depth), "nothing is held", SOON)

    def test_one_that_is_refused_stops_no_other_that_ends_with_it(self) -> None:
        self.fleet = self.make_fleet(operations=8, batch=8)
        agent, uuids = self.started(), [self.fleet.place() for _ in range(6)]

        def overtake() -> None:
            # Of one, the row of the operation refuses the end; of another one, only the row of the instance does.
            self.fleet.deleter.delete(uuids[1], force=True)
            with self.fleet.database.write() as tx:
                tx.execute(sa.update(instances).where(instances.c.uuid == uuids[3]).values(fence=1000))

        self.ended_together(agent, agent.build_instance, uuids, overtake, rows=2)
        built = [uuids[place] for place in (0, 2, 4, 5)]
        wait_until(lambda: sorted(self.fleet.told.created()) == sorted(built), "the others were told", SOON)
        self.assertEqual(["active"] * 4, [self.fleet.status(each) for each in built])
        self.assertEqual(["deleting", "building"], [self.fleet.status(uuids[place]) for place in (1, 3)])
        self.assertEqual(sorted(built), sorted(self.fleet.running()))

    # -- lost and won leases --------------------------------------------------------------------------------------

    def test_what_an_earlier_epoch_took_is_done_again(self) -> None:
        deleted = self.fleet.place()
        first = self.started(1)
        self.await_rows()
        first.stop()
        built = self.fleet.place()
        self.fleet.deleter.delete(deleted)
        for uuid in (built, deleted):
            # Taken, and killed before it did anything more.
            self.assertIsNotNone(self.fleet.workers.take("instance", uuid, self.fleet.identity(1)))
        self.started(2)
        self.await_rows()
        self.assert_consistent(1)
        self.assertEqual(self.fleet.status(built), "active")

    def test_a_zombie_changes_nothing_and_removes_what_it_built(self) -> None:
        uuid = self.fleet.place({"sim:delay_ms": GATED_MS})
        zombie = self.started(1)
        wait_until(lambda: self.fleet.clock.sleepers == 1, "the build runs", SOON)
        # The next incarnation: another process, whose clock does not wait.
        other = self.make_fleet()
        other.clock.gate.set()
        self.started(2, other)
        self.await_rows()
        token = self.fleet.instances.get(uuid).fence
        with self.assertLogs("moorage.work.work_loop", "WARNING") as logs:
            self.fleet.clock.gate.set()
            zombie.stop()
        self.assertIn("has been taken over", "".join(logs.output))
        self.assertEqual(self.fleet.instances.get(uuid).fence, token)
        self.assert_consistent(1)
        self.assertEqual(self.fleet.told.created(), [])

    def test_a_forced_deletion_wins_over_a_build_that_runs(self) -> None:
        uuid = self.fleet.place({"sim:delay_ms": GATED_MS})
        agent = self.started()
        wait_until(lambda: self.fleet.clock.sleepers == 1, "the build runs", SOON)
        with self.assertRaises(errors.InUse):
            self.fleet.deleter.delete(uuid)
        self.fleet.deleter.delete(uuid, force=True)
        agent.delete_instance(uuid)
        self.await_rows()
        self.assertIsNone(self.fleet.status(uuid))
        self.fleet.clock.gate.set()
        agent.stop()
        self.assert_consistent(0)

    def test_one_that_was_taken_over_does_not_stop_the_others_of_its_batch(self) -> None:
        fleet = self.fleet = self.make_fleet(operations=3)
        uuids = [fleet.place({"sim:delay_ms": GATED_MS}) for _ in range(3)]
        agent = self.started()
        wait_until(lambda: fleet.clock.sleepers == 3, "the builds run", SOON)
        fleet.deleter.delete(uuids[1], force=True)
        fleet.clock.gate.set()
        wait_until(lambda: fleet.rows() == 1, "the others are finished", SOON)

        def swept() -> bool:
            # What was just finished may count as held for a moment more, and a sweep leaves that to the next one.
            agent.sweep()
            return fleet.rows() == 0

        wait_until(swept, "0 worker rows", SOON)
        self.assert_consistent(2)

    def test_what_fails_and_cannot_be_given_back_stops_nothing_else(self) -> None:
        fleet = self.fleet = self.make_fleet(operations=1)
        agent = self.started()
        fleet.database.error = LookupError
        uuid = fleet.place({"sim:delay_ms": GATED_MS})
        agent.build_instance(uuid)
        wait_until(lambda: fleet.clock.sleepers == 1, "the build runs", SOON)
        # The finisher can neither write what is done nor give it back.
        fleet.database.failures = 2
        fleet.clock.gate.set()
        wait_until(lambda: fleet.database.failures == 0, "it failed twice", SOON)
        second = fleet.place()
        agent.build_instance(second)
        wait_until(lambda: fleet.status(second) == "active", "the finisher goes on", SOON)
        # Nor can the only operator.
        asked: list[str] = []

        def broken(held: Held) -> Done:
            asked.append(held.instance.uuid)
            fleet.database.failures = 1
            raise LookupError(held.instance.uuid)

        third = fleet.place()
        with mock.patch.dict(OPERATIONS, {"build": broken}):
            agent.build_instance(third)
            wait_until(lambda: asked and agent.loop._held == 0, "it was let go", SOON)
            self.assertFalse(agent.loop._renewer.keeps("instance", third))
        self.assertEqual("building", fleet.instances.get(third).status)
        fourth = fleet.place()
        agent.build_instance(fourth)
        wait_until(lambda: fleet.status(fourth) == "active", "the operator goes on", SOON)

    def test_a_long_build_keeps_its_lease(self) -> None:
        fleet = self.fleet = self.make_fleet(lease_seconds=1.0)
        uuid = fleet.place({"sim:delay_ms": GATED_MS})
        self.started()
        wait_until(lambda: fleet.clock.sleepers == 1, "the build runs", SOON)
        seen: set[int] = set()

        def renewed() -> bool:
            with fleet.database.read() as tx:
                seen.add(tx.execute(sa.select(workers_table.c.expires_at)).scalar_one())
            return len(seen) >= 5  # that is longer than the lease it began with

        wait_until(renewed, "the lease is renewed", SOON)
        stranger = ServiceIdentity("33333333-3333-4333-8333-333333333333", HOST, "agent", None, 9)
        self.assertIsNone(fleet.workers.take("instance", uuid, stranger))
        fleet.clock.gate.set()
        self.await_rows()
        self.assert_consistent(1)

    def test_a_store_that_is_away_for_a_while_loses_nothing(self) -> None:
        uuid = self.fleet.place({"sim:delay_ms": GATED_MS})
        self.started()
        wait_until(lambda: self.fleet.clock.sleepers == 1, "the build runs", SOON)
        with self.assertLogs("moorage.work.work_loop", "WARNING") as logs:
            self.fleet.database.failures = 2
            self.fleet.clock.gate.set()
            self.await_rows()
        self.assertIn("done but not written yet", logs.output[0])
        self.assert_consistent(1)
        self.assertEqual(self.fleet.status(uuid), "active")

    def test_a_commit_that_succeeded_with_unknown_outcome_keeps_and_reports_the_instances(self) -> None:
        # Found by the simulation: the agent took the second commit's refusal for a takeover and destroyed what it had built.
        uuids = [self.fleet.place({"sim:delay_ms": GATED_MS}) for _ in range(2)]
        self.started()
        wait_until(lambda: self.fleet.clock.sleepers == 2, "the builds run", SOON)
        self.fleet.database.lost_answers = 1
        self.fleet.clock.gate.set()
        self.await_rows()
        wait_until(lambda: sorted(self.fleet.told.created()) == sorted(uuids), "the schedulers know", SOON)
        self.assertEqual(self.fleet.database.lost_answers, 0)
        self.assertEqual([self.fleet.status(uuid) for uuid in uuids], ["active", "active"])
        self.assertEqual(sorted(self.fleet.running()), sorted(uuids))

    # -- start and stop -------------------------------------------------------------------------------------------

    def test_the_start_tells_all_instances_also_none(self) -> None:
        self.started(1).stop()
        self.assertEqual(
            self.fleet.told.messages,
            [("update_instance_info", {"host_name": HOST, "instance_or_list": [], "replace": True})],
        )
        uuid = self.fleet.place()
        self.started(2)
        method, args = self.fleet.told.messages[1]
        self.assertEqual((method, args["replace"]), ("update_instance_info", True))
        self.assertEqual([each["uuid"] for each in args["instance_or_list"]], [uuid])

    def test_many_deletions_are_told_by_few_messages(self) -> None:
        uuids = [self.fleet.place() for _ in range(40)]
        self.started()
        self.await_rows()
        for uuid in uuids:
            self.fleet.deleter.delete(uuid)
        before = len(self.fleet.told.messages)
        self.started(2)
        self.await_rows()
        wait_until(lambda: sorted(self.fleet.told.deleted()) == sorted(uuids), "they were told", SOON)
        told = [method for method, _ in self.fleet.told.messages[before:] if method == "delete_instance_info"]
        self.assertLess(len(told), len(uuids))

    def test_a_comparison_tells_what_was_committed_and_told_before(self) -> None:
        agent = self.started()
        uuids = [self.fleet.place() for _ in range(3)]
        for uuid in uuids:
            agent.build_instance(uuid)
        self.await_rows()
        agent.tell_instances(everything=False)
        wait_until(lambda: self.fleet.told.messages[-1][0] == "sync_instance_info", "it is told", SOON)
        args = self.fleet.told.messages[-1][1]
        self.assertEqual(sorted(args["instance_uuids"]), sorted(uuids))
        self.assertEqual(args["digest"], instance_digest((uuid, "small") for uuid in uuids))
        self.assertEqual(sorted(self.fleet.told.created()), sorted(uuids))
        agent.tell_instances(everything=True)
        wait_until(lambda: self.fleet.told.messages[-1][0] == "update_instance_info", "it is told", SOON)
        self.assertTrue(self.fleet.told.messages[-1][1]["replace"])

    def test_comparisons_that_wait_together_are_told_once(self) -> None:
        agent = self.started()
        free = threading.Event()
        agent.loop.in_order(lambda: free.wait(SOON))
        before = len(self.fleet.told.messages)
        for everything in (False, True, False, False):
            agent.tell_instances(everything=everything)
        ended = threading.Event()
        agent.loop.in_order(ended.set)
        free.set()
        self.assertTrue(ended.wait(SOON))
        told = self.fleet.told.messages[before:]
        self.assertEqual([(method, args.get("replace")) for method, args in told], [("update_instance_info", True)])

    def test_a_comparison_survives_a_store_that_is_away(self) -> None:
        agent = self.started()
        away = mock.patch.object(self.fleet.instances, "flavors_on", side_effect=errors.StoreUnavailable("away"))
        with self.assertLogs("moorage.work.work_loop", "WARNING"), away as reading:
            for tries in (1, 2):
                agent.tell_instances(everything=False)
                wait_until(lambda tries=tries: reading.call_count >= tries, "it was tried", SOON)  # type: ignore[misc]
        agent.tell_instances(everything=False)
        wait_until(lambda: self.fleet.told.messages[-1][0] == "sync_instance_info", "it is told", SOON)

    def test_the_start_destroys_what_runs_and_does_not_exist(self) -> None:
        uuid = str(uuid_module.uuid4())
        self.give_tokens(uuid, 3)
        hypervisors.put(self.fleet.state_dir, HOST, uuid, 3)
        with self.assertLogs("moorage_plugins.compute.unknown_workloads", "WARNING"):
            self.started()
        self.assert_consistent(0)

    def test_an_instance_whose_move_to_this_host_ends_while_it_is_looked_at_is_kept(self) -> None:
        fleet, agent = self.fleet, self.fleet.agent()
        uuid = fleet.place()

        def is_on(host: str) -> None:
            with fleet.database.write() as tx:
                moves = {} if host == HOST else {"operation": "live_migrate", "host": HOST}
                tx.execute(sa.update(instances).where(instances.c.uuid == uuid).values(host=host, pending=moves))
                if host == HOST:
                    tx.execute(sa.delete(workers_table).where(workers_table.c.resource_id == uuid))

        is_on("another")
        agent._driver.spawn(Workload(uuid=uuid), 1)

        def ending(read: Callable[..., Any]) -> Callable[..., Any]:
            """The move ends right after this reading."""

            def both(*arguments: Any) -> Any:
                found = read(*arguments)
                is_on(HOST)
                return found

            return both

        with (
            mock.patch.object(fleet.workers, "get", ending(fleet.workers.get)),
            mock.patch.object(fleet.instances, "get", ending(fleet.instances.get)),
        ):
            agent._unknown.remove_all(set())
        self.assertEqual({uuid: [1]}, fleet.running())

    def test_what_is_left_of_an_instance_in_error_goes_with_its_claim(self) -> None:
        self.reset_hosts = []
        agent, fleet = self.started(), self.fleet
        uuid, other = fleet.place(), fleet.place()
        for each in (uuid, other):
            agent.build_instance(each)
        self.await_rows()
        # An operator's word keeps the claim, and with it what runs.
        for each in (uuid, other):
            self.resetter().reset(each, "error")
        agent._unknown.remove_all(set())
        self.assertEqual({uuid, other}, fleet.running().keys())
        fleet.store.release(uuid)
        agent._unknown.remove_all(set())
        self.assertEqual({other}, fleet.running().keys())
        fleet.store.release(other)
        agent.look_at_instance(other)
        wait_until(lambda: not fleet.running(), "what is left to go", SOON)

    def test_what_was_built_during_the_look_at_the_hypervisor_is_looked_up_by_one_statement(self) -> None:
        agent, fleet = self.started(), self.fleet
        belonging = [fleet.place() for _ in range(20)]
        for uuid in belonging:
            agent.build_instance(uuid)
        self.await_rows()
        gone = str(uuid_module.uuid4())
        self.give_tokens(gone, 1)
        agent._driver.spawn(Workload(uuid=gone), 1)
        with mock.patch.object(fleet.instances, "get", wraps=fleet.instances.get) as get:
            agent._unknown.remove_all(set())
        self.assertEqual([mock.call(gone)], get.mock_calls)
        self.assertEqual(set(belonging), fleet.running().keys())

    def give_tokens(self, uuid: str, last: int) -> None:
        """Has operations on an instance that is gone: their tokens stay known."""
        with self.fleet.database.write() as tx:
            tokens = [
                self.fleet.workers.create(tx, "instance", uuid, "build", "building", target_host="", force=True)
                for _ in range(last)
            ]
            self.fleet.workers.withdraw(tx, "instance", uuid, tokens[-1])
        self.assertEqual(last, tokens[-1])

    def test_a_workload_that_this_control_plane_never_made_is_destroyed_only_by_option(self) -> None:
        agent = self.fleet.agent()
        deleted, strange, late = (str(uuid_module.uuid4()) for _ in range(3))
        for uuid in (deleted, late):
            self.give_tokens(uuid, 2)
        for uuid, token in ((deleted, 2), (strange, 1), (late, 3)):
            agent._driver.spawn(Workload(uuid=uuid), token)
        for _ in range(2):
            agent._unknown.remove_all(set())
        self.assertEqual({strange: [1], late: [3]}, self.fleet.running())
        self.fleet.conf.set_override("destroy_unknown", True, group="compute")
        agent._unknown.remove_all(set())
        self.assertEqual({}, self.fleet.running())

    def test_stop_ends_what_runs_and_leaves_what_waits_to_the_next_epoch(self) -> None:
        fleet = self.fleet = self.make_fleet(operations=1)
        for _ in range(3):
            fleet.place({"sim:delay_ms": GATED_MS})
        agent = self.started()
        wait_until(lambda: fleet.clock.sleepers == 1, "the first build runs", SOON)
        stopping = threading.Thread(target=agent.stop)
        stopping.start()
        wait_until(agent.loop._stopping.is_set, "the agent is stopping", SOON)
        fleet.clock.gate.set()
        stopping.join(SOON)
        self.assertFalse(stopping.is_alive())
        self.assertEqual(fleet.rows(), 2)
        self.assertEqual(Counter(each.status for each in fleet.instances.list()), {"active": 1, "building": 2})
        self.assertEqual(len(fleet.workers.pending("instance", fleet.identity(1))), 2)
        self.started(2)
        self.await_rows()
        self.assert_consistent(3)

    def test_an_agent_that_never_started_can_be_stopped(self) -> None:
        self.fleet.agent().stop()


class InstanceStoreTests(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        self.database = Database(self.url, service="test")
        self.addCleanup(self.database.close)
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)
        self.store = ComputeInstances(conf=None, database=self.database, clock=SystemClock())

    def test_the_last_event_of_an_instance_says_what_its_row_says(self) -> None:
        """Every write of a row records the row as it is afterwards; a write that changes nothing records nothing."""
        for uuid in ("a", "b", "c"):
            self.insert(uuid, project_id="p", host="h1")
        self.database.run(lambda tx: self.store.change(tx, "a", 3, {"status": "error", "fault": "secret"}))
        pending = {"operation": "live_migrate", "node_uuid": move_consumer("b")}
        self.database.run(lambda tx: self.store.change(tx, "b", 4, {"status": "migrating", "pending": pending}))
        self.assertFalse(self.database.run(lambda tx: self.store.set_status(tx, "b", "active", 2)))
        self.assertEqual(2, self.database.run(lambda tx: self.store.reassign(tx, dict.fromkeys("abc", "h1"), "h2")))
        self.assertTrue(self.database.run(lambda tx: self.store.remove(tx, "c", 9)))
        self.assertFalse(self.database.run(lambda tx: self.store.remove(tx, "c", 10)))
        self.assertEqual(8, Sequencer(self.database).number())
        found = JournalReader(self.database).page(None, EventFilter(project_id="p"), 100).events
        last = {each.subject: each for each in found}
        self.assertEqual(("instance.delete", 9), (last["instance/c"].kind, last["instance/c"].version))
        with self.database.read() as tx:
            for row in tx.execute(sa.select(plugins_metadata.tables["instances"])):
                event = last[f"instance/{row.uuid}"]
                self.assertEqual({name: getattr(row, name) for name in event.state}, event.state)
                self.assertEqual(row.fence, event.version)
        self.assertEqual("h2", last["instance/a"].state["host"])
        self.assertEqual(move_consumer("b"), last["instance/b"].state["destination_uuid"])
        self.assertNotIn("secret", str(found))

    def insert(self, uuid: str, **fields: Any) -> Instance:
        values = {"name": "n", "status": "active", "host": "h1", "node": "N", "node_uuid": NODE, "flavorid": "F"}
        instance = Instance(uuid, **{**values, **fields}, resources={"VCPU": 1}, request={"hints": {"a": ["b"]}})
        self.database.run(lambda tx: self.store.insert(tx, instance))
        return instance

    def test_what_is_inserted_is_read(self) -> None:
        given = self.insert("a", project_id="p", user_id="u")
        read = self.store.get("a")
        self.assertEqual((read.request, read.resources, read.project_id), (given.request, given.resources, "p"))
        self.assertGreater(read.created_at, 1_700_000_000_000_000)

    def test_a_uuid_is_taken_once(self) -> None:
        self.insert("a")
        with self.assertRaises(errors.AlreadyExists):
            self.insert("a")
        with self.assertRaises(errors.NotFound):
            self.store.get("b")

    def test_pages_and_filters(self) -> None:
        for uuid, host, status in (("a", "h1", "active"), ("b", "H1", "active"), ("c", "h1", "error")):
            self.insert(uuid, host=host, status=status)
        self.assertEqual([each.uuid for each in self.store.list(limit=2)], ["a", "b"])
        self.assertEqual([each.uuid for each in self.store.list(after="b")], ["c"])
        self.assertEqual([each.uuid for each in self.store.list(host="h1")], ["a", "c"])
        self.assertEqual([each.uuid for each in self.store.list(status="error")], ["c"])
        self.assertEqual([each.uuid for each in self.store.list(project_id="other")], [])

    def test_an_instance_in_error_occupies_nothing(self) -> None:
        self.insert("a")
        self.insert("b", status="error")
        self.assertEqual([each.uuid for each in self.store.all()], ["a"])
        self.assertEqual([each.uuid for each in self.store.by_hosts(["h1", "h2"])], ["a"])
        self.assertEqual(self.store.by_hosts([]), [])

    def test_writes_are_fenced(self) -> None:
        self.insert("a", fence=5)
        with self.database.write() as tx:
            self.assertFalse(self.store.set_status(tx, "a", "error", 4))
            self.assertFalse(self.store.remove(tx, "a", 4))
            self.assertFalse(self.store.set_status(tx, "a", "error", 6, expected=["building"]))
            self.assertTrue(self.store.set_status(tx, "a", "deleting", 6, expected=["building", "active"]))
        self.assertEqual((self.store.get("a").status, self.store.get("a").fence), ("deleting", 6))
        with self.database.write() as tx:
            self.assertTrue(self.store.remove(tx, "a", 6))
            self.assertFalse(self.store.remove(tx, "a", 7))
