# SPDX-License-Identifier: Apache-2.0
"""The server fixtures themselves: what they start answers, and nothing of it is left when they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import unittest
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import psutil
import sqlalchemy

from tests import servers


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((servers.HOST, port)) == 0


# A mix-in is no test of its own; only the type checker takes it for one.
if TYPE_CHECKING:
    MixIn = unittest.TestCase
else:
    MixIn = object


class ServerLife(MixIn):
    """A server starts, serves, survives a kill with its data, and leaves nothing."""

    kind: str

    def setUp(self):
        servers.require(self.kind)

    def test_it_answers_comes_back_after_a_kill_and_leaves_nothing(self):
        with servers.KINDS[self.kind]() as server:
            self.assertTrue(server.answers())
            pids = server.pids()
            self.assertIn(server.pid, pids)
            if server.USER is not None and os.geteuid() == 0:
                self.assertEqual(server.USER, psutil.Process(server.pid).username())

            server.kill(signal.SIGKILL)
            self.assertFalse(server.running)
            self.assertFalse(_listening(server.port))
            port = server.port
            server.restart()
            self.assertEqual(port, server.port)
            self.assertTrue(server.answers())
            pids |= server.pids()
        self.assertFalse(_listening(port))
        self.assertEqual([], [pid for pid in pids if psutil.pid_exists(pid)])
        self.assertFalse(server.folder.exists())
        server.stop()


class DatabaseLife(ServerLife):
    def test_what_was_committed_is_there_after_a_kill(self):
        """Else what a test sees after it is no fault of what it tests."""
        with servers.KINDS[self.kind]() as server:
            url = servers.fresh_database(server)
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
            with engine.begin() as connection:
                connection.execute(sqlalchemy.text("CREATE TABLE boats (name INTEGER)"))
            connection = engine.connect()
            for name in range(50):
                connection.execute(sqlalchemy.text(f"INSERT INTO boats VALUES ({name})"))
                connection.commit()
            server.kill(signal.SIGKILL)
            connection.invalidate()
            server.restart()
            with engine.connect() as again:
                self.assertEqual(50, again.execute(sqlalchemy.text("SELECT count(*) FROM boats")).scalar_one())

    def test_fresh_databases_are_empty_and_apart(self):
        server = servers.shared(self.kind)
        self.assertIs(server, servers.shared(self.kind))
        first, second = (sqlalchemy.create_engine(servers.fresh_database(server)) for _ in range(2))
        self.addCleanup(first.dispose)
        self.addCleanup(second.dispose)
        with first.begin() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE boats (name VARCHAR(20))"))
        self.assertEqual(["boats"], sqlalchemy.inspect(first).get_table_names())
        self.assertEqual([], sqlalchemy.inspect(second).get_table_names())


class TestPostgresql(DatabaseLife, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(DatabaseLife, unittest.TestCase):
    kind = "mariadb"


class TestRabbitmq(ServerLife, unittest.TestCase):
    kind = "rabbitmq"


class TestZookeeper(ServerLife, unittest.TestCase):
    kind = "zookeeper"


class TestEtcd(ServerLife, unittest.TestCase):
    kind = "etcd"


class TestRedis(ServerLife, unittest.TestCase):
    kind = "redis"

    def test_a_paused_server_keeps_connections_and_answers_when_resumed(self):
        with servers.redis() as server, socket.create_connection((server.host, server.port), timeout=60) as client:
            server.pause()
            client.settimeout(0.3)
            client.sendall(f"AUTH {server.password}\r\n".encode())
            with self.assertRaises(TimeoutError):
                client.recv(100)
            server.resume()
            client.settimeout(60)
            self.assertEqual(b"+OK\r\n", client.recv(100))

    def test_a_killed_test_process_takes_its_server_with_it(self):
        code = (
            "import sys; from tests import servers; s = servers.redis().start(); "
            "print(s.pid, s.folder, flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            pid, folder = process.stdout.readline().split()
            process.kill()
        servers.wait_until(lambda: not psutil.pid_exists(int(pid)), "the server ends with the process that started it")
        servers.wait_until(lambda: not Path(folder).exists(), "its folder is removed")


class TestRedfish(ServerLife, unittest.TestCase):
    kind = "redfish"

    def test_machines_survive_a_kill_of_their_bmc(self):
        with servers.redfish() as server:
            machine = next(iter(server.machines()))
            server.change(machine, power_state="On")
            server.kill()
            server.restart()
            self.assertEqual(("On", 1), tuple(server.machines()[machine][each] for each in ("power_state", "boots")))


class TestLibvirt(ServerLife, unittest.TestCase):
    kind = "libvirt"


class TestMemcached(ServerLife, unittest.TestCase):
    kind = "memcached"


class TestRequirements(unittest.TestCase):
    def test_a_missing_server_skips_and_says_what_is_missing(self):
        with (
            mock.patch.dict(os.environ, {"PATH": "/nonexistent", "MOORAGE_REQUIRE_SERVERS": "0"}),
            self.assertRaisesRegex(unittest.SkipTest, "memcached needs memcached; see bindep.txt"),
        ):
            servers.require("memcached")

    def test_a_missing_server_that_is_required_fails(self):
        with (
            mock.patch.dict(os.environ, {"PATH": "/nonexistent", "MOORAGE_REQUIRE_SERVERS": "1"}),
            self.assertRaisesRegex(AssertionError, "memcached needs memcached"),
        ):
            servers.require("memcached")

    def test_a_missing_program_skips_or_fails_alike(self):
        for required, error in (("0", unittest.SkipTest), ("1", AssertionError)):
            with (
                mock.patch.dict(os.environ, {"PATH": "/nonexistent", "MOORAGE_REQUIRE_SERVERS": required}),
                self.assertRaisesRegex(error, "no-such-program is not installed; see bindep.txt"),
            ):
                servers.program("no-such-program")
        self.assertTrue(os.access(servers.program("sh"), os.X_OK))

    def test_a_url_in_the_environment_takes_the_place_of_the_programs(self):
        url = "memcached://192.0.2.1:11211"
        given = {"PATH": "/nonexistent", "MOORAGE_TEST_MEMCACHED_URL": url}
        # Other tests of this process may share a server of their own already.
        with mock.patch.dict(os.environ, given), mock.patch.dict(servers._shared, clear=True):
            server = servers.shared("memcached")
            self.assertEqual((url, "192.0.2.1", 11211), (server.url, server.host, server.port))
            with self.assertRaisesRegex(unittest.SkipTest, "not ours to stop"):
                server.kill()

    def test_a_server_that_cannot_start_says_why(self):
        class Broken(servers.redis):
            def prepare(self):
                self._write("redis.conf", "no-such-setting 1\n")

        servers.require("redis")
        with self.assertRaisesRegex(servers.StartError, "no-such-setting"):
            Broken().start()
