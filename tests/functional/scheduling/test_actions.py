# SPDX-License-Identifier: Apache-2.0
"""Operations on instances as users ask for them: over HTTP, and by the commands."""

from __future__ import annotations

import json
import pathlib
import unittest
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.cli import main
from moorage.client.client import Client
from moorage.control_plane.api_role import ApiRole
from moorage.control_plane.factories import open_workers
from moorage.instances.interface import DEPARTURE
from moorage.services.tables import services
from moorage_plugins.compute.tables import instances
from tests.commands import in_process
from tests.functional.scheduling.plane import SOON, Plane
from tests.gabbits import run_file
from tests.servers import wait_until

_IN_ERROR = (
    "not evacuated, because it is in error: delete it, or run moorage instance reset-state and repeat the command"
)
FOLDER = pathlib.Path(__file__).parent / "gabbits"


class _LivePlane(unittest.TestCase):
    settings: ClassVar[Mapping[str, Any]] = {}

    def setUp(self) -> None:
        plane = Plane(self, api__bind="127.0.0.1:0", api__auth_strategy="noauth", **self.settings)
        self.plane = plane.up(("h1", "h2"), schedulers=2)
        self.url: str = self.plane.start(ApiRole(), "api-live").url

    def moorage(self, *words: str, status: int = 0) -> str:
        """What a command wrote: on its output when it succeeded, on stderr otherwise."""
        found, out, err = in_process(main.main, [*words, "--url", self.url, "--auth-type", "none"])
        self.assertEqual(status, found, out + err)
        self.assertNotIn("Traceback", err)
        return err if status else out

    def shown(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.moorage(*words, "-f", "json"))
        return found


class HttpTests(_LivePlane):
    def test_every_file_holds(self) -> None:
        files = sorted(FOLDER.glob("*.yaml"))
        self.assertTrue(files)
        for file in files:
            with self.subTest(file.name):
                run_file(self, self.url, file)


class ResizeCommandTests(_LivePlane):
    settings: ClassVar[Mapping[str, Any]] = {"compute__resize_confirm_after": -1.0}

    def test_a_resize_is_reverted_and_the_next_one_confirmed(self) -> None:
        made = self.shown("instance", "create", "--name", "one", "--resource", "VCPU=2", "--wait")
        uuid, workers = made["uuid"], open_workers(self.plane.client, self.plane.conf)
        resize = ("instance", "resize", uuid, "--flavor", "large", "--resource", "VCPU=4", "--wait")
        resized = self.shown(*resize)
        self.assertEqual(("resized", "large"), (resized["status"], resized["flavorid"]))
        self.assertIn("Confirm its resize, or revert it", self.moorage("instance", "stop", uuid, status=1))
        reverted = self.shown("instance", "revert-resize", uuid, "--wait")
        self.assertEqual(
            ("active", made["host"], made["flavorid"]), tuple(reverted[n] for n in ("status", "host", "flavorid"))
        )
        self.assertIn("There is no resize", self.moorage("instance", "revert-resize", uuid, status=1))
        wait_until(lambda: workers.get(DEPARTURE, uuid) is None, "the other host", SOON)
        self.assertEqual("resized", self.shown(*resize)["status"])
        self.assertEqual("active", self.shown("instance", "confirm-resize", uuid)["status"])
        wait_until(lambda: workers.get(DEPARTURE, uuid) is None, "the other host", SOON)
        self.assertIn("There is no resize", self.moorage("instance", "confirm-resize", uuid, status=1))
        # What the journal says of its status, in order.
        events = self.shown("audit", "--subject", f"instance/{uuid}")
        self.assertIn("resized", json.dumps(events))


