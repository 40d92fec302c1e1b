# SPDX-License-Identifier: Apache-2.0
"""The first request, through a whole control plane of real processes."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
import uuid
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

import tests
from moorage import client, errors
from moorage.cli import main
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.rpc import loading
from moorage.rpc.client import RpcSender
from tests import servers
from tests.commands import in_process
from tests.forking import Command

CONF = """
[scheduling]
breaker_threshold = 2
refresh_interval = 1
[control_plane]
restart_delay = 0.1
[services]
report_interval = 0.5
service_down_time = 120
"""

FILTERS = """
import os, sys, time
from moorage.scheduling.interface import HostFilter

class Good(HostFilter):
    '''Only nodes whose name ends with an even digit.'''
    api_version = (1, 0)
    def host_passes(self, host_state, spec_obj):
        if spec_obj.flavor.flavorid == "raises":
            raise LookupError("a mistake of the author")
        if spec_obj.flavor.flavorid == "garbles":
            raise ValueError("\\ud800 \\x1b[31m\\nis no text")
        if spec_obj.flavor.flavorid == "hangs":
            time.sleep(600)
        if (host_state.nodename, spec_obj.flavor.flavorid) == ("node-0", "forks") and not os.fork():
            return False
        return int(host_state.nodename[-1]) % 2 == 0

class Leaves(HostFilter):
    api_version = (1, 0)
    def host_passes(self, host_state, spec_obj):
        return spec_obj.flavor.flavorid != "leaves" or sys.exit(5)

class Old(Good):
    api_version = (2, 0)
