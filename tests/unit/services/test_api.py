# SPDX-License-Identifier: Apache-2.0
"""Services in ``/scheduling/v1``."""

from __future__ import annotations

import unittest

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.http.routes import Request, Route
from moorage.services import api
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.testing.database import temporary


class ServicesApiTests(unittest.TestCase):
    def setUp(self) -> None:
        context = temporary(tables=True)
        database = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.registry = ServiceRegistry(database, SystemClock())
        self.told: list[bool] = []
        self.routes = api.routes(self.registry, LivenessObserver(SystemClock(), 60), self.tell)
        self.agent = self.registry.enlist("agent", "agent-1", rpc_version="1.0")

    def tell(self) -> None:
        # What is told must already be readable.
        self.told.append(bool(self.registry.get(self.agent.uuid).disabled))

    def change(self, uuid: str, **changes: object) -> object:
        route: Route = next(each for each in self.routes if each.method == "PATCH")
        return route.handler(
            Request(context=RequestContext(overwrite=False), path_params={"uuid": uuid}, body=changes)
        ).body

    def test_a_change_is_told_once_it_is_stored(self) -> None:
        answer = self.change(self.agent.uuid, disabled=True, disabled_reason="repair")
        self.assertIsInstance(answer, dict)
        self.assertEqual([True], self.told)
        self.change(self.agent.uuid, disabled=False)
        self.assertEqual([True, False], self.told)

    def test_a_change_of_nothing_is_not_told(self) -> None:
        self.assertRaises(errors.NotFound, self.change, "nowhere", disabled=True)
        self.assertEqual([], self.told)
