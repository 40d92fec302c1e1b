# SPDX-License-Identifier: Apache-2.0
"""URLs, drivers, file systems, options."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import unittest
from unittest import mock

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.db import Database, engines, options, sqlite


class UrlTest(unittest.TestCase):
    """``[database] connection``."""

    def test_a_url_without_a_driver_gets_the_one_of_the_extra(self) -> None:
        found = {
            text: engines.parse(f"{text}://u:p@h/d").drivername
            for text in ("postgresql", "postgres", "mysql", "mariadb")
        }
        self.assertEqual(
            {
                "postgresql": "postgresql+psycopg2",
                "postgres": "postgresql+psycopg2",
                "mysql": "mysql+pymysql",
                "mariadb": "mysql+pymysql",
            },
            found,
        )

    def test_a_driver_that_was_chosen_is_kept(self) -> None:
        self.assertEqual("postgresql+psycopg", engines.parse("postgresql+psycopg://u:p@h/d").drivername)

    def test_parameters_of_the_url_win(self) -> None:
        url = engines.parse("mysql://u:p@h/d?charset=utf8mb3&connect_timeout=3")
        self.assertEqual({"charset": "utf8mb3", "connect_timeout": "3"}, dict(url.query))

    def test_a_postgresql_server_that_vanishes_is_given_up(self) -> None:
        url = engines.parse("postgresql://u:p@h/d?tcp_user_timeout=5000")
        self.assertEqual(("5000", "30"), (url.query["tcp_user_timeout"], url.query["keepalives_idle"]))

    def test_what_cannot_be_used_is_refused_with_the_reason(self) -> None:
        for text, reason in (
            ("sqlite://", "in memory"),
            ("sqlite:///:memory:", "in memory"),
            ("oracle://u:p@h/d", "database oracle"),
            ("nonsense", "not a database URL"),
        ):
            with self.subTest(text), self.assertRaisesRegex(errors.ConfigError, reason):
                Database(text)

    def test_a_missing_driver_is_named_with_its_extra(self) -> None:
        for text, module, extra in (("postgresql", "psycopg2", "postgresql"), ("mysql", "pymysql", "mysql")):
            with (
                self.subTest(text),
                mock.patch.dict(sys.modules, {module: None}),
                self.assertRaisesRegex(errors.ConfigError, rf"moorage\[{extra}\]"),
            ):
                Database(f"{text}://u:p@h/d")

    def test_of_a_driver_that_no_extra_brings_the_one_of_the_extra_is_named(self) -> None:
        advice = r"write postgresql\+psycopg2:// and pip install 'moorage\[postgresql\]'"
        with mock.patch.dict(sys.modules, {"psycopg": None}), self.assertRaisesRegex(errors.ConfigError, advice):
            Database("postgresql+psycopg://u:p@h/d")

    def test_no_message_holds_the_password(self) -> None:
        database = Database("postgresql://user:hunter2@127.0.0.1:1/d?sslpassword=hunter2")
        self.assertEqual("postgresql+psycopg2://user:***@127.0.0.1:1/d", database.url_safe)
        with self.assertRaises(errors.StoreUnavailable) as caught, database.read():
            self.fail("it was reached")
        self.assertNotIn("hunter2", caught.exception.message)


class FailedCommitTest(unittest.TestCase):
    """A commit that the store could not do."""

    def test_leaves_no_transaction_open(self) -> None:
        # Found by the simulation: the connection went back to its pool inside of the transaction, which locked the file.
        folder = self.enterContext(tempfile.TemporaryDirectory())
        one, other = (Database(f"sqlite:///{folder}/test.sqlite", lock_timeout=1) for _ in range(2))
        for each in (one, other):
            self.addCleanup(each.close)
        create = sa.text("CREATE TABLE IF NOT EXISTS things (id INTEGER PRIMARY KEY)")
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL
        dialect = one._writers.engine.dialect
        failing = mock.patch.object(dialect, "do_commit", side_effect=full)
        with failing, self.assertRaises(errors.StoreUnavailable) as raised, one.write() as tx:
            tx.execute(create)
        self.assertEqual(raised.exception.details["outcome"], "unknown")
        for each in (other, one):
            with each.write() as tx:
                tx.execute(create)


class FileSystemTest(unittest.TestCase):
    """Where a SQLite file may lie."""

    MOUNTS = (
        "/dev/vda / ext4 rw 0 0\n"
        "server:/export /srv/shared nfs4 rw 0 0\n"
        "/dev/vdb /srv/shared/local xfs rw 0 0\n"
        "me@host: /mnt/with\\040space fuse.sshfs rw 0 0\n"
        "server:/export /srv/over nfs4 rw 0 0\n"
        "/dev/vdc /srv/over ext4 rw 0 0\n"
    )

    def _kind(self, path: str) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".mounts") as table:
            table.write(self.MOUNTS)
            table.flush()
            mount = sqlite._mount_of(path, table.name)
        assert mount is not None
        return mount[1]

    def test_the_innermost_and_latest_mount_counts(self) -> None:
        found = [
            self._kind(path)
            for path in (
                "/var/lib/moorage/x.sqlite",
                "/srv/shared/x.sqlite",
                "/srv/shared/local/x.sqlite",
                "/srv/sharedness/x.sqlite",
                "/mnt/with space/x.sqlite",
                "/srv/over/x.sqlite",
            )
        ]
        self.assertEqual(["ext4", "nfs4", "xfs", "ext4", "fuse.sshfs", "ext4"], found)

    def test_a_network_file_system_is_refused(self) -> None:
        with (
            mock.patch.object(sqlite, "_mount_of", return_value=("/srv/shared", "nfs4")),
            self.assertRaisesRegex(errors.ConfigError, "/srv/shared, a network file system .nfs4."),
        ):
            Database("sqlite:////srv/shared/x.sqlite")

    def test_a_machine_without_a_mount_table_is_trusted(self) -> None:
        self.assertIsNone(sqlite._mount_of("/x", "/nonexistent-table"))


class OptionsTest(unittest.TestCase):
    """``[database]``."""

    def _conf(self) -> cfg.ConfigOpts:
        conf = cfg.ConfigOpts()
        options.register_opts(conf)
        conf([])
        return conf

    def test_a_connection_is_needed(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "connection is not set"):
            Database.from_config(self._conf())

    def test_all_listed_options_can_be_read(self) -> None:
        conf = self._conf()
        conf.set_override("connection", "mysql://u:p@h/d", group="database")
        database = Database.from_config(conf)
        self.assertEqual("mysql", database.dialect)
        for _, listed in options.list_opts():
            for each in listed:
                self.assertIn(each.name, conf.database)

    def test_defaults_of_one_configuration_do_not_reach_another(self) -> None:
        self._conf().set_default("connection", "sqlite:////somewhere", group="database")
        self.assertIsNone(self._conf().database.connection)