"""


class Plane:
    """``moorage up`` as a process, over a fleet of eight nodes.

    :param path: with other distributions, for an interpreter of its own.
    :param forked: not by an interpreter of its own, which takes several times as long (:mod:`tests.forking`).
    """

    def __init__(
        self,
        folder: pathlib.Path,
        extra: str = "",
        path: pathlib.Path | None = None,
        *,
        schedulers: int = 1,
        agents: int = 1,
        python: pathlib.Path | str = sys.executable,
        forked: bool = True,
    ) -> None:
        # Nothing may mind what a folder is called.
        self.state = folder / "state: $x, 100%41?"
        self.conf = folder / "moorage.conf"
        self.conf.write_text(CONF + extra)
        self.stderr = folder / f"stderr-{uuid.uuid4().hex}"
        words = [
            *("up", "--state-dir", str(self.state), "--bind", "127.0.0.1:0", "--config-file", str(self.conf)),
            *("--schedulers", str(schedulers), "--agents", str(agents)),
        ]
        self.process: Command | subprocess.Popen[str]
        if forked and path is None and python == sys.executable:
            self.process = Command(words, self.stderr)
            return
        environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, "-m", "moorage.cli.main", *words],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
            )  # fmt: skip

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def connect(self) -> client.Client:
        self.data: dict[str, Any] = json.loads((self.state / "client.json").read_text())
        return client.connect(**self.data)

    def processes(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads((self.state / "run" / "processes.json").read_text())}

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)
        return int(self.process.returncode or 0), self.said()

    def said(self) -> str:
        return self.stderr.read_text() if self.stderr.exists() else ""


def flavor(flavorid: str = "small", **resources: int) -> dict[str, Any]:
    return {"flavor": {"flavorid": flavorid, "resources": resources or {"VCPU": 1}}}


def patch_shard(url: str, data: dict[str, Any], node: str, shard: str) -> None:
    """By the dialect baremetal of the API at the URL."""
    answer = requests.patch(
        f"{url}/baremetal/v1/nodes/{node}",
        json=[{"op": "replace", "path": "/shard", "value": shard}],
        headers={"X-OpenStack-Ironic-API-Version": "1.82"},
        auth=(data["username"], data["password"]),
        timeout=60,
    )
    assert answer.status_code == 200, answer.text


class SliceCase(unittest.TestCase):
    folder: pathlib.Path
    plane: Plane
    api: client.Client
    path: pathlib.Path | None = None
    extra = ""
    #: Two where a test kills or compares them; each is a process to start.
    schedulers = 1
    agents = 2
    #: False where the start itself is tested.
    forked = True

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.prepare()
        cls.plane = Plane(
            cls.folder, cls.extra, cls.path, schedulers=cls.schedulers, agents=cls.agents, forked=cls.forked
        )
        cls.addClassCleanup(cls.plane.end)
        ready = cls.plane.wait_ready()
        assert ready.startswith("moorage is ready at http://127.0.0.1:"), (ready, cls.plane.end())
        cls.api = cls.plane.connect()
        cls.api.import_nodes([{"name": f"node-{number}", "inventories": {"VCPU": 4}} for number in range(8)])
        servers.wait_until(lambda: sum(host["up"] for host in cls.api.hosts()) == 8, "eight nodes", 90)

    @classmethod
    def prepare(cls) -> None:
        """Before the start."""

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        created = self.api.create_instance(body)
        servers.wait_until(lambda: self.api.instance(created["uuid"])["status"] != "building", "the build", 90)
        return self.api.instance(created["uuid"])

    def delete(self, instance: str) -> None:
        def gone() -> bool:
            try:
                self.api.instance(instance)
            except errors.NotFound:
                return True
            return False

        self.api.delete_instance(instance)
        servers.wait_until(gone, "the deletion", 90)

    def sender(self) -> RpcSender:
        """Calls a scheduler by its name; a client of the API cannot choose one."""
        conf = config.load(files=[str(self.plane.conf)], state_dir=str(self.plane.state))
        transport = loading.open_transport(conf, SystemClock())
        self.addCleanup(transport.close)
        return RpcSender(transport, str(uuid.uuid4()), 1, timeout=30)

    def counted(self) -> dict[tuple[str, str], float]:
        """(role, kind of event) -> how often, over all processes, by the observer metrics."""
        found: dict[tuple[str, str], float] = {}
        for file in (self.plane.state / "metrics").glob("*.prom"):
            for family in text_string_to_metric_families(file.read_text()):
                for sample in family.samples:
                    if sample.name == "moorage_events_total":
                        key = (sample.labels["binary"], sample.labels["kind"])
                        found[key] = found.get(key, 0) + sample.value
        return found


class TestSlice(SliceCase):
    schedulers = 2
    forked = False

    def test_an_instance_is_claimed_built_deleted_and_its_claim_given_back(self) -> None:
        made = self.create(flavor(VCPU=3))
        self.assertEqual("active", made["status"])
        (held,) = self.api.allocations(consumer=made["uuid"])
        self.assertEqual((made["node_uuid"], "VCPU", 3), (held["provider"], held["resource_class"], held["used"]))
        self.delete(made["uuid"])
        self.assertEqual([], list(self.api.allocations(consumer=made["uuid"])))

    def test_an_operator_resets_the_status_of_an_instance(self) -> None:
        made = self.create(flavor(VCPU=1))
        for status in ("error", "active"):
            command = ["instance", "reset-state", made["uuid"], "--status", status, "-f", "json"]
            code, printed, said = in_process(main.main, [*command, "--state-dir", str(self.plane.state)])
            self.assertEqual((code, json.loads(printed)["status"]), (0, status), said)
            self.assertEqual(1, len(list(self.api.allocations(consumer=made["uuid"]))))
        self.delete(made["uuid"])
        self.assertEqual([], list(self.api.allocations(consumer=made["uuid"])))

    def test_a_repeated_request_finds_the_first_ones_instance(self) -> None:
        body = {"uuid": str(uuid.uuid4()), **flavor(VCPU=1)}
        first, second = self.api.create_instance(body), self.api.create_instance(body)
        self.assertEqual(first["node_uuid"], second["node_uuid"])
        self.assertEqual(1, len(list(self.api.allocations(consumer=body["uuid"]))))
        servers.wait_until(lambda: self.api.instance(body["uuid"])["status"] == "active", "the build", 90)
        self.delete(body["uuid"])

    def test_a_build_that_fails_ends_in_error_without_a_claim(self) -> None:
        body = flavor()
        body["flavor"]["extra_specs"] = {"sim:fail": "no more disk"}
        made = self.create(body)
        self.assertEqual(("error", "no more disk"), (made["status"], made["fault"]))
        self.assertEqual([], list(self.api.allocations(consumer=made["uuid"])))
        again = self.api.create_instance({"uuid": made["uuid"], **body})
        self.assertEqual((made["uuid"], "error"), (again["uuid"], again["status"]))

    def test_the_uuid_of_an_instance_with_another_flavor_is_refused_and_no_view_is_changed(self) -> None:
        body = {"uuid": str(uuid.uuid4()), **flavor(VCPU=1)}
        first = self.create(body)

        def used() -> int:
            (seen,) = (host for host in self.api.hosts() if host["node"] == first["node"])
            return int(seen["used"].get("VCPU", 0))

        # Each scheduler answers in its turn.
        servers.wait_until(lambda: [used() for _ in range(4)] == [1] * 4, "both schedulers to know the instance", 90)
        for other in (flavor(VCPU=2), flavor("large", VCPU=1)):
            with self.assertRaisesRegex(errors.AlreadyExists, "give another uuid"):
                self.api.create_instance({**body, **other})
        self.assertEqual([1] * 4, [used() for _ in range(4)])
        self.delete(body["uuid"])

    def test_what_fits_nowhere_is_refused_with_the_reason_and_leaves_nothing(self) -> None:
        with self.assertRaises(errors.NoValidHost) as caught:
            self.api.create_instance({"uuid": str(uuid.uuid4()), **flavor(VCPU=5)})
        self.assertEqual("no node has enough VCPU free", caught.exception.details["summary"])
        self.assertEqual(8, caught.exception.details["reasons"]["capacity"])

    def test_hints_keep_instances_together_and_apart(self) -> None:
        one = self.create(flavor())
        sender = self.sender()

        def known(scheduler: str) -> bool:
            # It may be starting again after another test.
            with contextlib.suppress(errors.TransportError, errors.Unavailable):
                shown = sender.call("scheduler", "show_host", {"host": one["host"]}, server=scheduler, timeout=30)
                return one["uuid"] in shown["instances"]
            return False

        for scheduler in ("scheduler-1", "scheduler-2"):
            servers.wait_until(lambda name=scheduler: known(name), f"{scheduler} to know it", 90)  # type: ignore[misc]
        together = self.create({**flavor(), "hints": {"same_host": one["uuid"]}})
        apart = self.create({**flavor(), "hints": {"different_host": [one["uuid"]]}})
        self.assertEqual(one["node"], together["node"])
        self.assertNotEqual(one["node"], apart["node"])
        for each in (one, together, apart):
            self.delete(each["uuid"])

    def test_a_killed_role_is_started_again_and_requests_go_on(self) -> None:
        for name in ("scheduler-1", "agent-1", "engine-1"):
            before = self.plane.processes()[name]
            os.kill(before["pid"], signal.SIGKILL)
            made = self.create(flavor())
            self.assertEqual("active", made["status"])
            self.delete(made["uuid"])
            servers.wait_until(functools.partial(self.restarted, name, before["pid"]), f"{name} to start again", 90)

    def restarted(self, name: str, before: int) -> bool:
        return self.plane.processes()[name]["pid"] not in (None, before)

    def test_importing_again_changes_nothing(self) -> None:
        again = self.api.import_nodes([{"name": f"node-{number}", "inventories": {"VCPU": 4}} for number in range(8)])
        self.assertEqual({"created": 0, "changed": 0, "same": 8}, again)


class TestBadInput(SliceCase):
    agents = 1

    def send(self, method: str, path: str, **arguments: Any) -> requests.Response:
        arguments.setdefault("auth", (self.plane.data["username"], self.plane.data["password"]))
        return requests.request(method, f"{self.plane.data['url']}{path}", timeout=60, **arguments)

    def test_each_kind_is_refused_in_the_error_shape_and_changes_nothing(self) -> None:
        url = "/scheduling/v1/instances"
        whole = {"Content-Type": "application/json"}
        negative = {"flavor": {"flavorid": "x", "resources": {"VCPU": -1}}}
        table: list[tuple[int, str, str, dict[str, Any]]] = [
            (400, "POST", url, {"data": "{", "headers": whole}),
            (400, "POST", url, {"data": b"\xff\xfe", "headers": whole}),
            (400, "POST", url, {"data": "[" * 100_000, "headers": whole}),
            (400, "POST", url, {"data": '{"a": NaN}', "headers": whole}),
            (400, "POST", url, {"json": {**flavor(), "colour": "red"}}),
            (400, "POST", url, {"json": negative}),
            (400, "POST", url, {"json": {"flavor": "small"}}),
            (400, "POST", url, {"json": {**flavor(), "uuid": "not-one"}}),
            (400, "POST", url, {"json": {**flavor(), "force_hosts": ["nowhere"]}}),
            (400, "POST", url, {}),
            (400, "POST", url, {"data": json.dumps({**flavor(), "name": "half \ud800"}), "headers": whole}),
            (400, "POST", url, {"json": {**flavor(), "name": "nul \0"}}),
            (400, "POST", url, {"json": {**flavor(), "uuid": f"{uuid.uuid4()}\n"}}),
            (400, "POST", "/scheduling/v1/nodes", {"data": '{"nodes": [{"name": "\\ud800"}]}', "headers": whole}),
            (400, "GET", "/scheduling/v1/nodes?limit=many", {}),
            (400, "GET", "/scheduling/v1/nodes?limit=1&limit=2", {}),
            (400, "GET", "/scheduling/v1/nodes?host=%00", {}),
            (401, "GET", "/scheduling/v1/nodes", {"auth": None, "headers": {"Authorization": b"Basic \xff\xfe"}}),
            (400, "GET", "/scheduling/v1/nodes?colour=red", {}),
            (400, "GET", "/scheduling/v1/allocations?after=x", {}),
            (401, "GET", "/scheduling/v1/nodes", {"auth": ("admin", "wrong")}),
            (401, "GET", "/scheduling/v1/nodes", {"auth": None}),
            (404, "GET", "/scheduling/v1/nowhere", {}),
            (404, "GET", f"{url}/{uuid.uuid4()}", {}),
            (405, "PUT", "/scheduling/v1/nodes", {}),
            (406, "GET", "/scheduling/v1/nodes", {"headers": {"OpenStack-API-Version": "scheduling 9.9"}}),
        ]
        for status, method, path, arguments in table:
            with self.subTest(status=status, path=path, arguments=str(arguments)[:60]):
                answer = self.send(method, path, **arguments)
                self.assertEqual(status, answer.status_code, answer.text)
                self.assertTrue(answer.json()["error"]["message"])
                self.assertNotIn("Traceback", answer.text)
        self.assertEqual([], list(self.api.instances()))

    def test_a_body_of_100_mb_is_refused_by_its_length(self) -> None:
        def body() -> Any:
            chunk = b" " * 65536
            for _ in range(1600):
                yield chunk

        try:
            answer = self.send(
                "POST", "/scheduling/v1/instances", data=body(), headers={"Content-Type": "application/json"}
            )
        except requests.ConnectionError:
            # The server closed the connection while the client was still sending: also a refusal.
            pass
        else:
            self.assertEqual(413, answer.status_code)
        self.assertEqual([], list(self.api.instances()))

    def test_health_and_metrics_need_no_password(self) -> None:
        self.assertEqual("healthy", self.send("GET", "/healthcheck", auth=None).json()["status"])
        self.api.services()
        self.assertIn("moorage_api_request_seconds", self.send("GET", "/metrics", auth=None).text)


def install(folder: pathlib.Path, distribution: str, points: dict[str, str]) -> None:
    """A distribution of somebody else, as pip would leave it."""
    folder.mkdir(exist_ok=True)
    (folder / "acme_filters.py").write_text(FILTERS)
    (folder / "acme_broken.py").write_text("import no_such_library\n")
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[moorage.filters]\n{lines}\n")


OBSERVERS = """
import time
from moorage.observers.interface import Observer

