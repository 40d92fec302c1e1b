# SPDX-License-Identifier: Apache-2.0
"""The reference backends on the conformance kit, each against its real server."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
import unittest
import uuid

from typing_extensions import override

from moorage.clock import SystemClock
from moorage.coordination.interface import BackendTools, CoordinationBackend
from moorage.coordination.loading import client_factory
from moorage.db import Database
from moorage.services.heartbeat import LivenessObserver
from moorage.services.interface import ServiceIdentity
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage.testing.coordination import CoordinationBackendTests
from moorage_plugins.coordination.database import DatabaseBackend
from moorage_plugins.coordination.tables import members
from moorage_plugins.coordination.zookeeper import ZooKeeperBackend
from tests import servers
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


class EtcdTests(UrlTests, unittest.TestCase):
    server = "etcd"


class RedisTests(UrlTests, unittest.TestCase):
    server = "redis"


class MemcachedTests(UrlTests, unittest.TestCase):
    server = "memcached"
    # It counts whole seconds, may be one early, and joining takes long when many do.
    session_timeout = 4.0


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


class Lives:
    """A service that beats when its member renews, so that each member of the kit is a service of its own."""

    def __init__(self, registry: ServiceRegistry, identity: ServiceIdentity, down_time: float) -> None:
        self._registry = registry
        self.identity = identity
        self._down_time = down_time
        self._observer = LivenessObserver(SystemClock(), down_time)
        self._good_from = time.monotonic()

    @property
    def uuid(self) -> str:
        return self.identity.uuid

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    def certain_until(self) -> float:
        began = time.monotonic()
        if self._registry.beat(self.identity):
            self._good_from = began
        return self._good_from + 0.9 * self._down_time

    def living(self) -> frozenset[tuple[str, int]]:
        rows = self._registry.list()
        up = self._observer.observe(rows)
        return frozenset((row.uuid, row.epoch) for row in rows if up[row.uuid])


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
        clock = SystemClock()
        registry = ServiceRegistry(self.database, clock)
        lives = Lives(registry, registry.enlist("engine", uuid.uuid4().hex, rpc_version="1.0"), session_timeout)
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


class PostgresqlTests(DatabaseTests):
    server = "postgresql"


class MariadbTests(DatabaseTests):
    server = "mariadb"
