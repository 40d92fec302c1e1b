# SPDX-License-Identifier: Apache-2.0
"""What becomes of members when servers and processes are killed, paused, restarted, wiped; a mix-in for each kind of fault."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
import unittest
from collections.abc import Sequence

from moorage import errors
from moorage.coordination.membership import MembershipState
from moorage.db import Database
from moorage.testing.coordination import SOON, wait_for
from tests import servers
from tests.functional.coordination.nodes import KEYS, SESSION, MemberProcess, Node, create_tables
from tests.pausing import pause


class FaultCase(unittest.TestCase):
    """Subclasses name the server."""

    kind = ""
    server: servers.Server

    def setUp(self) -> None:
        self.start_server()
        self.database = Database(self.make_database(), lock_timeout=30)
        self.addCleanup(self.database.close)
        create_tables(self.database)

    def make_database(self) -> str:
        """Where the ring's row is; returns its URL."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database_url = f"sqlite:///{folder.name}/ring.sqlite"
        return self.database_url

    def start_server(self) -> None:
        servers.require(self.kind)
        self.server = servers.KINDS[self.kind](durable=True)
        self.addCleanup(self.server.stop, quick=True)
        self.server.start()

    @property
    def url(self) -> str:
        return self.server.url

    def nodes(self, count: int) -> list[Node]:
        made = [Node(self, self.url, self.database) for _ in range(count)]
        self.wait_shared(made)
        return made

    def wait_shared(self, nodes: Sequence[Node]) -> None:
        """All keys are owned, each by one, and each node owns some."""

        def shared() -> bool:
            parts = [node.owned() for node in nodes]
            return all(parts) and sorted(key for part in parts for key in part) == sorted(KEYS)

        wait_for(shared, "the ring to be whole")

    def wait_nobody_works(self, nodes: Sequence[Node], since: float) -> None:
        wait_for(lambda: not any(node.owned() for node in nodes), "everybody to stop")
        # Each stopped by its own lease, before the server could have given its place to somebody else.
        self.assertLess(max(node.membership.valid_until for node in nodes), since + SESSION)

    def wait_renewed(self, nodes: Sequence[Node], since: float) -> None:
        """What they know is of after that moment, and all keys are owned."""
        wait_for(
            lambda: all(node.membership.valid_until > since + SESSION / 2 for node in nodes),
            "all to be members still",
        )
        self.wait_shared(nodes)

    def ids(self, nodes: Sequence[Node]) -> list[bytes | None]:
        return [node.membership.member_id for node in nodes]

    def wipe(self) -> None:
        shutil.rmtree(self.server.folder / "data", ignore_errors=True)
        for name in ("appendonlydir", "dump.rdb"):
            path = self.server.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()


class PauseTests(FaultCase):
    """The server stands still."""

    def test_a_server_that_pauses_shorter_than_the_session_costs_nobody_the_membership(self) -> None:
        nodes = self.nodes(2)
        # A machine that stands still itself can make one pause longer than a session, not each of three.
        self.assertTrue(any(self.keeps_ids(nodes) for _ in range(3)))

    def keeps_ids(self, nodes: Sequence[Node]) -> bool:
        before = self.ids(nodes)
        self.server.pause()
        paused = time.monotonic()
        wait_for(lambda: time.monotonic() > paused + SESSION / 4, "a quarter of a session")
        self.server.resume()
        self.wait_renewed(nodes, time.monotonic())
        return self.ids(nodes) == before

    def test_a_server_that_pauses_longer_stops_everybody_in_time_and_all_come_back(self) -> None:
        nodes = self.nodes(2)
        self.server.pause()
        self.wait_nobody_works(nodes, time.monotonic())
        paused = time.monotonic()
        wait_for(lambda: time.monotonic() > paused + SESSION, "the sessions' end")
        self.server.resume()
        self.wait_shared(nodes)


class RestartTests(FaultCase):
    """The server dies and comes back with what it had."""

    def test_a_server_that_is_restarted_at_once_is_worked_with_again(self) -> None:
        nodes = self.nodes(2)
        self.server.kill()
        self.server.restart()
        self.wait_renewed(nodes, time.monotonic())

    def test_a_server_that_is_killed_and_restarted_gets_everybody_back(self) -> None:
        nodes = self.nodes(2)
        self.server.kill()
        self.wait_nobody_works(nodes, time.monotonic())
        self.server.restart()
        self.wait_shared(nodes)


class StartTests(FaultCase):
    """The server is not there."""

    def test_a_server_that_is_down_at_the_start_is_told_of_in_time(self) -> None:
        self.server.kill()
        began = time.monotonic()
        with self.assertRaises(errors.Unavailable) as caught:
            Node(self, self.url, self.database)
        self.assertLess(time.monotonic() - began, SOON)
        self.assertIn(f"127.0.0.1:{self.server.port}", str(caught.exception))
        self.assertNotIn(self.server.password, str(caught.exception))


class WipeTests(FaultCase):
    """The server comes back with nothing."""

    def test_a_server_that_lost_its_data_gets_everybody_back(self) -> None:
        nodes = self.nodes(2)
        before = self.ids(nodes)
        self.server.kill()
        self.wipe()
        self.server.restart()
        wait_for(lambda: not set(before) & set(self.ids(nodes)), "all to join under new ids")
        self.wait_shared(nodes)


class MemberTests(FaultCase):
    """A member dies, sleeps, or goes."""

    #: Whether one that slept is a member again without joining: what it had is over all the same.
    silent_return = False

    def test_a_killed_member_is_gone_after_its_session_and_a_paused_one_comes_back_as_somebody_else(self) -> None:
        (node,) = self.nodes(1)
        killed, paused = (MemberProcess(self, self.url, self.database_url) for _ in range(2))
        # The last one to see a new ring has everything until then.
        wait_for(lambda: killed.ask()["owned"] and paused.ask()["owned"] and node.owned() != KEYS, "three that share")
        before = paused.ask()["member"]
        killed.popen.kill()
        pause(paused.popen.pid, self.database_url)
        wait_for(lambda: node.owned() == KEYS, "the third to have everything")
        paused.send(signal.SIGCONT)
        # Its first word after it woke: it owns nothing until it has joined again.
        first = paused.ask()
        self.assertTrue(first["owned"] == [] or first["member"] != before, first)
        wait_for(lambda: node.owned() != KEYS and paused.ask()["owned"], "both to own something")
        wait_for(lambda: sorted(node.owned() + paused.ask()["owned"]) == sorted(KEYS), "both to share")
        self.assertEqual(paused.ask()["member"] == before, self.silent_return)
        self.assertIs(node.membership.state, MembershipState.CONNECTED)

    def test_a_member_that_leaves_in_order_is_gone_at_once(self) -> None:
        staying, leaving = self.nodes(2)
        member = leaving.membership.member_id
        leaving.stop()
        # No session had to end for it: it is gone when the call is.
        self.assertNotIn(member, staying.membership.view().members)
        self.wait_shared([staying])


class FaultTests(PauseTests, RestartTests, StartTests, WipeTests, MemberTests):
    """All of them, for servers that keep their data."""
