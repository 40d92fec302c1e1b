# SPDX-License-Identifier: Apache-2.0
"""What filters promise about a node's instances holds however many requests are decided at the same moment.

Real schedulers decide; real agents build. Each test looks at the store, not at what schedulers believe.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import unittest
import uuid as uuid_module
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import Auditable, InventoryItem
from moorage.allocation.pools import PoolKeeper
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.fleet.interface import uuid_of_name
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.create import read_residents
from moorage.instances.in_place import InPlace
from moorage.scheduling.interface import Residents
from tests import SOAK, servers
from tests.functional.scheduling.plane import Plane
from tests.servers import galera

NODES = 16
THREADS = 12
ROUNDS = 10 if SOAK else 1
FILTERS = ["compute", "capacity", "same_host", "different_host", "type_affinity", "num_instances"]


class _KeyPromiseTests(unittest.TestCase):
    url = ""
    #: The databases that the schedulers use, one for each; empty: they all use ``url``.
    urls: Sequence[str] = ()

    def up(self, schedulers: int, *filters: str, **settings: Any) -> Plane:
        plane = Plane(self, url=self.url, scheduling__enabled_filters=list(filters), **settings)
        plane.enrol({"h1": NODES}, vcpus=64)
        plane.start(Agent(), "h1")
        for number in range(schedulers):
            plane.start_scheduler(f"scheduler-{number + 1}", self.urls[number] if self.urls else "")
        return plane

    def create_all(self, plane: Plane, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Create instances from several threads, through all schedulers in turn; what came of each."""
        names = [name for name in plane.roles if name.startswith("scheduler")]

        def create(request: Mapping[str, Any], scheduler: str) -> Any:
            args = {"request": request, "request_id": request["uuid"]}
            try:
                return plane.ask("create_instance", args, scheduler=scheduler)
            except errors.NoValidHost as error:
                return error

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(create, requests, itertools.cycle(names)))

    def by_node(self, plane: Plane, value: Callable[[Any], str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in plane.instances.list(limit=10_000):
            found.setdefault(each.node, []).append(value(each))
        return found

    def check_flavors(self, schedulers: int) -> None:
        for _ in range(ROUNDS):
            plane = self.up(schedulers, "compute", "capacity", "type_affinity")
            # Each flavor has a node, with room for all of that flavor: everything can be placed.
            answers = [plane.create(1 + number) for number in range(4)]
            plane.wait_agreement()
            answers += self.create_all(plane, [plane.request(1 + number % 4) for number in range(56)])
            flavors = self.by_node(plane, lambda each: each.flavorid)
            mixed = {node: sorted(set(found)) for node, found in flavors.items() if len(set(found)) > 1}
            self.assertEqual({}, mixed)
            self.assertEqual([], [each for each in answers if isinstance(each, errors.NoValidHost)])
            self.assertEqual(60, sum(map(len, flavors.values())))
            self.end(plane)

    def check_pairs(self, schedulers: int) -> None:
        for _ in range(ROUNDS):
            plane = self.up(schedulers, "compute", "capacity", "different_host")
            requests = []
            for _ in range(16):
                first, second = (str(uuid_module.uuid4()) for _ in range(2))
                requests.append({**plane.request(), "uuid": first, "hints": {"different_host": [second]}})
                requests.append({**plane.request(), "uuid": second, "hints": {"different_host": [first]}})
            answers = self.create_all(plane, requests)
            self.assertEqual([], [each for each in answers if isinstance(each, errors.NoValidHost)])
            node = {each.uuid: each.node for each in plane.instances.list(limit=10_000)}
            pairs = zip(requests[::2], requests[1::2], strict=True)
            together = [one["uuid"] for one, other in pairs if node[one["uuid"]] == node[other["uuid"]]]
            self.assertEqual([], together)
            self.end(plane)

    def end(self, plane: Plane) -> None:
        assert isinstance(plane.store, Auditable)
        self.assertEqual([], plane.store.drift())
        for name in list(plane.roles):
            plane.stop(name)
        # A round leaves no connections to the next one.
        self.doCleanups()

    def test_one_flavor_a_node_with_one_scheduler(self) -> None:
        self.check_flavors(1)

    def test_one_flavor_a_node_with_two_schedulers(self) -> None:
        self.check_flavors(2)

    def test_pairs_that_exclude_each_other_are_apart_with_one_scheduler(self) -> None:
        self.check_pairs(1)

    def test_pairs_that_exclude_each_other_are_apart_with_two_schedulers(self) -> None:
        self.check_pairs(2)

    def test_no_node_gets_more_instances_than_the_limit(self) -> None:
        plane = self.up(2, "compute", "capacity", "num_instances", filter_num_instances__max_instances_per_host=3)
        answers = self.create_all(plane, [plane.request() for _ in range(NODES * 3 + 6)])
        counts = {node: len(found) for node, found in self.by_node(plane, lambda each: each.uuid).items()}
        self.assertEqual(dict.fromkeys(counts, 3), counts)
        self.assertEqual(NODES, len(counts))
        self.assertEqual(6, sum(isinstance(each, errors.NoValidHost) for each in answers))
        self.end(plane)

    def test_a_version_names_one_set_of_residents(self) -> None:
        """Instances come, go, move and fail, some of them with all their resources from a pool."""
        plane = self.up(1, "compute", "capacity")
        self.share_pool(plane)
        read = read_residents(plane.database, plane.store, plane.instances)
        nodes = [uuid_of_name(f"h1-node-{number}") for number in range(3)]
        stop = threading.Event()
        seen: dict[Any, set[Any]] = {}

        def watch() -> None:
            while not stop.is_set():
                for node in nodes:
                    self.note(seen, node, read, plane)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda number: self.live(plane, number), range(12)))
        finally:
            stop.set()
            watcher.join()
        self.assertGreater(len(seen), 50)
        self.assertEqual({}, {key: found for key, found in seen.items() if len(found) > 1})
        # All kinds of residents were seen: new ones, and those that move in with another flavor.
        flavors = {flavorid for found in seen.values() for each in found for _, flavorid in each}
        self.assertLessEqual({"f1", "f2", "pool"}, flavors)
        self.end(plane)

    def note(self, seen: dict[Any, set[Any]], node: str, read: Callable[[str], Residents], plane: Plane) -> None:
        found = read(node)
        if plane.store.residents(node) == found.version:
            # Nothing was written in between.
            seen.setdefault((node, found.version), set()).add(
                frozenset((each.uuid, each.flavorid) for each in found.records)
            )

    def share_pool(self, plane: Plane) -> None:
        """A pool of disks that three nodes share."""
        nodes = {uuid_of_name(f"h1-node-{number}") for number in range(3)}
        PoolKeeper(plane.store).set(str(uuid_module.uuid4()), "disks", [InventoryItem("DISK_GB", 10_000)], nodes)
        plane.roles["scheduler-1"]._scheduler.refresh()

    def live(self, plane: Plane, number: int) -> None:
        """The life of one instance: created, resized or moved, shelved and brought back, deleted."""
        of_pool = number % 3 == 0
        request = plane.request(1, force_nodes=[f"h1-node-{number % 3}"])
        if of_pool:
            request["flavor"] = {"flavorid": "pool", "resources": {"DISK_GB": 1}}
        uuid = request["uuid"]
        fails = {"extra_specs": {"sim:resize_fail": "as asked"}} if number % 4 == 1 else {}
        request["flavor"] |= fails
        plane.ask("create_instance", {"request": request, "request_id": uuid})
        plane.wait_status(uuid, "active")
        flavor = {"flavorid": "f2", "resources": {"DISK_GB": 2} if of_pool else {"VCPU": 2, "MEMORY_MB": 128}, **fails}
        moves: list[tuple[str, Mapping[str, Any]]] = [
            ("resize", {"flavor": flavor, "node": f"h1-node-{(number + 1) % 3}"}),
            ("live_migrate", {"node": f"h1-node-{(number + 2) % 3}"}),
            ("resize", {"flavor": {**flavor, "flavorid": "f1"}, "node": f"h1-node-{(number + 2) % 3}"}),
        ]
        for step, (operation, wanted) in enumerate(moves):
            args = {"instance_uuid": uuid, "operation": operation, "wanted": wanted, "request_id": f"{uuid}-{step}"}
            with contextlib.suppress(errors.NoValidHost):
                plane.ask("move_instance", args)
            plane.wait_status(uuid, "active")
        workers = open_workers(plane.client, plane.conf)
        InPlace(plane.database, plane.instances, workers, cast_to_agent(plane.client.sender)).begin(
            uuid, "shelve_offload", {}
        )
        plane.wait_status(uuid, "shelved_offloaded")
        args = {"instance_uuid": uuid, "operation": "unshelve", "wanted": {}, "request_id": f"{uuid}-back"}
        plane.ask("move_instance", args)
        plane.wait_status(uuid, "active")
        plane.deleter().delete(uuid)
        plane.wait_status(uuid, "gone")


class PromiseTests(_KeyPromiseTests):
    """On SQLite."""


class PostgresqlPromiseTests(_KeyPromiseTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbPromiseTests(_KeyPromiseTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


class GaleraPromiseTests(_KeyPromiseTests):
    """Three schedulers, each with a database server of its own, all of which write."""

    @classmethod
    def setUpClass(cls) -> None:
        if not SOAK:
            raise unittest.SkipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())
        nodes = cls.enterClassContext(galera.cluster(3))
        first = sa.make_url(servers.fresh_database(nodes[0]))
        cls.urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
        cls.url = cls.urls[0]

    @override
    def up(self, schedulers: int, *filters: str, **settings: Any) -> Plane:
        # What one server has committed is there when another one is asked.
        return super().up(schedulers, *filters, database__mysql_wsrep_sync_wait=1, **settings)

    def test_one_flavor_a_node_with_three_writers(self) -> None:
        self.check_flavors(3)

    def test_pairs_that_exclude_each_other_are_apart_with_three_writers(self) -> None:
        self.check_pairs(3)


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The key tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (PromiseTests, PostgresqlPromiseTests, MariadbPromiseTests, GaleraPromiseTests):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
