# SPDX-License-Identifier: Apache-2.0
"""A handler of a request that exits is answered like one that raises; the thread and the server go on."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

from moorage import options
from moorage.clock import SystemClock
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.health import Health
from moorage.http.routes import Route
from moorage.testing.http import send


def leave(*arguments: Any) -> Any:
    raise SystemExit(5)


class ExitTests(unittest.TestCase):
    def test_a_route(self) -> None:
        tools: Any = SimpleNamespace(
            conf=options.defaults(), clock=SystemClock(), count=lambda *_: None, check_policy=lambda *_: None
        )
        dialect = Dialect("tour", (1, 0), (1, 0))
        application = Application(dialect, [Route("GET", "/x", leave, public=True)], tools)
        with self.assertLogs("moorage.http", "ERROR"):
            answer = send(application, "GET", "/x")
        self.assertEqual(500, answer.status, answer.body)
        self.assertIn("request id", str(answer.json))

    def test_a_health_check(self) -> None:
        answer = send(Health({"store": leave}, patience=60), "GET", "/healthcheck")
        self.assertEqual((503, "it failed; the log says why"), (answer.status, answer.json["problems"]["store"]))