class Raises(Observer):
    '''Of no use.'''
    api_version = (1, 0)
    def observe(self, notice):
        raise LookupError("a mistake of the author")

class Hangs(Observer):
    '''Of no use either.'''
    api_version = (1, 0)
    def observe(self, notice):
        time.sleep(3600)
"""


class TestThirdPartyPlugins(SliceCase):
    schedulers = 2
    # What does not hang has that long for eight nodes, on a loaded machine too.
    extra = """
[scheduling]
enabled_filters = compute,capacity,even,leaves
plugin_deadline = 5
[observers]
enabled = raises,hangs,metrics,log
max_errors = 3
deadline = 0.5
[observer_metrics]
interval = 0.1
"""

    @classmethod
    def prepare(cls) -> None:
        cls.path = cls.folder / "site"
        install(cls.path, "acme", {"even": "acme_filters:Good", "leaves": "acme_filters:Leaves"})
        (cls.path / "acme_observers.py").write_text(OBSERVERS)
        points = "raises = acme_observers:Raises\nhangs = acme_observers:Hangs\n"
        with (cls.path / "acme-1.0.dist-info" / "entry_points.txt").open("a") as file:
            file.write(f"[moorage.observers]\n{points}")

    # Before the schedulers are ended by the other test.
    def test_events_of_every_role_are_told_and_bad_observers_are_named_and_switched_off(self) -> None:
        for _ in range(5):
            self.delete(self.create(flavor())["uuid"])
        for _ in range(5):
            with self.assertRaises(errors.NoValidHost):
                self.api.create_instance({"uuid": str(uuid.uuid4()), **flavor(VCPU=100)})
        failed = flavor()
        failed["flavor"]["extra_specs"] = {"sim:fail": "no more disk"}
        self.assertEqual("error", self.create(failed)["status"])
        self.api.assign_shards([{"node": "node-1", "shard": "east"}])
        # The same again changes nothing; then the import and the dialect each change one.
        for shard in ("east", "west"):
            self.api.import_nodes([{"name": "node-1", "inventories": {"VCPU": 4}, "shard": shard}])
        patch_shard(self.plane.data["url"], self.plane.data, "node-1", "north")
        wanted = {
            # Of the build that failed there are three: it was tried on two more nodes.
            ("scheduler", "request.decided"): 8,
            ("scheduler", "claim.won"): 8,
            ("scheduler", "request.refused"): 5,
            ("agent", "instance.created"): 5,
            ("agent", "instance.deleted"): 5,
            ("agent", "instance.failed"): 1,
            ("api", "shard.reassigned"): 3,
        }

        def told() -> bool:
            counted = self.counted()
            ups = {binary for binary, kind in counted if kind == "service.up"}
            return wanted.items() <= counted.items() and ups == {"api", "scheduler", "agent", "engine"}

        servers.wait_until(told, "the events of all roles", 90)
        servers.wait_until(
            lambda: "engine" in {role for role, kind in self.counted() if kind == "ring.changed"}, "it", 90
        )

        def said() -> str:
            return "".join(log.read_text() for log in (self.plane.state / "log").glob("*.log"))

        for part in (
            "The observer 'raises' (moorage.observers, of acme 1.0) raised LookupError in observe: a mistake of the author",
            "The observer 'raises' (moorage.observers, of acme 1.0) raised 3 times in a row, and receives no more events.",
            "The observer 'hangs' (moorage.observers, of acme 1.0) has not returned for more than 0.5 seconds",
            "request.refused {",
        ):
            # Each observer has a queue of its own: what one has counted, another one may not have logged yet.
            servers.wait_until(lambda part=part: part in said(), part, 90)  # type: ignore[misc]
        # Two schedulers, an agent, an API server and an engine: each tried it three times at most.
        self.assertLessEqual(said().count("raised LookupError in observe"), 3 * len(self.plane.processes()))

    def test_it_decides_and_what_it_does_wrong_is_told_by_its_name(self) -> None:
        made = self.create(flavor())
        self.assertIn(made["node"], {f"node-{number}" for number in (0, 2, 4, 6)})
        self.delete(made["uuid"])

        with self.assertRaises(errors.PluginFailed) as raised:
            self.api.create_instance(flavor("raises"))
        for part in ("The plugin 'even' (moorage.filters, of acme 1.0) raised LookupError", "a mistake of the author"):
            self.assertIn(part, raised.exception.message)

        with self.assertRaises(errors.PluginFailed) as raised:
            self.api.create_instance(flavor("garbles"))
        self.assertIn(r"of acme 1.0) raised ValueError: \ud800 \x1b[31m\nis no text. ", raised.exception.message)

        with self.assertRaises(errors.PluginFailed) as raised:
            self.api.create_instance(flavor("leaves"))
        for part in ("'leaves'", "acme", "SystemExit(5)"):
            self.assertIn(part, raised.exception.message)

        # The process itself decides, and its copy ends.
        self.delete(self.create(flavor("forks"))["uuid"])
        logs = [self.plane.state / "log" / f"scheduler-{number}.log" for number in (1, 2)]
        servers.wait_until(lambda: any("is a copy that even made" in log.read_text() for log in logs), "its end", 90)
        written = "".join(log.read_text() for log in logs)
        self.assertIn(r"ValueError: \ud800", written)
        self.assertNotIn("--- Logging error ---", written)

        said: list[str] = []

        def tells(words: str) -> bool:
            with self.assertRaises(errors.Unavailable) as unavailable:
                self.api.create_instance(flavor("hangs"))
            said.append(unavailable.exception.message)
            return any(words in text for text in said)

        servers.wait_until(lambda: tells("taken for hung"), "the hung plugin", 180)
        servers.wait_until(lambda: tells("is not run any more"), "the breaker", 180)
        self.assertTrue(all("'even'" in text or "scheduler" in text for text in said), said)


class TestRefusedStart(unittest.TestCase):
    def refusal(self, points: dict[str, str], *others: str) -> str:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for distribution in ("acme", *others):
                install(folder / "site", distribution, points)
            plane = Plane(folder, "\n[scheduling]\nenabled_filters = compute,even\n", folder / "site")
            self.assertEqual("", plane.wait_ready())
            status, said = plane.end()
            self.assertNotEqual(0, status)
            self.assertNotIn("Traceback", said)
            return said

    def test_an_import_error(self) -> None:
        said = self.refusal({"even": "acme_broken:Good"})
        for part in ("'even'", "acme 1.0", "no_such_library", "uninstall acme"):
            self.assertIn(part, said)

    def test_another_api_version(self) -> None:
        said = self.refusal({"even": "acme_filters:Old"})
        for part in ("'even'", "acme", "api_version 2.0", "offers 1.0"):
            self.assertIn(part, said)

    def test_a_name_with_two_owners(self) -> None:
        said = self.refusal({"even": "acme_filters:Good"}, "zeta")
        for part in ("'even'", "acme 1.0", "zeta 1.0", "Uninstall one"):
            self.assertIn(part, said)

    def test_noauth_on_an_open_address(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "moorage.cli.main", "up", "--state-dir", folder),
                    *("--bind", "0.0.0.0:0", "--auth-strategy", "noauth"),
                ],
                capture_output=True,
                text=True,
                timeout=60,
            )
        self.assertNotEqual(0, done.returncode)
        self.assertIn("noauth makes everybody an administrator", done.stderr)


class TestSignals(unittest.TestCase):
    def test_sighup_takes_a_good_configuration_and_refuses_a_bad_one_and_sigterm_ends_with_zero(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            plane = Plane(pathlib.Path(name), schedulers=2)
            self.addCleanup(plane.end)
            self.assertIn("ready", plane.wait_ready())
            api = plane.connect()
            api.import_nodes([{"name": "only", "inventories": {"VCPU": 4}}])
            servers.wait_until(lambda: bool(api.hosts()), "the node", 90)

            def filters() -> set[str]:
                return set(api.select({**flavor(), "explain": True})["removed"])

            self.assertNotIn("type_affinity", filters())

            def reload(*lines: str) -> None:
                plane.conf.write_text(CONF.replace("[scheduling]", "\n".join((*lines, "[scheduling]"))))
                plane.process.send_signal(signal.SIGHUP)

            good = "[scheduling]\nenabled_filters = compute,type_affinity"
            for number, bad in enumerate(
                ("[scheduling]\nenabled_filters = compute,nonsense", "[api]\nenabled_apis = absent")
            ):
                # The second can be used by schedulers; they do not get it all the same, because the API cannot.
                reload(good if number else "", bad)
                servers.wait_until(lambda: plane.said().count("not taken") > number, "the refusal", 90)  # noqa: B023
            self.assertIn("'nonsense'", plane.said())
            self.assertIn("'absent'", plane.said())
            self.assertNotIn("type_affinity", filters())
            reload(good, "[control_plane]\ndrain_timeout = 31")
            servers.wait_until(lambda: all("type_affinity" in filters() for _ in range(6)), "the new filters", 90)
            status, said = plane.end()
            self.assertEqual(0, status)
            self.assertIn("a reload does not change [control_plane] drain_timeout; restart for that", said)

    def test_what_restarts_after_a_refused_reload_gets_the_configuration_that_was_accepted(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            plane = Plane(pathlib.Path(name), "[scheduling]\nenabled_filters = compute,type_affinity\n")
            self.addCleanup(plane.end)
            self.assertIn("ready", plane.wait_ready())
            api = plane.connect()
            api.import_nodes([{"name": "only", "inventories": {"VCPU": 4}}])
            servers.wait_until(lambda: bool(api.hosts()), "the node", 90)
            plane.conf.write_text("[scheduling]\nenabled_filters = nonsense\n[api]\nbind = nowhere\n")
            plane.process.send_signal(signal.SIGHUP)
            servers.wait_until(lambda: "not taken" in plane.said(), "the refusal", 90)
            for role in ("scheduler-1", "engine-1", "agent-1", "api-1"):
                with self.subTest(role=role):
                    before = plane.processes()[role]["pid"]
                    log = plane.state / "log" / f"{role}.log"
                    ready = log.read_text().count("is ready")
                    os.kill(before, signal.SIGKILL)
                    servers.wait_until(lambda: log.read_text().count("is ready") > ready, "it is back", 90)  # noqa: B023
                    self.assertRegex(log.read_text(), "WARNING.*The configuration in use is the copy in .*'nonsense'")
            explained = {**flavor(), "explain": True}
            servers.wait_until(lambda: "type_affinity" in api.select(explained)["removed"], "the filters", 90)
            self.assertEqual(0, plane.end()[0])
            # Started by hand it uses the file, or nothing.
            refused = subprocess.run(plane.process.args, capture_output=True, text=True, timeout=120)
            self.assertEqual(78, refused.returncode)
            self.assertIn("'nonsense'", refused.stderr)

    def test_a_second_control_plane_on_the_same_folder_is_refused_and_the_first_goes_on(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            first = Plane(pathlib.Path(name))
            self.addCleanup(first.end)
            self.assertIn("ready", first.wait_ready())
            second = Plane(pathlib.Path(name))
            status, said = second.end() if second.wait_ready() else (second.process.wait(120), second.said())
            self.assertNotEqual(0, status)
            self.assertIn("Another control plane runs", said)
            self.assertEqual([], list(first.connect().nodes()))

    def test_sigterm_while_it_starts_ends_it_in_good_order(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            plane = Plane(pathlib.Path(name), forked=False)
            self.addCleanup(plane.end)
            servers.wait_until((plane.state / "run" / "processes.json").exists, "the first process", 90)
            status, said = plane.end()
            self.assertEqual(0, status, said)
            self.assertTrue(all(row["pid"] is None for row in plane.processes().values()))


class TestReplay(unittest.TestCase):
    def replay(self, *extra: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            nodes, wanted = folder / "nodes.csv", folder / "requests.csv"
            nodes.write_text("name,vcpus\n" + "".join(f"n{number},8\n" for number in range(10)))
            rows = "".join(f"{number},60,r{number},1\n" for number in range(120))
            wanted.write_text("arrival_s,lifetime_s,name,VCPU\n" + rows)
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "moorage.cli.main", "replay", "--nodes", nodes, "--requests", wanted),
                    *("--agents", "1", "--kill", "--json", *extra),
                ],
                capture_output=True,
                text=True,
                timeout=300,
            )
        self.assertEqual(0, done.returncode, done.stderr + done.stdout)
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def check(self, report: dict[str, Any]) -> None:
        self.assertEqual((10, 120, 80, 40), tuple(report[key] for key in ("hosts", "requests", "placed", "refused")))
        self.assertEqual((0, 0, 0, 0), tuple(report[key] for key in ("over_allocated", "lost", "unanswered", "failed")))
        self.assertIn("scheduler-1", report["killed"])
        self.assertEqual(40, sum(report["refused_because"].values()))

    def test_a_fleet_is_filled_to_the_last_cpu_while_a_scheduler_is_killed(self) -> None:
        self.check(self.replay())

    def test_the_same_on_postgresql_and_rabbitmq_by_configuration_alone(self) -> None:
        servers.require("postgresql")
        servers.require("rabbitmq")
        url = servers.fresh_database(servers.shared("postgresql"))
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
            conf.write(f"[database]\nconnection = {url}\n[rpc]\ntransport_url = {servers.shared('rabbitmq').url}\n")
            conf.flush()
            self.check(self.replay("--config-file", conf.name))


@tests.for_ci("sends thousands of requests")
class TestSchema(SliceCase):
    agents = 1

    def test_nothing_that_the_document_allows_or_forbids_makes_a_server_error(self) -> None:
        token = base64.b64encode(f"{self.plane.data['username']}:{self.plane.data['password']}".encode()).decode()
        done = subprocess.run(
            [
                *(pathlib.Path(sys.executable).parent / "schemathesis", "run"),
                f"{self.plane.data['url']}/scheduling/v1/openapi.json",
                *("--checks", "not_a_server_error", "--max-examples", str(tests.cases(8)), "--seed", "1"),
                *("--phases", "examples,coverage,fuzzing", "--header", f"Authorization: Basic {token}"),
            ],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "short_waits", "PYTHONPATH": str(pathlib.Path(__file__).parent)},
            timeout=900,
        )
        self.assertEqual(0, done.returncode, done.stdout[-6000:] + done.stderr[-2000:])
