# SPDX-License-Identifier: Apache-2.0
"""What an API does not understand it refuses with 400 that names it: every route of every dialect, and every core route."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import unittest
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import requests

from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.control_plane import config
from moorage.control_plane.api_assembly import ApiAssembly
from moorage.control_plane.process import anonymous_platform
from moorage.db import Database, migrations
from moorage.http.application import Application
from moorage.http.routes import ANY_QUERY, Route
from tests.api.live import LiveDialect

STRANGE = "not_a_parameter"
DIALECTS = ("volume", "baremetal", "placement", "data_processing")
#: Objects whose keys are data of the client, by the last name of their place in a schema.
FREE = {
    "properties",
    "extra",
    "driver_info",  # Each driver has members of its own, as in the API of Ironic.
    "params",  # The sharding strategy refuses those that it does not know.
    "mappings",  # Placement ignores it too: it describes which group of a request the allocations came from.
}


def open_objects(schema: Any, place: str = "") -> Iterator[str]:
    """Places of a schema where an object takes keys that the schema does not describe."""
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type", "object" if "properties" in schema else "")
    if ("object" in kinds) and schema.get("additionalProperties", True) is True and place.split("/")[-1] not in FREE:
        yield place
    for name in ("properties", "patternProperties"):
        for key, inner in schema.get(name, {}).items():
            yield from open_objects(inner, f"{place}/{key}")
    for name in ("items", "additionalProperties"):
        yield from open_objects(schema.get(name), f"{place}/{name}")
    for name in ("oneOf", "anyOf", "allOf"):
        for inner in schema.get(name, ()):
            yield from open_objects(inner, place)


def everybody_is_admin(environ: Mapping[str, Any]) -> RequestContext:
    roles = ["admin", "manager", "member", "reader", "service"]
    return RequestContext(user_id="u", project_id=None, system_scope="all", roles=roles, overwrite=False)


class TestDialects(unittest.TestCase):
    def applications(self) -> Iterator[tuple[str, LiveDialect, Application]]:
        for name in DIALECTS:
            live = LiveDialect(name, "/x", authenticate=everybody_is_admin)
            self.addCleanup(live.close)
            (found,) = [each for each in gc.get_objects() if isinstance(each, Application) and each.tools is live.tools]
            yield name, live, found

    def test_unknown_parameters_of_queries_are_refused_and_named(self) -> None:
        for name, live, application in self.applications():
            self.assertGreater(len(application.routes), 5)
            for route in application.routes:
                # Ironic's API knows no other order: it looks for the resource first.
                if route.method != "GET" and route.query is ANY_QUERY:
                    continue
                with self.subTest(dialect=name, method=route.method, path=route.path):
                    self.refuses(live, application, route)

    def refuses(self, live: LiveDialect, application: Application, route: Route) -> None:
        path = route.path
        for part in ("{uuid}", "{ident}", "{consumer}", "{project_id}"):
            path = path.replace(part, "11111111-1111-4111-8111-111111111111")
        path = path.replace("{name}", "CUSTOM_X").replace("{resource_class}", "CUSTOM_X")
        self.assertNotIn("{", path)
        version = ".".join(map(str, route.until or application.dialect.highest))
        headers = {
            "OpenStack-API-Version": f"{application.dialect.service_type} {version}",
            "Content-Type": "application/json",
        }
        found = requests.request(route.method, f"{live.url}{path}?{STRANGE}=1", headers=headers, timeout=30)
        self.assertEqual((found.status_code, STRANGE in found.text), (400, True), found.text)

    def test_bodies_are_closed(self) -> None:
        for name, _, application in self.applications():
            for route in application.routes:
                with self.subTest(dialect=name, method=route.method, path=route.path):
                    self.assertEqual(list(open_objects(route.body)), [])

    def test_a_body_where_none_belongs_is_refused_and_named(self) -> None:
        for name, live, application in self.applications():
            for route in application.routes:
                if route.body is None and route.path == "/v3/volumes/{uuid}":
                    with self.subTest(dialect=name, method=route.method):
                        path = route.path.replace("{uuid}", "x")
                        sent = requests.request(route.method, live.url + path, json={STRANGE: 1}, timeout=30)
                        self.assertEqual((sent.status_code, STRANGE in sent.text), (400, True), sent.text)


class TestVolumes(unittest.TestCase):
    """Keys that Cinder knows and Moorage does not support, in Cinder's shape of errors."""

    live: ClassVar[LiveDialect]

    @classmethod
    def setUpClass(cls) -> None:
        cls.live = LiveDialect("volume", "/volume", authenticate=everybody_is_admin)
        cls.addClassCleanup(cls.live.close)
        cls.live.registry.enlist("agent", "a", rpc_version="1.0")

    def post(self, path: str, body: Any) -> requests.Response:
        return requests.post(f"{self.live.url}/v3{path}", json=body, timeout=30)

    def refuses(self, path: str, body: Any, key: str) -> None:
        with self.subTest(path=path, key=key, body=json.dumps(body)):
            found = self.post(path, body)
            self.assertEqual(found.status_code, 400, found.text)
            self.assertIn(key, found.json()["badRequest"]["message"])

    def test_a_volume_from_anything_but_zeros_or_an_image(self) -> None:
        for key, value in {
            "snapshot_id": "s", "source_volid": "v", "backup_id": "b", "volume_type": "fast", "metadata": {"a": "b"},
            "multiattach": True, "consistencygroup_id": "g", "group_id": "g", "availability_zone": "nova",
            "description": "mine", "whatever": None,
        }.items():  # fmt: skip
            self.refuses("/volumes", {"volume": {"size": 1, key: value}}, key)
        hints = "OS-SCH-HNT:scheduler_hints"
        self.refuses("/volumes", {"volume": {"size": 1}, hints: {"same_host": ["x"]}}, hints)
        self.assertEqual(requests.get(f"{self.live.url}/v3/volumes", timeout=30).json()["volumes"], [])

    def test_what_means_nothing_is_no_reason_to_refuse(self) -> None:
        empty: dict[str, Any] = dict.fromkeys(
            ("snapshot_id", "source_volid", "backup_id", "volume_type", "consistencygroup_id")
        )
        given: dict[str, Any] = {"size": 1, "metadata": {}, "multiattach": False, "description": "", **empty}
        found = self.post("/volumes", {"volume": given, "OS-SCH-HNT:scheduler_hints": {}})
        self.assertEqual(found.status_code, 202, found.text)
        requests.post(
            f"{self.live.url}/v3/volumes/{found.json()['volume']['id']}/action",
            json={"os-force_delete": None},
            timeout=30,
        )

    def test_snapshots_backups_and_restores(self) -> None:
        for key, value in {"metadata": {"a": "b"}, "description": "d", "whatever": 1}.items():
            self.refuses("/snapshots", {"snapshot": {"volume_id": "v", key: value}}, key)
        for key, value in {
            "incremental": True, "snapshot_id": "s", "container": "c", "metadata": {"a": "b"}, "description": "d",
            "availability_zone": "z", "whatever": 1,
        }.items():  # fmt: skip
            self.refuses("/backups", {"backup": {"volume_id": "v", key: value}}, key)
        self.refuses("/backups/b/restore", {"restore": {"volume": "v"}}, "volume")

    def test_actions(self) -> None:
        for action, given, key in (
            ("os-fly", {}, "os-fly"),
            ("os-reset_status", {"status": "error", "attach_status": "detached"}, "attach_status"),
            ("os-reset_status", {"status": "error", "migration_status": "none"}, "migration_status"),
            ("os-reset_status", {}, "status"),
            ("os-attach", {"instance_uuid": "i", "mode": "ro"}, "mode"),
            ("os-force_delete", {"cascade": True}, "cascade"),
            ("os-volume_upload_image", {"image_name": "i", "disk_format": "qcow2"}, "disk_format"),
            ("os-volume_upload_image", {"image_name": "i", "visibility": "public"}, "visibility"),
        ):
            self.refuses("/volumes/v/action", {action: given}, key)

    def test_queries(self) -> None:
        for query in ("sort=name:asc", "offset=1", "metadata=x", "limit=1&limit=2", "all_tenants=perhaps", "limit=0"):
            with self.subTest(query):
                found = requests.get(f"{self.live.url}/v3/volumes/detail?{query}", timeout=30)
                self.assertEqual(found.status_code, 400, found.text)
                self.assertIn(query.partition("=")[0], found.json()["badRequest"]["message"])
        gone = requests.delete(f"{self.live.url}/v3/volumes/v?cascade=True&force=False", timeout=30)
        self.assertEqual((gone.status_code, "cascade" in gone.text), (400, True), gone.text)


