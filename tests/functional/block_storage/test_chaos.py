# SPDX-License-Identifier: Apache-2.0
"""Three block storage services of one cluster that are killed and paused at random while they work; cleanup is automatic.

Seconds here, minutes by ``make soak``; the seed is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import unittest
from collections import Counter
from typing import Any

from moorage import errors
from tests import SOAK, seeded
from tests.forking import Command
from tests.functional.block_storage.planes import SOON, Plane
from tests.servers import wait_until

AGENTS = ("chaos-1", "chaos-2", "chaos-3")
SECONDS = 240.0 if SOAK else 3.0
RESOURCES = 400 if SOAK else 25
FAULTS = 50 if SOAK else 4
#: Seconds that a pause takes at most; after four a service is taken for dead.
PAUSE = 12.0 if SOAK else 8.0
AT_REST = {"available", "error", "error_restoring", "in-use"}
CONF = """
[cleanup]
auto_cleanup_enabled = true
auto_cleanup_checks = 1
unclaimed_timeout = 5
"""


class ChaosTests(unittest.TestCase):
    def test_whatever_is_killed_or_paused_everything_ends_in_a_documented_state(self) -> None:
        chance = seeded()
        print(f"MOORAGE_SEED={os.environ.get('MOORAGE_SEED', '1')}")  # noqa: T201
        plane = Plane(type(self), CONF, agents=1)
        settings = ("block_storage.chunk_delay=0.05", "block_storage.operations=4")
        running: dict[str, Command] = {name: plane.agent(name, *settings, wait=False) for name in AGENTS}
        wait_until(lambda: all(plane.service(name).get("state") == "up" for name in AGENTS), "all are up", SOON)
        paused: dict[str, float] = {}
        asked: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or sum(asked.values()) < RESOURCES or faults["killed"] + faults["paused"] < FAULTS:
            with contextlib.suppress(errors.MoorageError):
                asked[self.ask(plane, chance)] += 1
            for name, until in list(paused.items()):
                if time.monotonic() > until:
                    running[name].send_signal(signal.SIGCONT)
                    del paused[name]
            name = chance.choice(AGENTS)
            if running[name].poll() is not None and name not in paused:
                running[name] = plane.agent(name, *settings, wait=False)
                faults["started again"] += 1
            elif chance.random() < 0.1 and name not in paused:
                if chance.random() < 0.5:
                    running[name].kill()
                    running[name].wait(SOON)
                    faults["killed"] += 1
                else:
                    running[name].send_signal(signal.SIGSTOP)
                    paused[name] = time.monotonic() + chance.uniform(1, PAUSE)
                    faults["paused"] += 1
            time.sleep(0.02)
        for name in paused:
            running[name].send_signal(signal.SIGCONT)
        print(f"chaos: {dict(asked)}, {dict(faults)}")  # noqa: T201
        wait_until(lambda: not plane.workers(), "every operation has ended", SOON * 2)
        for kind in ("volume", "snapshot", "backup"):
            self.assertLessEqual(set(plane.statuses(kind).values()), AT_REST, kind)
        wait_until(lambda: not self.strays(plane), "files of older tokens are collected", SOON)
        lines = list(plane.api.pages("/cleanup/history", "history"))
        done = Counter(
            (line["resource_type"], line["resource_id"], line["token"]) for line in lines if line["outcome"] == "done"
        )
        self.assertEqual([key for key, count in done.items() if count > 1], [], "one finish for each token")
        print(f"history: {dict(Counter(line['outcome'] for line in lines))}")  # noqa: T201

    def ask(self, plane: Plane, chance: Any) -> str:
        """Something that may be refused."""
        volumes = [uuid for uuid, status in plane.statuses("volume").items() if status in AT_REST]
        backups = [uuid for uuid, status in plane.statuses("backup").items() if status == "available"]
        what = chance.choice(("create", "create", "snapshot", "backup", "restore", "upload", "delete"))
        if what == "create" or not volumes:
            plane.volume("POST", "/volumes", {"volume": {"size": 1}})
            return "create"
        volume = chance.choice(volumes)
        if what in ("snapshot", "backup"):
            plane.volume("POST", f"/{what}s", {what: {"volume_id": volume}})
        elif what == "restore" and backups:
            plane.volume("POST", f"/backups/{chance.choice(backups)}/restore", {"restore": {"volume_id": volume}})
        elif what == "upload":
            plane.volume("POST", f"/volumes/{volume}/action", {"os-volume_upload_image": {"image_name": "x"}})
        else:
            plane.volume("DELETE", f"/volumes/{volume}")
        return str(what)

    def strays(self, plane: Plane) -> list[str]:
        """Files of one resource beyond the live one."""
        found: Counter[str] = Counter(file.rpartition("/")[0] for file in plane.files())
        known = {
            f"{kind}/{uuid}"
            for kind in ("volume", "snapshot", "backup")
            for uuid, status in plane.statuses(kind).items()
            if status in ("available", "in-use", "error_restoring")
        }
        images = {name for name in found if name.startswith("image/")}
        return [name for name, count in found.items() if count > 1 or name not in known | images]
