# SPDX-License-Identifier: Apache-2.0
"""What is said of agents that cannot be told of their operations."""

from __future__ import annotations

import unittest
from typing import Any, cast

from moorage import errors
from moorage.clock import SystemClock
from moorage.instances.agent_messages import AgentMessages, cast_to_agent
from moorage.read_only import EMPTY
from moorage.rpc.client import RpcSender
from moorage.services.interface import TAKES_TOLD_DELETION_SETS, TAKES_TOLD_DELETIONS


class Away:
    """Stands for a sender whose listener is away while a test says so."""

    def __init__(self) -> None:
        self.away = True
        self.told: list[str] = []

    def cast(self, topic: str, method: str, args: dict[str, Any], *, server: str) -> None:
        if self.away:
            raise errors.NoListener("Nobody is there.")
        self.told.append(args["instance_uuid"])


class CastTests(unittest.TestCase):
    def test_an_agent_that_is_away_is_warned_of_once_until_it_is_back(self) -> None:
        sender = Away()
        tell = cast_to_agent(cast(RpcSender, sender))

        def warnings(*hosts: str) -> int:
            with self.assertLogs("moorage.instances.agent_messages", "DEBUG") as logs:
                for host in hosts:
                    tell(host, "build_instance", f"for {host}")
            return sum("WARNING" in line for line in logs.output)

        self.assertEqual(2, warnings("a", "a", "b", "a", "b"))
        sender.away = False
        self.assertEqual(0, warnings("a"))
        self.assertEqual(["for a"], sender.told)
        sender.away = True
        self.assertEqual(1, warnings("a", "a", "b"))


class DeletionMessageTests(unittest.TestCase):
    def test_an_agent_is_told_as_it_understands(self) -> None:
        told: list[tuple[str, str, dict[str, Any]]] = []
        lacking = {TAKES_TOLD_DELETIONS: {"oldest"}, TAKES_TOLD_DELETION_SETS: {"oldest", "old"}}
        messages = AgentMessages(
            lambda host, method, uuid, more=EMPTY: told.append((host, uuid, dict(more))),
            lambda powers: lacking[powers[0]],  # type: ignore[index]
            SystemClock(),
        )
        both = [("a", 1), ("b", 2)]
        messages.delete({"oldest": both, "old": both, "new": both, "one": [("c", 3)]})
        self.assertEqual(
            [
                ("oldest", "a", {}), ("oldest", "b", {}), ("old", "a", {"token": 1}), ("old", "b", {"token": 2}),
                ("new", "a", {"token": 1, "others": [{"instance_uuid": "b", "token": 2}]}), ("one", "c", {"token": 3}),
            ],
            told,
        )  # fmt: skip
