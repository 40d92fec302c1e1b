# SPDX-License-Identifier: Apache-2.0
"""Limits of a project on the whole way of requests: create, resize, shelve and delete."""

from __future__ import annotations

import unittest
from typing import Any

import requests

from moorage.allocation.audit import audit
from moorage.control_plane.api_role import ApiRole
from tests import servers
from tests.conformance.allocation.stores import sql_store
from tests.functional.scheduling.plane import SOON
from tests.functional.scheduling.statements import CountedPlane
from tests.functional.scheduling.test_whole_path import QUIET

SMALL = {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 64}}
LARGE = {"flavorid": "large", "resources": {"VCPU": 3, "MEMORY_MB": 64}}


class QuotaPathTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = CountedPlane(self, api__bind="127.0.0.1:0", api__auth_strategy="noauth", **QUIET)
        self.plane.up(("h1", "h2"))
        self.url = self.plane.start(ApiRole(), "api-live").url
        self.session = requests.Session()
        self.addCleanup(self.session.close)

    def ask(self, method: str, path: str, body: Any = None, *, who: str = "u:p", status: int | None = None) -> Any:
        url, headers = f"{self.url}/scheduling/v1{path}", {"X-Auth-Token": who}
        answer = self.session.request(method, url, json=body, headers=headers, timeout=SOON)
        if status is None:
            self.assertLess(answer.status_code, 300, answer.text)
        else:
            self.assertEqual(status, answer.status_code, answer.text)
        return answer.json() if answer.text else None

    def create(self) -> str:
        uuid = str(self.ask("POST", "/instances", {"flavor": SMALL})["uuid"])
        self.plane.wait_status(uuid, "active")
        return uuid

    def act(self, uuid: str, body: Any, becomes: str, status: int | None = None) -> Any:
        found = self.ask("POST", f"/instances/{uuid}/action", body, status=status)
        self.plane.wait_status(uuid, becomes)
        return found

    def used(self) -> int:
        (quota,) = self.ask("GET", "/quotas")["quotas"]
        self.assertEqual(("p", "VCPU"), (quota["project"], quota["resource_class"]))
        return int(quota["used"])

    def wait_used(self, used: int) -> None:
        servers.wait_until(lambda: self.used() == used, f"{used} VCPU are used", SOON)

    def test_instances_in_error_count_while_they_hold_resources(self) -> None:
        self.ask("PUT", "/quotas/p/VCPU", {"limit": 3}, who="admin")
        failing = {**SMALL, "extra_specs": {"sim:fail": "no disk"}}
        failed = str(self.ask("POST", "/instances", {"flavor": failing})["uuid"])
        self.plane.wait_status(failed, "error")
        self.wait_used(0)
        reset = self.create()
        self.ask("POST", f"/instances/{reset}/reset-state", {"status": "error"}, who="admin")
        # It may run, and may become active again without a claim.
        self.assertEqual(1, self.used())
        self.ask("POST", f"/instances/{reset}/reset-state", {"status": "active"}, who="admin")
        self.assertEqual(1, self.used())
        self.ask("POST", f"/instances/{reset}/reset-state", {"status": "error"}, who="admin")
        for uuid in (failed, reset):
            self.ask("DELETE", f"/instances/{uuid}")
        self.wait_used(0)

    def test_a_limit_holds_on_the_whole_way(self) -> None:
        self.ask("PUT", "/quotas/p/VCPU", {"limit": 1}, status=403)
        self.ask("PUT", "/quotas/p/VCPU", {"limit": 3}, who="admin")
        first, second = self.create(), self.create()
        self.assertEqual(2, self.used())
        refused = self.act(first, {"resize": {"flavor": {**LARGE, "resources": {"VCPU": 5}}}}, "active", status=403)
        error = refused["error"]
        self.assertEqual("moorage.quota_exceeded", error["code"])
        details = {"project": "p", "resource_class": "VCPU", "limit": 3, "used": 2, "asked": 4, "over": 3}
        self.assertLessEqual(details.items(), error["details"].items())
        third = self.create()
        error = self.ask("POST", "/instances", {"flavor": SMALL}, status=403)["error"]
        self.assertEqual("moorage.quota_exceeded", error["code"])
        self.ask("DELETE", f"/instances/{third}")
        self.wait_used(2)
        self.act(second, {"shelve_offload": None}, "shelved_offloaded")
        self.wait_used(1)
        self.act(first, {"resize": {"flavor": LARGE}}, "active")
        self.wait_used(3)
        self.act(second, {"unshelve": None}, "shelved_offloaded", status=403)
        self.ask("DELETE", f"/instances/{first}")
        self.wait_used(0)
        self.act(second, {"unshelve": None}, "active")
        self.wait_used(1)
        self.assertEqual([], sql_store(self.plane.database).quota_drift())
        self.assertEqual((), audit(sql_store(self.plane.database)).drift)
