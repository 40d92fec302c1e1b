# SPDX-License-Identifier: Apache-2.0
"""New volumes go to agents that offer block storage."""

from __future__ import annotations

import unittest
from typing import Any

import requests

from tests.api.live import LiveDialect
from tests.api.test_strictness import everybody_is_admin


class Sender:
    """Keeps what agents are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def cast(self, topic: str, method: str, args: Any, server: str) -> None:
        self.told.append(server)


class TestAgents(unittest.TestCase):
    def setUp(self) -> None:
        sender = Sender()
        self.told = sender.told
        self.live = LiveDialect("volume", "/volume", authenticate=everybody_is_admin, sender=lambda: sender)
        self.addCleanup(self.live.close)

    def enlist(self, name: str, *offers: str, cluster: str | None = None) -> str:
        identity = self.live.registry.enlist("agent", name, cluster=cluster, rpc_version="1.0", offers=offers)
        return identity.uuid

    def create(self) -> requests.Response:
        return requests.post(f"{self.live.url}/v3/volumes", json={"volume": {"size": 1}}, timeout=30)

    def places(self) -> set[str]:
        found = [self.create().json()["volume"]["os-vol-host-attr:host"] for _ in range(20)]
        self.assertEqual(len(found), 20)
        return set(found)

    def test_only_agents_with_block_storage_get_volumes(self) -> None:
        for number in range(3):
            self.enlist(f"compute-{number}", "compute")
        self.enlist("storage", "compute", "block_storage")
        self.assertEqual((self.places(), set(self.told)), ({"storage"}, {"storage"}))

    def test_a_cluster_is_told_of_its_volumes_through_a_member_that_offers_block_storage(self) -> None:
        self.enlist("member-1", "compute", cluster="one")
        self.enlist("member-2", "block_storage", cluster="one")
        self.assertEqual((self.places(), set(self.told)), ({"one"}, {"member-2"}))

    def test_an_agent_that_starts_again_offers_what_it_runs_now(self) -> None:
        self.enlist("a", "compute")
        self.enlist("a", "block_storage")
        self.enlist("b", "block_storage")
        self.enlist("b", "compute")
        self.assertEqual(self.places(), {"a"})

    def test_without_such_an_agent_no_volume_is_made(self) -> None:
        self.enlist("compute", "compute")
        # Its name is longer than the one that is looked for.
        self.enlist("nearly", "block_storage_v2")
        disabled = self.enlist("disabled", "block_storage")
        self.live.registry.set(disabled, disabled=True)
        found = self.create()
        self.assertEqual((found.status_code, "block_storage" in found.text), (503, True), found.text)
        self.assertEqual(requests.get(f"{self.live.url}/v3/volumes", timeout=30).json(), {"volumes": []})

    def test_an_agent_of_an_earlier_version_may_offer_anything(self) -> None:
        self.live.registry.enlist("agent", "old", rpc_version="1.0")
        self.assertEqual(self.places(), {"old"})
