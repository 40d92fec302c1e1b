# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests: private ones, on free ports of the loopback interface, in folders of their own.

``with postgresql() as server:`` starts one and ends it; ``shared("postgresql")`` is one for the whole test process, ended with
it. Call ``require(name)`` first: it skips the test, with the reason, where the programs are missing, and fails it instead when
``MOORAGE_REQUIRE_SERVERS=1``. ``MOORAGE_TEST_POSTGRESQL_URL`` (and so on for each name) gives ``shared`` a server that runs
already; such a server cannot be killed, paused or restarted, and a test that tries is skipped.

Every start has a guard beside it: a shell that waits for the test process to end, however it ends, and then ends the server
and removes its folder. So a killed test run leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
import unittest
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import sqlalchemy
from typing_extensions import override

from tests.servers.base import HOST, Server, StartError, free_port, wait_until
from tests.servers.kinds import Etcd, Libvirt, Mariadb, Memcached, Postgresql, Rabbitmq, Redfish, Redis, Zookeeper

__all__ = [
    "HOST",
    "KINDS",
    "Server",
    "StartError",
    "drop_database",
    "etcd",
    "forget",
    "free_port",
    "fresh_database",
    "libvirt",
    "mariadb",
    "memcached",
    "missing",
    "postgresql",
    "program",
    "rabbitmq",
    "redfish",
    "redis",
    "refuse",
    "require",
    "shared",
    "wait_until",
    "zookeeper",
]


class External(Server):
    """A server that ran before the tests, named by its URL in the environment; it can only be used."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__()
        parts = urlsplit(url)
        self.name, self.host, self.port = name, parts.hostname or HOST, parts.port or 0
        self._url = url

    @classmethod
    @override
    def programs(cls) -> Mapping[str, str | None]:
        return {}

    @property
    @override
    def url(self) -> str:
        return self._url

    @override
    def prepare(self) -> None:
        """Somebody else did."""

    @override
    def commands(self) -> Sequence[Sequence[str]]:
        return []

    @override
    def answers(self) -> bool:
        return True

    @property
    @override
    def running(self) -> bool:
        return True

    @override
    def start(self) -> Self:
        return self

    @override
    def stop(self, *, quick: bool = False) -> None:
        pass

    def _not_ours(self) -> unittest.SkipTest:
        return unittest.SkipTest(f"the {self.name} server of {_variable(self.name)} is not ours to stop")

    @override
    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        raise self._not_ours()

    @override
    def restart(self) -> None:
        raise self._not_ours()

    @override
    def pause(self) -> None:
        raise self._not_ours()

    @override
    def resume(self) -> None:
        raise self._not_ours()


postgresql = Postgresql
mariadb = Mariadb
rabbitmq = Rabbitmq
zookeeper = Zookeeper
etcd = Etcd
libvirt = Libvirt
redfish = Redfish
redis = Redis
memcached = Memcached

KINDS: Mapping[str, type[Server]] = {
    kind.NAME: kind for kind in (Postgresql, Mariadb, Rabbitmq, Zookeeper, Etcd, Redis, Memcached, Redfish, Libvirt)
}

_shared: dict[str, Server] = {}
_lock = threading.Lock()


def _variable(name: str) -> str:
    return f"MOORAGE_TEST_{name.upper()}_URL"


def missing(name: str) -> str:
    """Why the server cannot be started here, or an empty string."""
    absent = [program for program, path in KINDS[name].programs().items() if path is None]
    return f"{name} needs {', '.join(absent)}; see bindep.txt" if absent else ""


def require(name: str) -> None:
    """Skip the test where the server is missing; with ``MOORAGE_REQUIRE_SERVERS=1`` fail it.

    :raises unittest.SkipTest: or AssertionError; both say what is missing.
    """
    if not os.environ.get(_variable(name)):
        refuse(missing(name))


def program(name: str) -> str:
    """The path of a program that a test needs beside servers; skips or fails as ``require`` does.

    Those that come with Python packages are beside the interpreter.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        refuse(f"{name} is not installed; see bindep.txt")
    return str(found)


def refuse(reason: str) -> None:
    """Skip the test for that reason, or fail it with ``MOORAGE_REQUIRE_SERVERS=1``; without a reason do nothing."""
    if reason and os.environ.get("MOORAGE_REQUIRE_SERVERS", "") not in {"", "0"}:
        raise AssertionError(f"MOORAGE_REQUIRE_SERVERS is set, but {reason}")
    if reason:
        raise unittest.SkipTest(reason)


def shared(name: str) -> Server:
    """The server that all tests of this process use; started with the first call. Calls ``require`` itself."""
    require(name)
    with _lock:
        server = _shared.get(name)
        if server is None or not server.running:
            url = os.environ.get(_variable(name))
            server = External(name, url) if url else KINDS[name]()
            _shared[name] = server.start()
            atexit.register(_stop_in, os.getpid(), server)
        return server


def forget(name: str) -> None:
    """End the shared server, if there is one; the next call of ``shared`` looks again."""
    with _lock:
        server = _shared.pop(name, None)
    if server is not None:
        server.stop(quick=True)


def _stop_in(owner: int, server: Server) -> None:
    """End the server with its process, not with a forked child of it."""
    if os.getpid() == owner:
        server.stop(quick=True)


@contextlib.contextmanager
def _administration(server: Server) -> Iterator[sqlalchemy.Connection]:
    engine = sqlalchemy.create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        yield connection


def fresh_database(server: Server) -> str:
    """Create an empty database on a PostgreSQL or MariaDB server; the result is its SQLAlchemy URL."""
    name = f"moorage_{secrets.token_hex(6)}"
    with _administration(server) as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
    if isinstance(server, External):  # ours goes with its folder; this one stays
        atexit.register(drop_database, server, name)
    return sqlalchemy.make_url(server.url).set(database=name).render_as_string(hide_password=False)


def drop_database(server: Server, name: str) -> None:
    """Remove a database of ``fresh_database``."""
    with _administration(server) as connection:
        connection.execute(sqlalchemy.text(f"DROP DATABASE IF EXISTS {name}"))
