# SPDX-License-Identifier: Apache-2.0
"""What an engine logs while ZooKeeper is away: one line, then nothing until it is a member again."""

from __future__ import annotations

import logging
import time
import unittest

from moorage.coordination.facade import Coordinator
from moorage.testing.coordination import wait_for
from tests import servers
from tests.servers.kinds import Zookeeper

#: Seconds without a server: longer than the session, and than it takes to replace the client.
AWAY = 14.0


class _Records(logging.Handler):
    """What coordination and the client of ZooKeeper log; threads that other tests have left may log too."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("moorage.coordination", "moorage_plugins.coordination", "tooz", "kazoo")):
            self.lines.append((record.levelname, f"{record.name}: {record.getMessage()}"))


class OutageLogTests(unittest.TestCase):
    def test_an_outage_of_zookeeper_is_one_line_and_its_end_another(self) -> None:
        servers.require("zookeeper")
        server = Zookeeper().start()
        self.addCleanup(server.stop)
        coordinator = Coordinator(server.url, heartbeat_timeout=0.5, session_timeout=6.0)
        self.addCleanup(coordinator.stop)
        coordinator.join_group("engines")
        wait_for(lambda: len(coordinator.get_members("engines")) == 1, "the member")
        root, records = logging.getLogger(), _Records()
        level = root.level
        root.addHandler(records)
        root.setLevel(logging.INFO)
        self.addCleanup(root.setLevel, level)
        self.addCleanup(root.removeHandler, records)
        server.kill()
        time.sleep(AWAY)
        self.assertEqual(["WARNING"], [name for name, _ in records.lines], records.lines[:10])
        self.assertIn("Membership in engines is suspended", records.lines[0][1])
        records.lines.clear()
        server.restart()
        wait_for(lambda: len(coordinator.get_members("engines")) == 1, "the member")
        wait_for(lambda: bool(records.lines), "the line")
        self.assertEqual(
            [("INFO", True)],
            [(name, "Member of engines as" in line) for name, line in records.lines],
            records.lines[:6],
        )
