# SPDX-License-Identifier: Apache-2.0
"""A handler of a request that exits is answered like one that raises; the thread and the server go on."""

from __future__ import annotations

import json
import unittest
from types import SimpleNamespace
from typing import Any
from wsgiref import util

from moorage import options
from moorage.api.application import Application
from moorage.api.dialect import Dialect
from moorage.api.dialect_application import DialectApplication
from moorage.api.mounts import Health
from moorage.api.policy import Policy
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.routes import PolicyRule, Route


def leave(*arguments: Any) -> Any:
    raise SystemExit(5)


class ExitTests(unittest.TestCase):
    def ask(self, application: Any, path: str) -> tuple[str, dict[str, Any]]:
        started: list[Any] = []
        environ: dict[str, Any] = {"PATH_INFO": path}
        util.setup_testing_defaults(environ)
        body = b"".join(application(environ, lambda *given: started.append(given)))
        return started[0][0][:3], json.loads(body)

    def test_a_route(self) -> None:
        rule = PolicyRule("all", "@", "Everybody.")
        application = Application(
            [Route("GET", "/x", leave, "all", "It leaves.", {200: None})],
            lambda environ: RequestContext(),
            Policy([rule], None), options.defaults(), count=lambda *_: None, monotonic=SystemClock().monotonic,
        )  # fmt: skip
        with self.assertLogs("moorage.api", "ERROR"):
            status, said = self.ask(application, "/scheduling/v1/x")
        self.assertEqual("500", status, said)
        self.assertIn("request id", str(said))

    def test_an_operation_of_a_dialect(self) -> None:
        tools: Any = SimpleNamespace(conf=options.defaults(), clock=SystemClock(), count=lambda *_: None)
        dialect = Dialect("tour", (1, 0), (1, 0))
        application = DialectApplication(dialect, [Route("GET", "/x", leave, public=True)], tools)
        with self.assertLogs("moorage.api", "ERROR"):
            status, said = self.ask(application, "/x")
        self.assertEqual("500", status, said)

    def test_a_health_check(self) -> None:
        status, said = self.ask(Health({"store": leave}, patience=60), "/healthcheck")
        self.assertEqual(("503", "it failed; the log says why"), (status, said["problems"]["store"]))
