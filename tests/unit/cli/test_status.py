# SPDX-License-Identifier: Apache-2.0
"""What the upgrade check says of each thing when it is well, doubtful and wrong."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa
from oslo_upgradecheck.upgradecheck import Code

from moorage.cli import manage, status
from moorage.clock import SystemClock
from moorage.control_plane.process import RPC_VERSION
from moorage.db import Database, migrations
from moorage.db.tables import event_sequence
from moorage.journal.subscriptions import SubscriptionStore
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage.work.tables import workers
from tests import servers

CHECKS: dict[str, Any] = dict(status.Checks()._upgrade_checks)


class CheckCase(unittest.TestCase):
    """A control plane's folder, whose database is at the newest revision."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.database = Database(f"sqlite:///{self.folder}/moorage.sqlite")
        self.addCleanup(self.database.close)
        migrations.upgrade_all(self.database)
        self.configure()

    def configure(self, text: str = "") -> None:
        self.conf = self.folder / "moorage.conf"
        self.conf.write_text(text)
        self.conf.chmod(0o600)

    def look(self, name: str) -> tuple[Code, str]:
        found = CHECKS[name](status.Checks([str(self.conf)], str(self.folder)))
        return Code(found.code), found.details or ""

    def assert_well(self, *names: str) -> None:
        for name in names:
            with self.subTest(check=name):
                self.assertEqual((Code.SUCCESS, ""), self.look(name))

    def assert_says(self, code: Code, words: str, name: str) -> None:
        found, said = self.look(name)
        self.assertIn(words, said)
        self.assertIs(code, found)


class AllChecksTests(CheckCase):
    def run_main(self) -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status_ = status.main(
                ["--config-file", str(self.conf), "--state-dir", str(self.folder), "upgrade", "check"]
            )
        return status_, said.getvalue()

    def test_a_fresh_control_plane_passes_every_check(self) -> None:
        self.assert_well(*CHECKS)
        found, said = self.run_main()
        self.assertEqual(0, found, said)
        self.assertEqual(len(CHECKS), said.count("Result: Success"))

    def test_the_exit_status_is_that_of_the_worst(self) -> None:
        self.configure("[scheduling]\nenabled_filter = compute\n")
        self.assertEqual(1, self.run_main()[0])
        self.configure("[scheduling]\nenabled_filters = nonsense\n")
        self.assertEqual(2, self.run_main()[0])

    def test_a_database_that_is_away_fails_what_needs_it_and_the_rest_is_checked(self) -> None:
        url = f"postgresql://nobody@127.0.0.1:{servers.free_port()}/none"
        self.configure(f"[database]\nconnection = {url}\n")
        for name in ("database schema", "tables", "services", "operations", "shards"):
            with self.subTest(check=name):
                self.assert_says(Code.FAILURE, "Connection refused", name)
        self.assert_well("options", "files", "plugins", "messages")

    def test_a_configuration_that_cannot_be_read_is_told_without_a_traceback(self) -> None:
        self.configure("[api]\nbind\n= 1\n")
        found, said = self.run_main()
        self.assertEqual(2, found)
        self.assertNotIn("Traceback", said)


class ConfigurationTests(CheckCase):
    def test_what_a_start_would_refuse_is_a_failure(self) -> None:
        self.configure("[scheduling]\nenabled_filters = compute,nonsense\n")
        self.assert_says(Code.FAILURE, "'nonsense'", "configuration")

    def test_names_that_nothing_reads_are_doubtful(self) -> None:
        self.configure("[scheduling]\nenabled_filter = compute\n")
        self.assert_says(Code.WARNING, "enabled_filters was meant?", "options")

    def test_old_names_are_doubtful_and_the_new_one_is_told(self) -> None:
        self.configure("[DEFAULT]\nperiodic_coordinator_backend_url = database\n")
        self.assert_says(Code.WARNING, "write [coordination] periodic_coordination_backend", "options")

    def test_files_with_passwords_that_everybody_can_read_are_doubtful(self) -> None:
        self.conf.chmod(0o644)
        self.assert_says(Code.WARNING, f"chmod o-r {self.conf}", "files")
        self.conf.chmod(0o640)
        self.assert_well("files")

    def test_a_plugin_that_cannot_be_imported_is_doubtful(self) -> None:
        info = self.folder / "acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[moorage.filters]\nit = acme_not_there:It\n")
        sys.path.insert(0, str(self.folder))
        self.addCleanup(sys.path.remove, str(self.folder))
        self.assert_says(Code.WARNING, "acme 1.0", "plugins")

    def test_a_plugin_that_exits_fails_its_check_and_the_others_are_made(self) -> None:
        with mock.patch.object(status, "survey", side_effect=SystemExit(4)):
            self.assert_says(Code.FAILURE, "SystemExit(4)", "plugins")


