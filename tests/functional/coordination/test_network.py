# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut, sessions that die by the thousand, clocks that jump, members that come and go; on a real ZooKeeper.

One way of cutting and a little coming and going are in every run, the rest in ``make soak``.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
import unittest
import uuid
from collections.abc import Sequence
from pathlib import Path

from kazoo.protocol.serialization import Connect, Create
from kazoo.security import OPEN_ACL_UNSAFE

import tests
from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination.loading import client_factory
from moorage.coordination.membership import MemberId
from moorage.coordination.ring_ledger import SqlRingLedger
from moorage.coordination.ring_manager import ring_of
from moorage.testing.coordination import SOON, wait_for
from tests import servers
from tests.functional.coordination import fault_tests
from tests.functional.coordination.nodes import GROUP, KEYS, SESSION, MemberProcess, Node
from tests.servers.base import newest
from tests.servers.proxy import Valve

#: Where the library is that fakes a process's clock.
_FAKETIME = "/usr/lib/*-linux-gnu/faketime/libfaketime.so.1"
_SESSIONS = 1000
_CHURN = 600.0 if tests.SOAK else 3.0
_SOAK = unittest.skipUnless(tests.SOAK, "make soak")


class Watch:
    """Looks all the time whether two own one object, and never takes two moments for one.

    The second node is asked before and after the first: what it owned both times under one ring, it owned in between.
    """

    def __init__(self, test: unittest.TestCase, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._stop = threading.Event()
        self.looks = 0
        self.overlaps: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        test.addCleanup(self.end)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            for one, other in itertools.permutations(self._nodes, 2):
                before, between, after = _snapshot(other), _snapshot(one), _snapshot(other)
                if before[0] == after[0]:
                    self.looks += 1
                    both = before[1] & between[1] & after[1]
                    if both:
                        self.overlaps.append(f"{sorted(both)[0]} under rings {between[0]} and {before[0]}")


def _snapshot(node: Node) -> tuple[object, frozenset[str]]:
    found = node.keeper.current()
    return (None, frozenset()) if found is None else ((found.token, found.me), frozenset(found.subset(KEYS)))


class PartitionTests(fault_tests.FaultCase):
    """One member's own way to the server is cut; the others' is not."""

    kind = "zookeeper"

    def pair(self, *, drain: bool = True) -> tuple[Valve, Node, Node, Watch]:
        """A member behind a network of its own, and another one."""
        valve = Valve(servers.HOST, self.server.port)
        self.addCleanup(valve.close)
        far = Node(self, f"zookeeper://{servers.HOST}:{valve.port}", self.database, drain=drain)
        near = Node(self, self.url, self.database, drain=drain)
        self.wait_shared([far, near])
        return valve, far, near, Watch(self, [far, near])

    def check_cut(self, *, requests: bool, replies: bool) -> None:
        valve, far, near, watch = self.pair()
        before = far.membership.member_id
        valve.cut(requests=requests, replies=replies)
        wait_for(lambda: near.owned() == KEYS, "the one that is left to have everything")
        self.assertEqual(far.owned(), [])
        valve.heal()
        self.wait_shared([far, near])
        self.assertNotEqual(far.membership.member_id, before)
        watch.end()
        self.assertEqual(watch.overlaps, [])
        self.assertGreater(watch.looks, 100)

    def test_a_member_that_is_cut_off_stops_before_others_take_over(self) -> None:
        self.check_cut(requests=True, replies=True)

    @_SOAK
    def test_a_member_that_hears_and_is_not_heard_stops_before_others_take_over(self) -> None:
        self.check_cut(requests=True, replies=False)

    @_SOAK
    def test_a_member_that_is_heard_and_does_not_hear_stops_and_others_take_over(self) -> None:
        """The server believes that it lives, since it hears it: until the client is replaced, nobody has its objects."""
        self.check_cut(requests=False, replies=True)


class LateConnectionTests(fault_tests.FaultCase):
    kind = "zookeeper"

    def test_a_client_that_was_given_up_leaves_no_connection_behind_when_the_server_wakes(self) -> None:
        # Others in this process may have clients, too.
        before = set(threading.enumerate())
        client = client_factory(self.url, clock=SystemClock(), connect_timeout=0.5)(lambda: None)
        self.server.pause()
        with self.assertRaises(errors.Unavailable):
            client.start()
        client.close()
        self.server.resume()
        threads = [each for each in set(threading.enumerate()) - before if each.name == "tooz-zookeeper"]
        wait_for(lambda: not any(each.is_alive() for each in threads), "the client to end")
        # The one that asks is a connection too.
        wait_for(lambda: self._connections() == 1, "its connection to end")

    def _connections(self) -> int:
        with socket.create_connection((servers.HOST, self.server.port), timeout=SOON) as wire:
            wire.sendall(b"cons")
            said = b"".join(iter(lambda: wire.recv(65536), b""))
        return said.count(b"/127.0.0.1:")


@_SOAK
class StampedeTests(fault_tests.FaultCase):
    """Very many sessions end at one moment."""

    kind = "zookeeper"

    def test_those_who_stay_keep_their_sessions_when_a_thousand_others_die_at_once(self) -> None:
        nodes = self.nodes(2)
        before = self.ids(nodes)
        ledger = SqlRingLedger(self.database)
        crowd: list[Session] = []
        done = threading.Event()

        def keep() -> None:
            while not done.wait(1.0):
                for each in list(crowd):
                    each.ping()

        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        with contextlib.ExitStack() as stack:
            stack.callback(keeper.join)
            stack.callback(done.set)
            while len(crowd) < _SESSIONS:
                crowd.append(Session(self.server.port))

            def all_on_ring() -> bool:
                row, _ = ledger.read(GROUP)
                return row is not None and {each.member for each in crowd} <= set(row.members)

            wait_for(all_on_ring, "all of them to be on the ring")
        for each in crowd:
            each.close()
        # The connections are closed, and no session was: they end together.
        self.wait_shared(nodes)
        self.assertEqual(self.ids(nodes), before)


class Session:
    """A session with a member in it, of a client that costs no thread: what goes over the wire is ZooKeeper's own."""

    #: The longest that the server gives.
    TIMEOUT = 10_000
    PING = struct.pack("!ii", -2, 11)

    def __init__(self, port: int) -> None:
        self.member = bytes(MemberId(uuid.uuid4().hex, 1))
        self._wire = socket.create_connection((servers.HOST, port), timeout=SOON)
        self._send(Connect(0, 0, self.TIMEOUT, 0, bytes(16), False).serialize())
        self._receive()
        made = Create(f"/tooz/{GROUP}/{self.member.decode()}", b"\x80", OPEN_ACL_UNSAFE, 1)
        self._send(struct.pack("!ii", 1, made.type) + made.serialize())
        _, _, error = struct.unpack("!iqi", self._receive()[:16])
        assert error == 0, error

    def close(self) -> None:
        """Gone, without a word to the server."""
        self._wire.close()

    def ping(self) -> None:
        """Keep it; the answer is of no interest."""
        self._send(self.PING)

    def _send(self, message: bytes) -> None:
        self._wire.sendall(struct.pack("!i", len(message)) + message)

    def _receive(self) -> bytes:
        (length,) = struct.unpack("!i", _exactly(self._wire, 4))
        return _exactly(self._wire, length)


def _exactly(wire: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = wire.recv(count - len(found))
        assert piece, "the server has closed the connection"
        found += piece
    return found


@_SOAK
class ClockTests(fault_tests.FaultCase):
    """A machine's time of day is changed under a running member."""

    kind = "zookeeper"

    def test_a_clock_that_jumps_or_races_costs_nobody_the_membership_and_nobody_takes_over(self) -> None:
        library = newest(_FAKETIME)
        servers.refuse("" if library else "libfaketime is missing; see bindep.txt")
        assert library is not None
        folder = Path(self.server.folder)
        told = folder / "time"
        told.write_text("+0\n")
        (node,) = self.nodes(1)
        # The time of day alone: leases are on the monotonic clock, which nobody can set.
        fake = {
            "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(told), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
        other = MemberProcess(self, self.url, self.database_url, fake)
        self.wait_both(node, other)
        before = node.membership.member_id, other.ask()["member"]
        for what in ("+3600\n", "-3600\n", "+0 x10\n"):
            with self.subTest(time=what.strip()):
                told.write_text(what)
                wait_for(lambda: abs(other.ask()["time"] - time.time()) > 30, "the clock to be wrong")
                began = time.monotonic()
                while time.monotonic() < began + 1.5 * SESSION:
                    self.assertFalse(set(node.owned()) & set(other.ask()["owned"]))
                    time.sleep(0.05)
                self.wait_both(node, other)
                self.assertEqual((node.membership.member_id, other.ask()["member"]), before)

    def wait_both(self, node: Node, other: MemberProcess) -> None:
        wait_for(lambda: sorted(node.owned() + other.ask()["owned"]) == sorted(KEYS), "both to share")


class ChurnTests(fault_tests.FaultCase):
    """Members join and leave every half second."""

    kind = "zookeeper"
    #: So many that the mean can be judged.
    many = [f"key-{number}" for number in range(5000)]

    def test_no_change_moves_more_than_twice_what_it_must_and_all_is_owned_when_it_is_quiet(self) -> None:
        nodes = self.nodes(3)
        ledger = SqlRingLedger(self.database)
        tokens: list[int] = []
        #: Of each change from one ring to the next one: keys that moved, and keys that had to.
        changes: list[tuple[int, float]] = []
        stop = threading.Event()

        def watch() -> None:
            before: dict[str, bytes] = {}
            while not stop.wait(0.02):
                row, _ = ledger.read(GROUP)
                if row is None or row.token in tokens[-1:]:
                    continue
                ring = ring_of(row)
                owners = dict(zip(self.many, ring.owners(self.many), strict=True))
                if [row.token - 1] == tokens[-1:]:
                    changes.append(self.movement(before, owners))
                tokens.append(row.token)
                before = owners

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        self.addCleanup(watcher.join)
        self.addCleanup(stop.set)
        end = time.monotonic() + _CHURN
        # On a slow machine one visitor may take all that time.
        while time.monotonic() < end or len(tokens) <= 4:
            visitor = Node(self, self.url, self.database)
            wait_for(visitor.owned, "it to take part")
            visitor.stop()
        self.wait_shared(nodes)
        stop.set()
        watcher.join()
        self.assertGreater(len(tokens), 4)
        self.assertEqual([], [(moved, least) for moved, least in changes if moved > 2 * least])

    def movement(self, before: dict[str, bytes], after: dict[str, bytes]) -> tuple[int, float]:
        """How many keys have another owner, and how many must have one."""
        members = [set(each.values()) for each in (before, after)]
        changed = len(members[0] ^ members[1])
        return sum(before[key] != after[key] for key in self.many), len(self.many) * changed / max(map(len, members))
