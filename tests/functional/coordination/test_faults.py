# SPDX-License-Identifier: Apache-2.0
"""The faults on each backend: on ZooKeeper in every run, the others in ``make soak``."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Sequence

import sqlalchemy as sa
from typing_extensions import override

import tests
from moorage.services.tables import services
from moorage.testing.coordination import wait_for
from moorage_plugins.coordination.tables import members
from tests import servers
from tests.functional.coordination import fault_tests
from tests.functional.coordination.nodes import Node
from tests.servers.kinds import Zookeeper

_SOAK = unittest.skipUnless(tests.SOAK, "make soak")


class ZookeeperFaultTests(fault_tests.FaultTests):
    """The hard ones in every run; what is milder than those in ``make soak``."""

    kind = "zookeeper"
    test_a_server_that_pauses_shorter_than_the_session_costs_nobody_the_membership = _SOAK(
        fault_tests.PauseTests.test_a_server_that_pauses_shorter_than_the_session_costs_nobody_the_membership
    )
    test_a_server_that_is_restarted_at_once_is_worked_with_again = _SOAK(
        fault_tests.RestartTests.test_a_server_that_is_restarted_at_once_is_worked_with_again
    )
    test_a_server_that_is_killed_and_restarted_gets_everybody_back = _SOAK(
        fault_tests.RestartTests.test_a_server_that_is_killed_and_restarted_gets_everybody_back
    )


@_SOAK
class EtcdFaultTests(fault_tests.FaultTests):
    kind = "etcd"


@_SOAK
class RedisFaultTests(fault_tests.FaultTests):
    kind = "redis"


@_SOAK
class MemcachedFaultTests(fault_tests.FaultTests):
    """It forgets everything whenever it is restarted."""

    kind = "memcached"


@_SOAK
class FileFaultTests(fault_tests.MemberTests):
    """There is no server that could fail. A member's file is old while it sleeps, and new with its next heartbeat."""

    silent_return = True

    @override
    def start_server(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self._url = f"file://{folder.name}"

    @property
    @override
    def url(self) -> str:
        return self._url


@_SOAK
class SqliteFaultTests(fault_tests.MemberTests):
    """Members in the database, which is a file."""

    @override
    def start_server(self) -> None:
        """There is none."""

    @property
    @override
    def url(self) -> str:
        return "database"


@_SOAK
class DatabaseFaultTests(fault_tests.PauseTests, fault_tests.RestartTests, fault_tests.MemberTests):
    """Members, services and the ring's row in one PostgreSQL."""

    kind = "postgresql"

    @override
    def make_database(self) -> str:
        self.database_url = servers.fresh_database(self.server)
        return self.database_url

    @property
    @override
    def url(self) -> str:
        return "database"

    def test_services_that_were_lost_stop_for_good_and_new_ones_take_over(self) -> None:
        """A database that lost its rows: who was in it is nobody any more, and its process ends (see the heartbeat's tests)."""
        nodes = self.nodes(2)
        with self.database.write() as tx:
            tx.execute(sa.delete(members))
            tx.execute(sa.delete(services))
        fresh = [Node(self, self.url, self.database) for _ in range(2)]
        self.wait_shared(fresh)
        self.assertEqual([node.owned() for node in nodes], [[], []])


class EnsembleMember(Zookeeper):
    """One of three."""

    def __init__(self, number: int, ports: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._number = number
        self._ports = ports

    @override
    def prepare(self) -> None:
        super().prepare()
        lines = ["initLimit=20", "syncLimit=4"]
        lines += [
            f"server.{number}={servers.HOST}:{quorum}:{election}"
            for number, (quorum, election) in enumerate(self._ports, start=1)
        ]
        with (self.folder / "zoo.cfg").open("a") as stream:
            stream.write("\n".join(lines) + "\n")
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "data" / "myid").write_text(f"{self._number}\n")

    @override
    def answers(self) -> bool:
        """A member is up when its process is; it serves when there is a quorum."""
        return self.running

    def serves(self) -> bool:
        try:
            return self._talk(b"srvr", b"Mode:")
        except OSError:
            return False


@_SOAK
class EnsembleTests(fault_tests.FaultCase):
    """Three servers of which one dies, and then another."""

    kind = "zookeeper"

    @override
    def start_server(self) -> None:
        servers.require(self.kind)
        ports = [(servers.free_port(), servers.free_port()) for _ in range(3)]
        self.ensemble = [EnsembleMember(number, ports) for number in (1, 2, 3)]
        for each in self.ensemble:
            self.addCleanup(each.stop, quick=True)
            each.start()
        self.server = self.ensemble[0]
        wait_for(lambda: all(each.serves() for each in self.ensemble), "a quorum")

    @property
    @override
    def url(self) -> str:
        return "zookeeper://" + ",".join(f"{servers.HOST}:{each.port}" for each in self.ensemble)

    def test_the_loss_of_one_is_survived_and_the_loss_of_two_stops_all_work_until_one_is_back(self) -> None:
        nodes = [Node(self, self.url, self.database) for _ in range(3)]
        self.wait_shared(nodes)
        self.ensemble[0].kill()
        self.wait_shared(nodes)
        self.ensemble[1].kill()
        wait_for(lambda: not any(node.owned() for node in nodes), "everybody to stop")
        self.ensemble[1].restart()
        self.wait_shared(nodes)