class DatabaseTests(CheckCase):
    def test_a_database_that_was_never_upgraded_is_a_failure(self) -> None:
        self.configure(f"[database]\nconnection = sqlite:///{self.folder}/empty.sqlite\n")
        self.assert_says(Code.FAILURE, "moorage-manage db upgrade", "database schema")
        self.assert_well("tables")

    def test_tables_that_are_not_what_the_code_expects_are_doubtful(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.text("DROP INDEX ix_nodes_host"))
        self.assert_says(Code.WARNING, "1 differ", "tables")

    def test_what_a_removed_part_has_left_is_doubtful_and_no_failure(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.text("CREATE TABLE alembic_version_gone (version_num VARCHAR(32))"))
            tx.execute(sa.text("INSERT INTO alembic_version_gone VALUES ('0007')"))
            tx.execute(sa.text("CREATE TABLE gone_items (id INTEGER)"))
        self.assert_says(Code.WARNING, "The part gone (revision 0007) is not installed", "tables")
        self.assertIn("knows the tables gone_items.", self.look("tables")[1])
        self.assert_well("database schema")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            self.assertEqual(
                0, manage.main(["--config-file", str(self.conf), "--state-dir", str(self.folder), "db", "version"])
            )
        self.assertIn(
            "gone: 0007 (not installed)\nTables of parts that are not installed: gone_items.\n", said.getvalue()
        )

    def enlist(self, version: str) -> Any:
        return ServiceRegistry(self.database, SystemClock()).enlist("agent", "h1", rpc_version=version)

    def test_services_of_this_version_or_that_have_ended_are_well(self) -> None:
        self.enlist(RPC_VERSION)
        self.assert_well("services")
        identity = self.enlist("99.0")
        self.assertTrue(ServiceRegistry(self.database, SystemClock()).retire(identity))
        self.assert_well("services")

    def test_services_of_a_neighbour_are_doubtful_and_of_another_major_a_failure(self) -> None:
        major, minor = (int(part) for part in RPC_VERSION.split("."))
        self.enlist(f"{major}.{minor + 1}")
        self.assert_says(Code.WARNING, "agent h1", "services")
        self.enlist(f"{major + 1}.0")
        self.assert_says(Code.FAILURE, "Stop them first", "services")
        with self.database.write() as tx:
            tx.execute(sa.delete(services))
        self.assert_well("services")

    def test_an_operation_that_waits_for_a_person_is_doubtful(self) -> None:
        numbers = (
            "epoch",
            "token",
            "attempts",
            "worker_epoch",
            "expires_at",
            "next_try_at",
            "created_at",
            "updated_at",
        )
        row = {
            "resource_type": "volume", "resource_id": "one", "operation": "build", "status": "creating", "target_host": "h",
            "phase": "quarantined", "last_error": "", **dict.fromkeys(numbers, 0),
        }  # fmt: skip
        with self.database.write() as tx:
            tx.execute(sa.insert(workers).values(row))
        self.assert_says(Code.WARNING, "1 of volume are quarantined", "operations")

    def test_an_observer_that_is_chosen_no_longer_is_told_with_what_waits_for_it(self) -> None:
        with self.database.write() as tx:
            for name in ("observer/log", "observer/gone", "webhook/one"):
                SubscriptionStore(self.database).insert(tx, name, 3)
            values = {"last": 8, "purged": 0, "token": 0, "owner": "", "expires_at": 0}
            tx.execute(sa.insert(event_sequence).values(id=1, **values))
        self.configure("[observers]\nenabled = log\n")
        self.assert_says(Code.WARNING, "The observer gone is not in [observers] enabled", "followers")
        self.assert_says(Code.WARNING, "5 events wait for it", "followers")
        self.configure("[observers]\nenabled = log, gone\n")
        self.assert_well("followers")


class ServersTests(CheckCase):
    def brokers(self, *ports: int) -> None:
        hosts = ",".join(f"u:secret@127.0.0.1:{port}" for port in ports)
        self.configure(f"[rpc]\ntransport_url = rabbit://{hosts}/\n")

    def test_a_broker_that_answers_is_well_one_of_two_doubtful_none_a_failure(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as there:
            port, away = there.getsockname()[1], servers.free_port()
            self.brokers(port)
            self.assert_well("messages")
            self.brokers(port, away)
            self.assert_says(Code.WARNING, f"127.0.0.1:{away}", "messages")
            self.brokers(away)
            self.assert_says(Code.FAILURE, f"127.0.0.1:{away}", "messages")
            self.assertNotIn("secret", self.look("messages")[1])

    def coordinate(self, backend: str, policy: str = "fail") -> None:
        self.configure(
            f"[coordination]\nperiodic_coordination_backend = {backend}\nstartup_policy = {policy}\nconnect_timeout = 0.5\n"
        )

    def test_a_backend_that_answers_is_well(self) -> None:
        for backend in ("database", f"file://{self.folder}/members"):
            self.coordinate(backend)
            self.assert_well("coordination")

    def test_a_backend_that_is_away_is_what_the_engine_makes_of_it(self) -> None:
        backend = f"zookeeper://127.0.0.1:{servers.free_port()}"
        self.coordinate(backend, "wait")
        self.assert_says(Code.WARNING, backend, "coordination")
        self.coordinate(backend)
        self.assert_says(Code.FAILURE, backend, "coordination")

    def test_a_backend_that_can_never_work_is_a_failure(self) -> None:
        self.coordinate("nonsense")
        self.assert_says(Code.FAILURE, "nonsense", "coordination")