class TestBaremetal(unittest.TestCase):
    """Bodies of the baremetal dialect have no schema: the handlers read them, with Ironic's words."""

    def test_unknown_fields_are_refused_and_named(self) -> None:
        live = LiveDialect("baremetal", "/baremetal", authenticate=everybody_is_admin)
        self.addCleanup(live.close)
        headers = {"X-OpenStack-Ironic-API-Version": "1.115"}
        made = requests.post(f"{live.url}/v1/nodes", json={"driver": "fake-hardware"}, headers=headers, timeout=30)
        self.assertEqual(made.status_code, 201, made.text)
        node = made.json()["uuid"]
        port = {"node_uuid": node, "address": "52:54:00:00:00:01"}
        change = [{"op": "add", "path": f"/{STRANGE}", "value": 1}]
        for method, path, body in (
            ("POST", "/v1/nodes", {"driver": "fake-hardware", STRANGE: 1}),
            ("POST", "/v1/ports", {**port, STRANGE: 1}),
            ("POST", "/v1/portgroups", {"node_uuid": node, STRANGE: 1}),
            ("PATCH", f"/v1/nodes/{node}", change),
            ("PUT", f"/v1/nodes/{node}/maintenance", {STRANGE: 1}),
        ):
            with self.subTest(method=method, path=path):
                found = requests.request(method, live.url + path, json=body, headers=headers, timeout=30)
                self.assertEqual((found.status_code, STRANGE in found.text), (400, True), found.text)


class TestCore(unittest.TestCase):
    """/scheduling/v1: a route without a schema of the query takes no parameter, one without a schema of the body no body."""

    def test_bodies_and_queries_are_closed(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        conf = config.load(files=[], state_dir=folder.name)
        with contextlib.closing(Database.from_config(conf, clock=SystemClock())) as database:
            migrations.upgrade_all(database)
        opened = contextlib.ExitStack()
        self.addCleanup(opened.close)
        routes = ApiAssembly(anonymous_platform("strictness", conf, SystemClock(), opened), conf)._routes()
        self.assertGreater(len(routes), 50)
        for route in routes:
            with self.subTest(method=route.method, path=route.path):
                self.assertEqual([*open_objects(route.query, "query"), *open_objects(route.body, "body")], [])
