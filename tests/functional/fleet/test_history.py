# SPDX-License-Identifier: Apache-2.0
"""Years of changes of a fleet, replayed: nodes come, change and vanish, and instances run on the nodes that vanish.

A history is a file of JSON lines, one for each state: ``set`` has nodes (``name.site``) with processors, MiB of memory, GPUs and
GiB of disk; ``gone`` has the names of nodes that vanished. ``MOORAGE_FLEET_HISTORY`` names a file, which may be compressed by gzip.
Without one, a short history is made from the seed of the run. ``make soak`` replays the history of a research fleet over 17 years
if it lies beside the project.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import sys
import time
import unittest
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import tests
from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import open_departures
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.on_node import NodeContents
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

_FILE = Path(__file__).resolve().parents[4] / "shared" / "data" / "fleet_history.jsonl.gz"
#: Processors, MiB of memory, GPUs, GiB of disk.
_Size = Sequence[int]
#: Instances that live at any time, those that are created on nodes that vanish next, and processors of each.
_LIVING, _DOOMED, _VCPUS = 30, 5, 1
_PAGE = 1000


def recorded(path: Path) -> Iterator[Mapping[str, Any]]:
    """The states of a file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def made(draw: random.Random, states: int = 6) -> Iterator[Mapping[str, Any]]:
    """The states of a small fleet, of which a third vanishes each time; some nodes come back."""
    fleet: set[str] = set()
    for _ in range(states):
        gone = draw.sample(sorted(fleet), len(fleet) // 3)
        fleet.difference_update(gone)
        names = {f"node-{draw.randrange(30)}.site-{draw.randrange(3)}" for _ in range(12)}
        fleet |= names
        yield {
            "set": {each: [draw.choice((8, 16, 64)), 2048, 0, 74] for each in sorted(names)},
            "gone": [each for each in gone if each not in names],
        }


class HistoryTests(unittest.TestCase):
    """A control plane with an agent for each site."""

    def test_no_change_of_the_fleet_loses_an_instance_or_leaves_a_provider(self) -> None:
        draw = tests.seeded()
        path = Path(os.environ.get("MOORAGE_FLEET_HISTORY") or _FILE)
        whole = "MOORAGE_FLEET_HISTORY" in os.environ or (tests.SOAK and path.exists())
        history = list(recorded(path) if whole else made(draw))
        self.fleet: dict[str, _Size] = {}
        self.plane = Plane(self)
        self.nodes = NodeStore(self.plane.database)
        departures = open_departures(self.plane.client, self.plane.conf, self.plane.store)
        self.enrolment = Enrolment(
            self.plane.database, self.nodes, self.plane.store, self.plane.registry, lambda: None,
            contents=NodeContents(self.plane.database, self.plane.instances, self.plane.store, departures),
        )  # fmt: skip
        for site in sorted({_site(name) for state in history for name in state["set"]}):
            self.plane.start(Agent(), site)
        self.plane.start(SchedulerRole(), "scheduler-1")
        self.moved = self.removed = 0
        began = time.monotonic()
        for number, (state, following) in enumerate(itertools.pairwise([*history, {"gone": []}])):
            with self.subTest(state=state.get("date", number)):
                self.enrol(state["set"])
                self.vanish(state["gone"])
                self.fill(draw, following["gone"])
                self.check()
        self.assertGreater(self.moved, 0)
        sys.stdout.write(
            f"{len(history)} states, {self.removed} nodes removed, {self.moved} moves, {time.monotonic() - began:.0f} s\n"
        )

    def enrol(self, nodes: Mapping[str, _Size]) -> None:
        """These nodes came, or have another size."""
        names = sorted(nodes)
        for first in range(0, len(names), _PAGE):
            self.enrolment.enrol([_spec(name, nodes[name]) for name in names[first : first + _PAGE]])
        self.fleet.update(nodes)

    def vanish(self, names: Sequence[str]) -> None:
        """These nodes go: their instances move first, and nothing removes a node that has one."""
        for name in names:
            self.enrolment.change_properties(uuid_of_name(name), {}, {"draining": True})
        on_them = self.instances_by_node()
        for name in names:
            for instance in on_them.get(name, ()):
                with self.assertRaises(errors.InUse):
                    self.enrolment.remove(uuid_of_name(name))
                self.move(instance)
        for name in names:
            # The source gives the room back when its agent has removed what was left there.
            wait_until(lambda name=name: self.remove(name), f"the removal of {name}", SOON)  # type: ignore[misc]
            del self.fleet[name]

    def remove(self, name: str) -> bool:
        try:
            self.enrolment.remove(uuid_of_name(name))
        except errors.InUse:
            return False
        self.removed += 1
        return True

    def move(self, instance: str) -> None:
        args = {"instance_uuid": instance, "operation": "live_migrate", "wanted": {}, "request_id": str(uuid.uuid4())}

        def begun() -> bool:
            try:
                self.plane.ask("move_instance", args)
            except errors.Conflict as error:
                if isinstance(error, errors.NoValidHost):
                    raise
                # The source of its last move has not let go yet.
                return False
            return True

        wait_until(begun, f"the move of {instance}", SOON)
        self.plane.wait_status(instance, "active")
        self.moved += 1

    def fill(self, draw: random.Random, doomed: Sequence[str]) -> None:
        """Delete some instances and create others, also on nodes that vanish next."""
        living = sorted(self.plane.records())
        deleter = self.plane.deleter()
        for instance in draw.sample(living, len(living) // 5):
            deleter.delete(instance)
        for _ in range(_LIVING - len(living)):
            self.plane.create(_VCPUS)
        self.wait_view()
        for name in draw.sample(sorted(doomed), min(len(doomed), _DOOMED)):
            self.plane.create(_VCPUS, force_nodes=[name])
        self.plane.wait_quiet()

    def instances_by_node(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for instance, record in sorted(self.plane.records().items()):
            found.setdefault(record.node, []).append(instance)
        return found

    def check(self) -> None:
        """Nodes, providers, instances, claims and the view of the scheduler agree."""
        with self.plane.database.read() as tx:

            def column(statement: str) -> list[Any]:
                return sorted(tx.execute(sa.text(statement)).scalars())

            uuids = sorted(map(uuid_of_name, self.fleet))
            self.assertEqual(sorted(self.fleet), column("SELECT name FROM nodes"))
            self.assertEqual(uuids, column("SELECT uuid FROM nodes"))
            self.assertEqual(uuids, column("SELECT uuid FROM resource_providers"))
            instances = column("SELECT uuid FROM instances")
            self.assertEqual(set(), set(column("SELECT node_uuid FROM instances")) - set(uuids))
            self.assertEqual(["active"] * len(instances), column("SELECT status FROM instances"))
            self.assertEqual(instances, column("SELECT uuid FROM consumers"))
            holds = (
                "SELECT a.consumer_id FROM allocations a JOIN resource_providers p ON p.id = a.resource_provider_id"
                " JOIN instances i ON i.uuid = a.consumer_id AND i.node_uuid = p.uuid"
            )
            self.assertEqual(sorted(instances * 2), column(holds))
            self.assertEqual(len(instances) * 2, column("SELECT count(*) FROM allocations")[0])
            self.assertEqual([], column("SELECT resource_id FROM workers"))
        self.wait_view()
        self.plane.wait_agreement()

    def wait_view(self) -> None:
        scheduler, uuids = self.plane.roles["scheduler-1"]._scheduler, sorted(map(uuid_of_name, self.fleet))

        def agree() -> bool:
            return [node.uuid for node in scheduler.view.snapshot().nodes] == uuids

        wait_until(agree, "the view of the scheduler", SOON)


def _site(name: str) -> str:
    return name.rpartition(".")[2]


def _spec(name: str, size: _Size) -> NodeSpec:
    cores, memory, _, disk = size
    inventories = (InventoryItem("VCPU", cores), InventoryItem("MEMORY_MB", memory), InventoryItem("DISK_GB", disk))
    return NodeSpec(
        uuid_of_name(name), name, _site(name), inventories=tuple(each for each in inventories if each.total)
    )
