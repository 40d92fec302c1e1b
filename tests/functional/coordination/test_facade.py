# SPDX-License-Identifier: Apache-2.0
"""The specification's two classes over real servers: what Sahara's own code did not do on ZooKeeper, the subsets are whole."""

from __future__ import annotations

import tempfile
import unittest
from dataclasses import dataclass

from moorage import errors
from moorage.coordination.facade import Coordinator, HashRing
from moorage.testing.coordination import wait_for
from tests import servers

KEYS = [f"object-{number}" for number in range(1000)]


@dataclass(frozen=True)
class Thing:
    id: int


class FacadeTests(unittest.TestCase):
    def rings(self, url: str) -> list[HashRing]:
        made = [HashRing(url, "things", session_timeout=6.0, heartbeat_timeout=0.5) for _ in range(3)]
        for ring in made:
            self.addCleanup(ring.stop)
        return made

    def assert_whole(self, url: str) -> None:
        rings = self.rings(url)
        wait_for(lambda: all(len(ring.get_members("things")) == 3 for ring in rings), "three members")

        def parts() -> list[list[str]]:
            return [ring.get_subset(KEYS) for ring in rings]

        wait_for(lambda: sorted(key for part in parts() for key in part) == sorted(KEYS), "the union to be whole")
        self.assertTrue(all(parts()))
        rings[0].stop()
        self.assertEqual(rings[0].get_subset(KEYS), [])
        wait_for(lambda: len(rings[1].get_subset(KEYS)) + len(rings[2].get_subset(KEYS)) == 1000, "two that share")

    def test_on_zookeeper_the_union_of_subsets_is_exact(self) -> None:
        self.assert_whole(servers.shared("zookeeper").url)

    def test_on_etcd_the_union_of_subsets_is_exact(self) -> None:
        self.assert_whole(servers.shared("etcd").url)

    def test_on_redis_the_union_of_subsets_is_exact(self) -> None:
        self.assert_whole(servers.shared("redis").url)

    def test_in_files_the_union_of_subsets_is_exact(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.assert_whole(f"file://{folder.name}")

    def test_the_child_that_an_election_leaves_on_zookeeper_owns_nothing(self) -> None:
        url = servers.shared("zookeeper").url
        ring = HashRing(url, "elected", session_timeout=6.0)
        self.addCleanup(ring.stop)
        membership = ring._groups["elected"]
        kazoo = membership._client._client._coord  # type: ignore[union-attr]
        kazoo.create("/tooz/elected/leader")
        self.assertEqual(len(ring.get_members("elected")), 1)
        self.assertEqual(ring.get_subset(KEYS), KEYS)

    def test_without_a_url_everything_is_ours(self) -> None:
        ring = HashRing("", "things")
        self.assertEqual(ring.get_subset(KEYS), KEYS)
        self.assertFalse(ring.is_started())
        self.assertTrue(ring.holds("things"))
        ring.stop()

    def test_objects_have_ids(self) -> None:
        ring = HashRing("memory://facade", "things")
        self.addCleanup(ring.stop)
        things = [Thing(number) for number in range(5)]
        self.assertEqual(ring.get_subset(things), things)
        self.assertEqual(ring.get_subset(things, key=lambda each: f"thing-{each.id}"), things)

    def test_a_coordinator_joins_once_and_beats_on_demand(self) -> None:
        one = Coordinator("memory://facade")
        self.addCleanup(one.stop)
        for _ in range(2):
            one.join_group("a")
        one.heartbeat()
        self.assertEqual(one.get_members("a"), [one.member_id("a")])
        self.assertEqual(one.get_members("never-joined"), [])
        self.assertFalse(one.holds("never-joined"))

    def test_what_can_never_work_is_refused(self) -> None:
        for url in ("mysql://root@127.0.0.1/x", "nonsense://x", "database", "zookeeper://"):
            with self.subTest(url=url), self.assertRaises(errors.ConfigError):
                Coordinator(url)
        with self.assertRaises(errors.ConfigError):
            Coordinator("memory://x", heartbeat_timeout=5, session_timeout=10)

    def test_a_server_that_is_away_is_told_of(self) -> None:
        one = Coordinator(f"etcd3+http://127.0.0.1:{servers.free_port()}")
        self.addCleanup(one.stop)
        with self.assertRaises(errors.Unavailable):
            one.join_group("a")
