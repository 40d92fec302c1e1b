# SPDX-License-Identifier: Apache-2.0
"""What ``/healthcheck`` says, and that it says it in time."""

from __future__ import annotations

import json
import threading
import unittest
from collections.abc import Callable
from typing import Any

from moorage.http.health import Health
from tests.servers import wait_until


class HealthTests(unittest.TestCase):
    def ask(self, health: Health) -> tuple[str, dict[str, Any]]:
        started: list[Any] = []
        body = b"".join(health({}, lambda *given: started.append(given)))
        return started[0][0][:3], json.loads(body)

    def health(self, patience: float = 60.0, **checks: Callable[[], str]) -> Health:
        return Health(checks, patience=patience)

    def test_all_well(self) -> None:
        found = self.ask(self.health(store=lambda: "", schedulers=lambda: ""))
        self.assertEqual(("200", {"status": "healthy", "problems": {}}), found)

    def test_what_is_wrong_is_named(self) -> None:
        found = self.ask(self.health(store=lambda: "", schedulers=lambda: "none is listening"))
        self.assertEqual(("503", {"status": "unhealthy", "problems": {"schedulers": "none is listening"}}), found)

    def test_an_error_is_not_shown_to_everybody(self) -> None:
        def fail() -> str:
            raise LookupError("postgresql://user:password@host/name")

        status, said = self.ask(self.health(store=fail))
        self.assertEqual("503", status)
        self.assertNotIn("password", str(said))

    def test_what_does_not_answer_is_said_in_time_and_not_asked_twice(self) -> None:
        go_on = threading.Event()
        asked = []

        def hang() -> str:
            asked.append(1)
            go_on.wait(60)
            return ""

        health = self.health(0.2, store=hang)
        for _ in range(3):
            status, said = self.ask(health)
            self.assertEqual(("503", "no answer within 0.2 seconds"), (status, said["problems"]["store"]))
        self.assertEqual(1, len(asked))
        go_on.set()
        self.assertTrue(health._asked["store"].ended.wait(60))
        # Each look may come before the answer to its own question.
        wait_until(lambda: self.ask(health)[0] == "200", "an answer")
