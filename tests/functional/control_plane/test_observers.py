# SPDX-License-Identifier: Apache-2.0
"""A whole control plane tells its observers what happens, and takes no harm from one that raises and one that hangs."""

from __future__ import annotations

import uuid

from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from moorage import errors
from tests import servers
from tests.functional.control_plane.test_slice import SliceCase, flavor

OBSERVERS = """
import time
from moorage.observers.interface import Observer

class Raises(Observer):
    '''Of no use.'''
    api_version = (1, 0)
    def observe(self, notice):
        raise LookupError("a mistake of the author")

class Hangs(Observer):
    '''Of no use either.'''
    api_version = (1, 0)
    def observe(self, notice):
        time.sleep(3600)
"""


class TestObservers(SliceCase):
    extra = """
[observers]
enabled = raises,hangs,metrics,log
max_errors = 3
deadline = 0.5
[observer_metrics]
interval = 0.1
"""

    @override
    @classmethod
    def prepare(cls) -> None:
        cls.path = cls.folder / "site"
        info = cls.path / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (cls.path / "acme_observers.py").write_text(OBSERVERS)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        points = "raises = acme_observers:Raises\nhangs = acme_observers:Hangs\n"
        (info / "entry_points.txt").write_text(f"[moorage.observers]\n{points}")

    def counted(self) -> dict[tuple[str, str], float]:
        """(role, kind of event) -> how often, over all processes."""
        found: dict[tuple[str, str], float] = {}
        for file in (self.plane.state / "metrics").glob("*.prom"):
            for family in text_string_to_metric_families(file.read_text()):
                for sample in family.samples:
                    if sample.name == "moorage_events_total":
                        key = (sample.labels["binary"], sample.labels["kind"])
                        found[key] = found.get(key, 0) + sample.value
        return found

    def test_events_of_every_role_are_told_and_bad_observers_are_named_and_switched_off(self) -> None:
        for _ in range(5):
            self.delete(self.create(flavor())["uuid"])
        for _ in range(5):
            with self.assertRaises(errors.NoValidHost):
                self.api.create_instance({"uuid": str(uuid.uuid4()), **flavor(VCPU=100)})
        failed = flavor()
        failed["flavor"]["extra_specs"] = {"sim:fail": "no more disk"}
        self.assertEqual("error", self.create(failed)["status"])
        self.api.assign_shards([{"node": "node-1", "shard": "east"}])
        wanted = {
            ("scheduler", "request.decided"): 6,
            ("scheduler", "claim.won"): 6,
            ("scheduler", "request.refused"): 5,
            ("agent", "instance.created"): 5,
            ("agent", "instance.deleted"): 5,
            ("agent", "instance.failed"): 1,
            ("api", "shard.reassigned"): 1,
        }

        def told() -> bool:
            counted = self.counted()
            ups = {binary for binary, kind in counted if kind == "service.up"}
            return wanted.items() <= counted.items() and ups == {"api", "scheduler", "agent", "engine"}

        servers.wait_until(told, "the events of all roles", 90)
        servers.wait_until(
            lambda: "engine" in {role for role, kind in self.counted() if kind == "ring.changed"}, "it", 90
        )
        said = "".join(log.read_text() for log in (self.plane.state / "log").glob("*.log"))
        for part in (
            "The observer 'raises' (moorage.observers, of acme 1.0) raised LookupError in observe: a mistake of the author",
            "The observer 'raises' (moorage.observers, of acme 1.0) raised 3 times in a row, and is told nothing more.",
            "The observer 'hangs' (moorage.observers, of acme 1.0) has not returned for more than 0.5 seconds",
            "request.refused {",
        ):
            self.assertIn(part, said)
        # Two schedulers, an agent, an API server and an engine: each tried it three times at most.
        self.assertLessEqual(said.count("raised LookupError in observe"), 3 * len(self.plane.processes()))
