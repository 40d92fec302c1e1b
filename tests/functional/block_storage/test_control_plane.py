# SPDX-License-Identifier: Apache-2.0
"""Block storage and cleanup through a whole control plane: real processes, the CLI, and the clients of Cinder unchanged."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import unittest
from collections.abc import Callable
from typing import Any, ClassVar

import openstack
import requests
from cinderclient import shell as cinder_shell
from openstack import connection
from openstackclient import shell as openstack_shell

from moorage import errors
from moorage.cli import main
from tests.commands import in_process
from tests.functional.block_storage.planes import SOON, Plane
from tests.pausing import pause
from tests.servers import wait_until


class ControlPlaneTests(unittest.TestCase):
    plane: ClassVar[Plane]
    endpoint: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        # One scheduler: two take somebody for dead at different moments.
        cls.plane = Plane(cls, schedulers=1)
        cls.endpoint = cls.plane.url + "/volume/v3"
        dead = cls.plane.agent("dead")
        cls.plane.api.set_service(cls.plane.service("dead")["uuid"], forced_down=True)
        dead.kill()

    def setUp(self) -> None:
        # An agent that another test has paused inside of a write held the file, and with it the scheduler's beat.
        wait_until(self.schedulers_listen, "a scheduler listens", SOON)

    def schedulers_listen(self) -> bool:
        with contextlib.suppress(errors.Unavailable):
            self.plane.api.request("POST", "/cleanup", body={"host": "nobody"})
            return True
        return False

    def test_from_a_volume_to_its_backup_and_back_by_commands(self) -> None:
        moorage = self.plane.moorage
        volume = moorage("volume", "create", "--size", "2", "--name", "first", "--wait")
        self.assertEqual((volume["status"], volume["size"]), ("available", 2))
        snapshot = moorage("snapshot", "create", volume["id"], "--wait")
        backup = moorage("backup", "create", volume["id"], "--wait")
        self.assertEqual((snapshot["status"], backup["status"]), ("available", "available"))
        new = moorage("backup", "restore", backup["id"], "--name", "restored", "--wait")
        self.assertEqual((new["status"], new["name"], new["id"] == volume["id"]), ("available", "restored", False))
        moorage("volume", "delete", new["id"])
        old = moorage("backup", "restore", backup["id"], "--volume", volume["id"], "--wait")
        self.assertEqual((old["status"], old["id"]), ("available", volume["id"]))
        image = moorage("volume", "upload", volume["id"], "image", "--wait")
        again = moorage("volume", "create", "--size", "2", "--image", image["image_id"], "--wait")
        self.assertEqual(again["status"], "available")
        (listed,) = moorage("image", "list")
        self.assertEqual((listed["id"], listed["name"], listed["status"]), (image["image_id"], "image", "active"))
        self.assertEqual(moorage("image", "show", listed["id"])["id"], listed["id"])
        moorage("image", "delete", listed["id"])
        self.assertEqual(moorage("image", "list"), [])
        wait_until(lambda: not [f for f in self.plane.files() if listed["id"] in f], "its file is gone", SOON)
        moorage("volume", "reset-state", again["id"], "--status", "error")
        self.assertIn(again["id"], [row["id"] for row in moorage("volume", "list", "--status", "error")])
        for kind, uuid in (("backup", backup["id"]), ("snapshot", snapshot["id"]), ("volume", again["id"])):
            moorage(kind, "delete", uuid)
            wait_until(functools.partial(self.gone, kind, uuid), f"{kind} is gone", SOON)
        moorage("volume", "delete", volume["id"], "--force")
        wait_until(lambda: volume["id"] not in self.plane.statuses("volume"), "it is gone", SOON)
        wait_until(lambda: not [f for f in self.plane.files() if volume["id"] in f], "its files are gone", SOON)

    def test_volumes_never_go_to_agents_without_block_storage(self) -> None:
        for number in range(2):
            self.plane.agent(f"no-storage-{number}", "agent.services=compute", "agent.cluster=")
        offers = {row["host"]: row["offers"] for row in self.plane.api.services(binary="agent")}
        self.assertIn("compute", offers["no-storage-0"])
        self.assertEqual(["block_storage", *offers["no-storage-0"]], offers["dead"])
        made = [self.plane.volume("POST", "/volumes", {"volume": {"size": 1}})["volume"] for _ in range(12)]
        self.assertEqual({each["os-vol-host-attr:host"] for each in made}, {"one"})
        for each in made:
            wait_until(functools.partial(self.available, each["id"]), "it is made", SOON)

    def test_who_waits_is_told_that_it_failed_and_why(self) -> None:
        plane = self.plane
        volume = plane.moorage("volume", "create", "--size", "1", "--wait")["id"]
        backup = plane.moorage("backup", "create", volume, "--wait")["id"]
        (path,) = (plane.state / "block_storage" / "backup" / backup).iterdir()
        path.write_bytes(path.read_bytes()[:-1])
        command = ["backup", "restore", backup, "--volume", volume, "--wait", "--state-dir", str(plane.state)]
        status, printed, said = in_process(main.main, command)
        self.assertEqual((status, printed), (1, ""))
        self.assertRegex(said, f"The volume {volume} is error_restoring: .*in the middle")

    def gone(self, kind: str, uuid: str) -> bool:
        return uuid not in self.plane.statuses(kind)

    def test_what_a_killed_agent_left_is_cleaned_by_another_on_request(self) -> None:
        plane = self.plane
        doomed = plane.agent("doomed", "block_storage.chunk_delay=60", "block_storage.operations=8")
        made = []

        def held() -> bool:
            made.append(plane.volume("POST", "/volumes", {"volume": {"size": 1}})["volume"]["id"])
            return len(plane.workers(host="doomed", phase="working")) >= 3

        wait_until(held, "it works on three volumes", SOON)
        why = [row["why"] for row in plane.moorage("cleanup", "list", "--host", "doomed")]
        self.assertTrue(why and all("agent doomed works on it" in each for each in why), why)
        doomed.kill()
        doomed.wait(SOON)
        left = {row["resource_id"] for row in plane.workers(host="doomed", phase="working")}
        wait_until(lambda: plane.service("doomed")["state"] == "down", "it is taken for dead", SOON)
        wait_until(lambda: plane.moorage("cleanup", "run", "--host", "doomed", "--dry-run"), "schedulers see it", SOON)
        would = plane.moorage("cleanup", "run", "--host", "doomed", "--dry-run")
        self.assertEqual({row["resource_id"] for row in would if row["would"] == "yes"}, left)
        answer = plane.moorage("cleanup", "run", "--host", "doomed", "--wait")
        self.assertEqual([(row["result"], row["host"]) for row in answer], [("cleaning", "doomed")])
        statuses = plane.statuses("volume")
        self.assertEqual({statuses[uuid] for uuid in left}, {"error"})
        wait_until(lambda: not set(made) & {row["resource_id"] for row in plane.workers()}, "all are done", SOON)
        statuses = plane.statuses("volume")
        self.assertEqual({statuses[uuid] for uuid in made if uuid not in left} - {"available"}, set())
        wait_until(lambda: not [f for f in plane.files() if f.split("/")[1] in left], "no part of them stays", SOON)
        history = plane.moorage("cleanup", "history", "--outcome", "done")
        self.assertLessEqual(left, {row["resource_id"] for row in history})
        again = plane.api.request("POST", "/cleanup", body={"host": "doomed"})
        (found,) = [each for each in plane.moorage("cleanup", "requests") if each["host"] == "doomed"]
        self.assertEqual((found["uuid"], found["uuid"]), (answer[0]["request"], again["requests"][0]["uuid"]))
        metrics = requests.get(plane.url + "/metrics", timeout=30).text
        self.assertIn('moorage_cleanup_outcomes_total{outcome="done",resource_type="volume"}', metrics)

    def test_an_agent_that_starts_again_cleans_after_itself(self) -> None:
        plane = self.plane
        plane.agent("returns", "block_storage.chunk_delay=60", "block_storage.operations=8").kill()
        process = plane.agent("returns", "block_storage.chunk_delay=60", "block_storage.operations=8")

        def held() -> list[dict[str, Any]]:
            plane.volume("POST", "/volumes", {"volume": {"size": 1}})
            return plane.workers(host="returns", phase="working")

        wait_until(held, "it works on a volume", SOON)
        left = [row["resource_id"] for row in plane.workers(host="returns", phase="working")]
        process.kill()
        process.wait(SOON)
        plane.agent("returns")
        wait_until(lambda: plane.statuses("volume")[left[0]] == "error", "it has cleaned", SOON)

    def test_one_that_was_paused_and_cleaned_after_stops_when_it_goes_on(self) -> None:
        plane = self.plane
        paused = plane.agent("paused", "block_storage.chunk_delay=0.2", "block_storage.operations=8")

        def held() -> list[dict[str, Any]]:
            plane.volume("POST", "/volumes", {"volume": {"size": 1}})
            return plane.workers(host="paused", phase="working")

        wait_until(held, "it works on a volume", SOON)
        pause(paused.pid, f"sqlite:///{plane.state / 'moorage.sqlite'}")
        left = [row["resource_id"] for row in plane.workers(host="paused", phase="working")]
        wait_until(lambda: plane.service("paused")["state"] == "down", "it is taken for dead", SOON)

        def asked() -> bool:
            with contextlib.suppress(errors.Unavailable):
                return bool(plane.api.request("POST", "/cleanup", body={"host": "paused"})["requests"])
            return False

        wait_until(asked, "schedulers take it for dead too", SOON)
        wait_until(lambda: not plane.workers(host="paused"), "it is cleaned after", SOON)
        before = {uuid: status for uuid, status in plane.statuses("volume").items() if uuid in left}
        self.assertLessEqual(set(before.values()), {"error", "available"})
        paused.send_signal(signal.SIGCONT)
        self.assertEqual(paused.wait(SOON), 70, "it gave up by itself")
        after = {uuid: status for uuid, status in plane.statuses("volume").items() if uuid in left}
        self.assertEqual(after, before)

    # -- python-cinderclient, openstackclient and openstacksdk, as they are ---------------------------------------

    def run_client(self, program: Callable[[list[str]], Any], *words: str) -> str:
        status, said, error = in_process(program, list(words))
        self.assertEqual(status, 0, f"{words}\n{said}{error}")
        return said

    def cinder(self, *words: str, project: str = "") -> str:
        return self.run_client(
            cinder_shell.OpenStackCinderShell().main,
            *("--os-auth-type", "noauth", "--os-user-id", "admin", "--os-project-id", "p"),
            *("--os-endpoint", self.endpoint + project, "--os-volume-api-version", "3.24", *words),
        )

    def openstack(self, *words: str) -> str:
        given = ("--os-auth-type", "none", "--os-endpoint", self.endpoint, "--os-volume-api-version", "3.24")
        return self.run_client(openstack_shell.main, *given, *words)

    def test_cinder_work_cleanup_with_every_option(self) -> None:
        number = str(self.service_id())
        for project in ("", "/p"):
            for options in (
                (),
                ("--cluster", "one"),
                ("--host", "dead"),
                ("--binary", "cinder-volume"),
                ("--is-up", "false"),
                ("--disabled", "false"),
                ("--service-id", number),
                ("--cluster", "one", "--host", "dead", "--binary", "cinder-volume", "--service-id", number),
                ("--resource-type", "Volume"),
            ):
                with self.subTest(options=options, project=project):
                    said = self.cinder("work-cleanup", *options, project=project)
                    self.assertRegex(said, r"Following services will be cleaned")
                    self.assertRegex(said, rf"\| +{number} +\| +one +\| +dead +\| +cinder-volume")
        for options in (("--host", "nobody"), ("--disabled", "true"), ("--binary", "cinder-scheduler")):
            with self.subTest(options=options):
                self.assertIn("No cleanable services matched", self.cinder("work-cleanup", *options))

    def service_id(self) -> int:
        answer = self.post({"host": "dead"})
        return int(answer.json()["cleaning"][0]["id"])

    def post(self, body: Any, path: str = "/workers/cleanup", version: str = "3.24", method: str = "POST") -> Any:
        headers = {"OpenStack-API-Version": f"volume {version}"}
        return requests.request(method, self.endpoint + path, json=body, headers=headers, timeout=SOON)

    def test_cinder_lists_creates_and_deletes(self) -> None:
        self.cinder("create", "1", "--name", "by-cinder")
        (uuid,) = [each["id"] for each in self.volumes() if each["name"] == "by-cinder"]
        wait_until(lambda: self.plane.statuses("volume")[uuid] == "available", "it is made", SOON)
        self.assertIn("by-cinder", self.cinder("list"))
        self.cinder("delete", uuid)
        wait_until(lambda: uuid not in self.plane.statuses("volume"), "it is gone", SOON)

    def test_both_clients_restore_to_a_new_volume_and_leave_the_original_alone(self) -> None:
        volume = self.plane.moorage("volume", "create", "--size", "1", "--name", "original", "--wait")["id"]
        self.openstack("volume", "backup", "create", "--name", "kept", volume)
        (backup,) = [each["id"] for each in self.plane.volume("GET", "/backups?name=kept")["backups"]]
        wait_until(lambda: self.plane.statuses("backup")[backup] == "available", "it is backed up", SOON)
        before = self.plane.volume("GET", f"/volumes/{volume}")["volume"]
        restore = functools.partial(self.openstack, "volume", "backup", "restore")
        for request, name in (
            (functools.partial(restore, "kept", "newvol"), "newvol"),
            (functools.partial(self.cinder, "backup-restore", "kept"), f"restore_backup_{backup}"),
            (functools.partial(self.cinder, "backup-restore", "kept", "--name", "by-name"), "by-name"),
        ):
            with self.subTest(name):
                request()
                (new,) = [each["id"] for each in self.volumes() if each["name"] == name]
                self.assertNotEqual(new, volume)
                wait_until(functools.partial(self.available, new), "it is restored", SOON)
                wait_until(lambda: self.plane.statuses("backup")[backup] == "available", "the backup is free", SOON)
        self.assertEqual(self.plane.volume("GET", f"/volumes/{volume}")["volume"], before)
        restore("--force", "kept", volume)
        wait_until(lambda: self.available(volume), "it is restored", SOON)
        self.assertNotEqual(self.plane.volume("GET", f"/volumes/{volume}")["volume"], before)

    def available(self, volume: str) -> bool:
        return self.plane.statuses("volume")[volume] == "available"

    def test_openstack_creates_lists_attaches_and_deletes(self) -> None:
        self.openstack("volume", "create", "--size", "1", "by-openstack")
        (uuid,) = [each["id"] for each in self.volumes() if each["name"] == "by-openstack"]
        wait_until(lambda: self.plane.statuses("volume")[uuid] == "available", "it is made", SOON)
        self.assertIn("by-openstack", self.openstack("volume", "list", "--all-projects", "--status", "available"))
        self.openstack("volume", "snapshot", "create", "--volume", uuid, "its-snapshot")
        wait_until(lambda: "available" in self.plane.statuses("snapshot").values(), "the snapshot is made", SOON)
        self.openstack("volume", "snapshot", "delete", "its-snapshot")
        wait_until(lambda: not self.plane.statuses("snapshot"), "the snapshot is gone", SOON)
        sdk: Any = self.sdk().block_storage
        sdk.attach_volume(uuid, "/dev/vdb", instance="11111111-1111-4111-8111-111111111111")
        (attachment,) = sdk.get_volume(uuid).attachments
        self.assertEqual((attachment["device"], attachment["server_id"][:8]), ("/dev/vdb", "11111111"))
        sdk.detach_volume(uuid, attachment["attachment_id"])
        self.assertEqual(sdk.get_volume(uuid).attachments, [])
        self.openstack("volume", "delete", "--force", uuid)
        wait_until(lambda: uuid not in self.plane.statuses("volume"), "it is gone", SOON)

    def test_what_the_service_does_not_support_is_refused_through_the_clients_too(self) -> None:
        before = len(self.volumes())
        for words in (("--type", "fast"), ("--property", "a=b"), ("--availability-zone", "nova"), ("--hint", "a=b")):
            with self.subTest(words), self.assertRaisesRegex(AssertionError, "is not supported"):
                self.openstack("volume", "create", "--size", "1", *words, "refused")
        self.assertEqual(len(self.volumes()), before)

    def volumes(self) -> list[dict[str, Any]]:
        return list(self.plane.volume("GET", "/volumes")["volumes"])

    def test_openstack_block_storage_cleanup(self) -> None:
        given = ("block", "storage", "cleanup", "-f", "json", "--cluster", "one", "--host", "dead")
        said = self.openstack(*given, "--binary", "cinder-volume")
        self.assertIn("dead", said)

    def sdk(self) -> connection.Connection:
        openstack.enable_logging(debug=False)
        return connection.Connection(
            auth_type="none", endpoint=self.endpoint, block_storage_endpoint_override=self.endpoint,
            block_storage_default_microversion="3.24",
        )  # fmt: skip

    def test_the_sdk(self) -> None:
        given = {"binary": "cinder-volume", "host": "dead", "cluster_name": "one"}
        proxy: Any = self.sdk().block_storage
        found: Any = proxy.cleanup_service_workers(**given)
        self.assertIn("dead", str(found.to_dict() if hasattr(found, "to_dict") else found))

    def test_the_shape_and_what_is_refused(self) -> None:
        found = self.post({})
        self.assertEqual((found.status_code, sorted(found.json())), (202, ["cleaning", "unavailable"]))
        self.assertEqual(set(found.json()["cleaning"][0]), {"id", "host", "binary", "cluster_name"})
        self.assertEqual(found.headers["OpenStack-API-Version"], "volume 3.24")
        later = self.post({"dry_run": True}, version="3.72").json()
        self.assertEqual({later["cleaning"][0][name] for name in ("name", "state")}, {"dead", "down"})
        self.assertEqual(later["would_clean"], [])
        self.assertEqual(self.post({}, "/workers/auto_cleanup").status_code, 202)
        for body, status in (
            ({"binary": "cinder-api"}, 400),
            ({"is_up": "maybe"}, 400),
            ({"unknown": 1}, 400),
            ({"host": "a b"}, 400),
            ({"resource_id": "no uuid"}, 400),
            ({"resource_id": "11111111-1111-4111-8111-111111111111"}, 400),
            ({"dry_run": True}, 400),
            ({"service_id": "12345678901234"}, 400),
            ([], 400),
        ):
            with self.subTest(body):
                answer = self.post(body)
                self.assertEqual(answer.status_code, status, answer.text)
                self.assertEqual(answer.json()["badRequest"]["code"], status)
        for version, status in (("3.23", 404), ("3.99", 406)):
            self.assertEqual(self.post({}, version=version).status_code, status)
        self.assertEqual(self.post({"host": None, "binary": None}, method="PUT").status_code, 202)
        self.assertEqual(self.post({}, method="GET").status_code, 405)

    def test_versions_are_told_to_everybody(self) -> None:
        for path, status in (("", 200), ("/", 200)):
            found = requests.get(self.endpoint + path, timeout=SOON)
            (version,) = found.json()["versions"]
            self.assertEqual((found.status_code, version["version"]), (status, "3.72"))
            self.assertEqual(version["links"][0]["href"], self.endpoint + "/")
        root = requests.get(self.plane.url + "/volume/", timeout=SOON)
        self.assertEqual((root.status_code, json.loads(root.text)["versions"][0]["id"]), (300, "v3.0"))
