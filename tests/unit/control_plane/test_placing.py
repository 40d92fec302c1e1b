# SPDX-License-Identifier: Apache-2.0
"""What is said of agents that cannot be told of their operations."""

from __future__ import annotations

import unittest
from typing import Any, cast

from moorage import errors
from moorage.instances.create import cast_to_agent
from moorage.rpc.client import RpcSender


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
            with self.assertLogs("moorage.instances.create", "DEBUG") as logs:
                for host in hosts:
                    tell(host, "build_instance", f"for {host}")
            return sum("WARNING" in line for line in logs.output)

        self.assertEqual(2, warnings("a", "a", "b", "a", "b"))
        sender.away = False
        self.assertEqual(0, warnings("a"))
        self.assertEqual(["for a"], sender.told)
        sender.away = True
        self.assertEqual(1, warnings("a", "a", "b"))