class CommandTests(_LivePlane):
    def test_every_operation_to_its_end(self) -> None:
        made = self.shown("instance", "create", "--name", "one", "--resource", "VCPU=2", "--wait")
        self.assertEqual("active", made["status"])
        uuid, workers = made["uuid"], open_workers(self.plane.client, self.plane.conf)

        def act(command: str, *words: str) -> dict[str, Any]:
            found = self.shown("instance", command, uuid, "--wait", *words)
            # What has moved cannot move again before its source has let go.
            wait_until(lambda: workers.get(DEPARTURE, uuid) is None, "the source of the move", SOON)
            return found

        rebuilt = act("rebuild", "--image", "new", "--image-property", "os_distro=debian")
        self.assertEqual(
            ("active", {"id": "new", "properties": {"os_distro": "debian"}}),
            (rebuilt["status"], json.loads(rebuilt["request"])["image"]),
        )
        resized = act("resize", "--flavor", "large", "--resource", "VCPU=4")
        resized["resources"] = json.loads(resized["resources"])
        self.assertEqual(
            ("active", "large", {"VCPU": 4}), tuple(resized[n] for n in ("status", "flavorid", "resources"))
        )
        moved = act("migrate")
        self.assertEqual({"h1", "h2"}, {resized["host"], moved["host"]})
        back = act("migrate", "--to-host", resized["host"])
        self.assertEqual(resized["host"], back["host"])
        shelved = act("shelve")
        self.assertEqual(("shelved_offloaded", ""), (shelved["status"], shelved["host"]))
        self.assertIn("needs one that is active", self.moorage("instance", "shelve", uuid, status=1))
        unshelved = act("unshelve", "--to-host", "h1")
        self.assertEqual(("active", "h1"), (unshelved["status"], unshelved["host"]))
        refused = self.moorage("instance", "resize", uuid, "--resource", "VCPU=99", status=1)
        self.assertIn("no node has enough VCPU free", refused)
        self.assertIn(
            "must be a positive whole number",
            self.moorage("instance", "resize", uuid, "--resource", "VCPU=-1", status=1),
        )
        self.assertIn(
            "There is no host nowhere", self.moorage("instance", "migrate", uuid, "--to-host", "nowhere", status=1)
        )
        self.moorage("instance", "delete", uuid)
        wait_until(lambda: self.plane.status(uuid) == "gone", "it is gone", SOON)
        self.assertIn(
            f"There is no instance {uuid}", self.moorage("instance", "rebuild", uuid, "--image", "x", status=1)
        )

    def test_a_dead_host_is_evacuated_by_an_operator(self) -> None:
        made = [
            self.shown("instance", "create", "--name", name, "--resource", "VCPU=1", "--force-host", "h1", "--wait")
            for name in ("one", "two")
        ]
        first, second = (each["uuid"] for each in made)
        refused = self.moorage("host", "evacuate", "h1", status=1)
        self.assertIn("Host h1 is not fenced", refused)
        self.assertIn("--forced-down", refused)
        self.assertIn("There is no agent h9", self.moorage("host", "evacuate", "h9", status=1))
        self.assertIn("--fenced needs --reason", self.moorage("host", "evacuate", "h1", "--fenced", status=1))
        self.assertIn("is not declared dead", self.moorage("host", "fence", "h1", "--reason", "off", status=1))
        fenced = ("--fenced", "--reason", "PDU 4 is off")
        for words, said in (
            ((*fenced, "--dry-run"), "so it does not fence the host"),
            ((*fenced, "--to-host", "h1"), "--to-host h1 is the host that is evacuated"),
        ):
            self.assertIn(said, self.moorage("host", "evacuate", "h1", *words, status=1))
        for command in (("evacuate", "h1", "--fenced"), ("fence", "h1")):
            said = self.moorage("host", *command, "--reason", "x" * 256, status=2)
            self.assertIn("a reason has 1 to 255 characters, and this one has 256", said)
        self.plane.stop("h1")
        self.moorage("service", "set", "agent:h1", "--forced-down")
        self.assertIn(f"{first} one: active", self.moorage("host", "evacuate", "h1", "--dry-run"))
        self.assertIs(False, self.shown("service", "set", "agent:h1", "--forced-down")["fenced"])
        self.assertIn("so its host is not off", self.moorage("host", "fence", "h1", "--reason", "off", status=1))
        with self.plane.database.write() as tx:
            tx.execute(
                sa.update(services).where(services.c.host == "h1").values(beat_at=services.c.beat_at - 60_000_000)
            )
            # A build that fails holds nothing and stays where it is.
            tx.execute(sa.update(instances).where(instances.c.uuid == second).values(status="error"))
        with mock.patch.object(Client, "act_on_instance", side_effect=errors.Unavailable("evacuating takes a moment")):
            left = self.moorage("host", "evacuate", "h1", *fenced, status=1)
        self.assertIn("1 of 2 instances are still on host h1", left)
        # What cannot be evacuated is no reason to repeat the command.
        told = self.moorage("host", "evacuate", "h1").splitlines()
        self.assertEqual({f"{first} one: evacuating to host h2", f"{second} two: {_IN_ERROR}"}, set(told))
        self.assertEqual(f"{second} two: {_IN_ERROR}\n", self.moorage("host", "evacuate", "h1"))
        self.plane.wait_status(first, "active")
        self.assertEqual("h2", self.plane.instances.get(first).host)
        again = self.shown("host", "fence", "h1", "--reason", "PDU 4 is off")
        self.assertEqual((True, "PDU 4 is off", 1), tuple(again[n] for n in ("fenced", "fence_reason", "evacuated")))
        self.assertEqual(again["fence_reason"], self.shown("service", "show", "agent:h1")["fence_reason"])
        self.assertEqual(again["uuid"], self.shown("service", "show", again["uuid"])["uuid"])
        self.assertIn("There is no service agent:h9", self.moorage("service", "show", "agent:h9", status=1))
        listed = json.loads(self.moorage("service", "list", "--binary", "agent", "-f", "json"))
        self.assertEqual({"h1": True, "h2": False}, {each["host"]: each["fenced"] for each in listed})
        with self.plane.database.write() as tx:
            tx.execute(sa.delete(instances).where(instances.c.uuid == second))
        self.plane.store.release(second)
        drain = ["node", "drain", "h1-node-0", "--url", self.url, "--auth-type", "none"]
        _, _, drained = in_process(main.main, drain)
        self.assertIn(
            "Node h1-node-0 has no instances, but host h1 has not let go of 1 evacuated or moved ones.", drained
        )
        self.assertEqual(1, self.shown("node", "show", "h1-node-0")["departures"])
        self.moorage("node", "remove", "h1-node-0")
        self.assertIn("There is no node h1-node-0", self.moorage("node", "show", "h1-node-0", status=1))

    def test_an_explanation_as_a_table_and_a_decision_afterwards(self) -> None:
        made = self.shown("instance", "create", "--resource", "VCPU=2", "--wait")
        self.plane.wait_agreement()
        hint = f"different_host={made['uuid']}"
        text = self.moorage(
            "select", "--resource", "VCPU=15", "--hint", hint, "--explain", "--count", "2", "-f", "table"
        )
        for part in ("weight", "capacity: removed", "left", "too little VCPU", made["uuid"]):
            self.assertIn(part, text)
        shown = self.moorage("decision", "show", made["uuid"], "--node", made["node"], "-f", "table")
        self.assertIn("placed", shown)
        self.assertIn(made["host"], shown)
        self.assertIn("knows of no decision", self.moorage("decision", "show", "never-asked", status=1))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """Not the one that they share."""
    return unittest.TestSuite(loader.loadTestsFromTestCase(each) for each in (HttpTests, CommandTests))
