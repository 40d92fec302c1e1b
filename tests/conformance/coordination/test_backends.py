# SPDX-License-Identifier: Apache-2.0
"""The reference backends on the conformance kit, each against its real server."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import unittest
import uuid

from kazoo.retry import ForceRetryError
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination.interface import BackendTools, CoordinationBackend, NotMember
from moorage.coordination.loading import client_factory
from moorage.coordination.membership import MemberId
from moorage.db import Database
from moorage.services.tables import services
from moorage.testing.coordination import CoordinationBackendTests
from moorage_plugins.coordination.database import DatabaseBackend
from moorage_plugins.coordination.tables import members
from moorage_plugins.coordination.zookeeper import ZooKeeperBackend
from tests import servers
from tests.functional.coordination.nodes import Lives
from tests.functional.db.databases import sqlite_url


class UrlTests(CoordinationBackendTests):
    """Mixed in: ``url`` says all."""

    url: str
    server: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.url = servers.shared(cls.server).url

    @override
    def make_client(self, session_timeout: float) -> CoordinationBackend:
        return client_factory(self.url, clock=SystemClock(), session_timeout=session_timeout, call_timeout=10.0)(
            lambda: None
        )


class ZookeeperTests(UrlTests, unittest.TestCase):
    server = "zookeeper"

    @override
    def end_session(self, client: CoordinationBackend) -> None:
        """Kazoo keeps a session by itself, so its connection is cut, and stays cut."""
        assert isinstance(client, ZooKeeperBackend)
        connection = client._client._coord._connection
        dead = threading.Event()
        connection._connect_attempt = lambda *_: dead.wait()
        connection._socket.shutdown(socket.SHUT_RDWR)
        self.addCleanup(dead.set)
        # Afterwards it connects again and can end: until then its threads would go on for the rest of the run.
        self.addCleanup(delattr, connection, "_connect_attempt")

    def test_pauses_between_tries_to_connect_stay_as_they_are(self) -> None:
        """Kazoo's grow or shrink at every try unless it is told otherwise."""
        made = self.make_client(self.session_timeout)
        assert isinstance(made, ZooKeeperBackend)
        retry, tries = made._made(b"moorage.x")._coord._conn_retry.copy(), iter(range(1000))
        pauses: list[float] = []
        retry.sleep_func, retry.interrupt = pauses.append, None

        def connect() -> int:
            if (number := next(tries)) < 999:
                raise ForceRetryError
            return number

        self.assertEqual(999, retry(connect))
        self.assertEqual([0.1] * 999, pauses)


class EtcdTests(UrlTests, unittest.TestCase):
    server = "etcd"


class RedisTests(UrlTests, unittest.TestCase):
    server = "redis"


class MemcachedTests(UrlTests, unittest.TestCase):
    server = "memcached"
    # It counts whole seconds, may be one early, and joining takes long when many do.
    session_timeout = 4.0


