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
from tests.servers import wait_until


class ServicesApiTests(unittest.TestCase):
    def setUp(self) -> None:
        context = temporary(tables=True)
        database = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.registry = ServiceRegistry(database, SystemClock())
        self.told: list[bool] = []
        self.routes = api.routes(self.registry, LivenessObserver(SystemClock(), 60), self.tell, self.turn_off)
        self.agent = self.registry.enlist("agent", "agent-1", rpc_version="1.0")

    def turn_off(self, host: str) -> str:
        raise errors.Conflict(f"Host {host} is not fenced: its BMC does not answer.")

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

    def test_a_host_that_fences_itself_is_fenced_without_a_reason(self) -> None:
        route: Route = next(each for each in self.routes if each.path.endswith("/fence"))
        request = Request(
            context=RequestContext(overwrite=False), path_params={"uuid": self.agent.uuid}, body={"by_itself": True}
        )
        with self.assertRaisesRegex(errors.Conflict, "does not fence itself"):
            route.handler(request)
        self.registry.beat_promising(self.agent, 1e-6)
        wait_until(lambda: self.registry.get(self.agent.uuid).self_fenced, "the end of the lease", 60)
        answer = route.handler(request).body
        assert isinstance(answer, dict)
        self.assertEqual((True, 1e-6, True), tuple(answer[n] for n in ("fenced", "self_fence_s", "self_fenced")))

    def fence(self, **body: object) -> object:
        route: Route = next(each for each in self.routes if each.path.endswith("/fence"))
        request = Request(context=RequestContext(overwrite=False), path_params={"uuid": self.agent.uuid}, body=body)
        return route.handler(request).body

    def test_a_host_that_cannot_be_turned_off_is_not_fenced(self) -> None:
        with self.assertRaisesRegex(errors.Conflict, "its agent is not declared dead"):
            self.fence(reason="smoke", power_off=True)
        self.registry.retire(self.agent)
        self.registry.set(self.agent.uuid, forced_down=True)
        with self.assertRaisesRegex(errors.Conflict, "its BMC does not answer"):
            self.fence(reason="smoke", power_off=True)
        self.assertFalse(self.registry.get(self.agent.uuid).fenced)
        with self.assertRaisesRegex(errors.InvalidInput, "send one of them"):
            self.fence(reason="smoke", by_itself=True)
        self.fence(reason="smoke")
        self.assertTrue(self.registry.get(self.agent.uuid).fenced)

    def test_a_change_of_nothing_is_not_told(self) -> None:
        self.assertRaises(errors.NotFound, self.change, "nowhere", disabled=True)
        self.assertEqual([], self.told)
