# SPDX-License-Identifier: Apache-2.0
"""Listings and counts while shards change: S1 and S5 of the catalogue of faults, on each database."""

from __future__ import annotations

import functools
import random
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Sequence

from moorage.fleet.importer import from_json
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.sharding.plans import PlanRequest
from tests import cases, seeded, servers
from tests.api.baremetal.ironic import ADMIN, IronicCase
from tests.functional.sharding.case import make_plans

SHARDS = ("a", "b", "c")
SIZE = 60


class RaceCase(IronicCase):
    kind = "sqlite"

    @classmethod
    def make_url(cls) -> str | None:
        if cls.kind == "sqlite":
            return None
        servers.require(cls.kind)
        return servers.fresh_database(servers.shared(cls.kind))

    def setUp(self) -> None:
        super().setUp()
        nodes = [{"name": f"n{number:03}", "shard": (*SHARDS, None)[number % 4]} for number in range(SIZE)]
        self.fleet.enrol([from_json(node) for node in nodes])
        self.everybody = {f"n{number:03}" for number in range(SIZE)}

    def check(self) -> None:
        """Every node is in exactly one listing, and the counts are those of the listings."""
        listed: Counter[str] = Counter()
        for each in self.get("/v1/shards")["shards"]:
            names = [node["name"] for node in self.pages(f"/v1/nodes?shard={each['name'] or 'none'}&limit=7", "nodes")]
            self.assertEqual(each["count"], len(names))
            listed.update(names)
        self.assertEqual(dict.fromkeys(self.everybody, 1), dict(listed))

    def test_storms_of_edits_and_plans_leave_every_node_in_one_shard(self) -> None:
        storm = Storm(self)
        threads = [threading.Thread(target=storm.run, args=work) for work in storm.works]
        for thread in threads:
            thread.start()
        try:
            servers.wait_until(lambda: storm.answers.total() > cases(120) or storm.failures, "edits", 120)
        finally:
            storm.stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual([], storm.failures)
        # Edits of one node by two are repeated, not lost: nobody is told of a conflict, or of an error.
        self.assertEqual({200}, set(storm.answers))
        self.check()

    def test_pages_have_every_unmoved_node_once_while_others_move(self) -> None:
        chance = seeded()
        nodes = NodeStore(self.live.database)
        for _ in range(cases(6)):
            still = {f"n{number:03}" for number in chance.sample(range(SIZE), SIZE // 2)}
            moving = sorted(self.everybody - still)
            wanted = chance.sample(SHARDS, 2)
            key = chance.choice(("id", "name", "uuid", "created_at"))
            inside = {node["name"] for node in self.pages(f"/v1/nodes?shard={','.join(wanted)}", "nodes")}
            seen: list[str] = []
            following: str | None = f"/v1/nodes?shard={','.join(wanted)}&limit=4&sort_key={key}"
            while following:
                page = self.get(following)
                seen += [node["name"] for node in page["nodes"]]
                following = page.get("next")
                for name in chance.sample(moving, 5):
                    uuid = uuid_of_name(name)
                    generation = nodes.get(uuid).generation
                    shard = chance.choice((*SHARDS, None))
                    self.assertTrue(self.fleet.change(uuid, generation, {"shard": shard}))
            counted = Counter(seen)
            self.assertEqual(dict.fromkeys(still & inside, 1), {n: c for n, c in counted.items() if n in still})
            self.assertEqual(1, max(counted.values()), "a node was listed twice")
        self.check()

    def test_a_plan_and_an_edit_of_the_same_node_do_not_overwrite_each_other(self) -> None:
        plans = make_plans(self.live.database)
        plan = plans.make(PlanRequest(shards=("z",))).uuid
        first = plans.moves(plan)[0].name
        answer = self.ask(
            "PATCH", f"/v1/nodes/{first}", [{"op": "replace", "path": "/shard", "value": "mine"}], who=ADMIN
        )
        self.assertEqual(200, answer.status)
        progress = plans.apply(plan, 1000)
        self.assertEqual((SIZE - 1, 1), (progress.done, progress.conflicts))
        self.assertEqual("mine", self.get(f"/v1/nodes/{first}")["shard"])
        self.check()


class Storm:
    """Edits by two, plans by one, and one who counts, all at once."""

    def __init__(self, case: IronicCase) -> None:
        self.stop = threading.Event()
        self.failures: list[str] = []
        self.answers: Counter[int] = Counter()
        self.works: Sequence[tuple[Callable[[], None]]] = [
            (functools.partial(self.edit, random.Random(1)),),
            (functools.partial(self.edit, random.Random(2)),),
            (self.plan,),
            (self.count,),
        ]
        self._case = case
        self._plans = make_plans(case.live.database, batch=7)

    def run(self, work: Callable[[], None]) -> None:
        try:
            while not self.stop.is_set():
                work()
        except Exception as error:
            self.failures.append(repr(error))

    def edit(self, chance: random.Random) -> None:
        name = f"n{chance.randrange(SIZE):03}"
        operation = chance.choice(
            (
                {"op": "replace", "path": "/shard", "value": chance.choice(SHARDS)},
                {"op": "remove", "path": "/shard"},
                {"op": "add", "path": "/extra/note", "value": chance.random()},
            )
        )
        self.answers[self._case.ask("PATCH", f"/v1/nodes/{name}", [operation]).status] += 1

    def plan(self) -> None:
        self._plans.apply(self._plans.make(PlanRequest(shards=SHARDS)).uuid, 10_000)

    def count(self) -> None:
        counted = sum(each["count"] for each in self._case.get("/v1/shards")["shards"])
        if counted != SIZE:
            self.failures.append(f"the counts add up to {counted}")


class TestSqlite(RaceCase, unittest.TestCase):
    pass


class TestPostgresql(RaceCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(RaceCase, unittest.TestCase):
    kind = "mariadb"


del RaceCase