class UrlOptionTests(unittest.TestCase):
    def test_what_can_never_work_is_wrong_and_not_away_and_passwords_are_not_told(self) -> None:
        """An engine would wait for ever for a server that is away."""
        for url, reason in (
            ("redis://me:hidden@127.0.0.1:99999", "no number from 0 to 65535"),
            ("zookeeper://127.0.0.1:2181,127.0.0.1:hidden", "no number from 0 to 65535"),
            ("zookeeper://[::1", "cannot be read"),
            ("etcd3+http://me:hid/hidden@127.0.0.1:2379", "cannot be read"),
            ("memcached://127.0.0.1:hidden", "cannot be read"),
            ("redis://127.0.0.1?db=hidden", "db is no number"),
            ("redis://:hidden@127.0.0.1?lock_timeout=x", "ValueError"),
            ("zookeeper://127.0.0.1?handler=hidden-handler", "ValueError"),
        ):
            with self.subTest(url=url), self.assertRaisesRegex(errors.ConfigError, reason) as raised:
                client_factory(url, clock=SystemClock())
            if "hidden-" not in url:
                self.assertNotIn("hid", raised.exception.message)

    def test_what_a_driver_takes_is_taken(self) -> None:
        for url in (
            "redis://me:secret@127.0.0.1:6379?db=3&socket_timeout=2",
            "redis://[::1]:6379",
            "redis:///run/redis.sock",
            "zookeeper://10.0.0.1:2181,10.0.0.2,[::1]:2181",
            "etcd3+https://127.0.0.1:2379?api_version=v3",
            "memcached://127.0.0.1",
            "file:///tmp",
        ):
            with self.subTest(url=url):
                client_factory(url, clock=SystemClock())

    def test_servers_that_a_url_lists_reach_the_driver(self) -> None:
        made = client_factory("zookeeper://10.0.0.1:1?hosts=10.0.0.2:2&hosts=10.0.0.3:3", clock=SystemClock())(
            lambda: None
        )
        assert isinstance(made, ZooKeeperBackend)
        self.assertEqual(
            sorted(made._made(b"moorage.x")._coord.hosts), [("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)]
        )

    def test_a_url_that_shortens_sessions_behind_the_members_back_is_refused(self) -> None:
        for url in ("redis://127.0.0.1:1?membership_timeout=2", "zookeeper://127.0.0.1:1?timeout=2"):
            with self.assertRaisesRegex(errors.ConfigError, r"\[coordination\] session_timeout"):
                client_factory(url, clock=SystemClock())

    def test_a_server_without_groups_and_a_url_without_a_server_are_refused(self) -> None:
        for url, reason in (
            ("mysql://root@127.0.0.1/x", "has locks but no groups"),
            ("zookeeper://", "names no server"),
        ):
            with self.assertRaisesRegex(errors.ConfigError, reason):
                client_factory(url, clock=SystemClock())


class FileTests(UrlTests, unittest.TestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        folder = tempfile.mkdtemp(prefix="moorage-test-")
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        cls.url = f"file://{folder}"


class MemoryTests(UrlTests, unittest.TestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        cls.url = f"memory://{uuid.uuid4()}"


class DatabaseTests(CoordinationBackendTests, unittest.TestCase):
    server: str | None = None
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        url = sqlite_url(cls) if cls.server is None else servers.fresh_database(servers.shared(cls.server))
        cls.database = Database(url, lock_timeout=30)
        cls.addClassCleanup(cls.database.close)
        with cls.database.write() as tx:
            services.metadata.create_all(tx, tables=[services])
            members.metadata.create_all(tx, tables=[members])

    @override
    def make_client(self, session_timeout: float) -> CoordinationBackend:
        return self.client_of(Lives.of(self.database, session_timeout), session_timeout)

    def client_of(self, lives: Lives, session_timeout: float) -> CoordinationBackend:
        clock = SystemClock()
        tools = BackendTools(
            conf=None,
            url="",
            clock=clock,
            session_timeout=session_timeout,
            connect_timeout=10,
            call_timeout=10,
            database=self.database,
            services=lives,
        )
        return DatabaseBackend(tools)

    def test_a_stay_that_could_not_be_left_ends_with_the_next_one_and_other_members_of_the_service_stay(self) -> None:
        """Its service lives on, so nothing else would ever end it, and nobody would do its share."""
        lives, group = Lives.of(self.database, 60.0), uuid.uuid4().hex
        lost, again, neighbour = (self.client_of(lives, 60.0) for _ in range(3))
        ids = [bytes(MemberId(lives.uuid, lives.epoch, worker, stay)) for worker, stay in ((1, 1), (1, 2), (11, 1))]
        for client, member_id in zip((lost, again, neighbour), ids, strict=True):
            client.start()
            client.join(group, member_id)
            client.renew()
        self.assertEqual(neighbour.members().members, frozenset(ids[1:]))
        with self.assertRaises(NotMember):
            lost.renew()


class PostgresqlTests(DatabaseTests):
    server = "postgresql"


class MariadbTests(DatabaseTests):
    server = "mariadb"
