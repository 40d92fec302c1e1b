# SPDX-License-Identifier: Apache-2.0
"""Migrations on each of the three databases: the project's own, and those of a distribution that others wrote."""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa

import moorage.db.alembic
from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database, autogenerate, migrations, new_metadata, now, upgrading
from moorage.db.schema import BigId, JsonText, Uuid, exact
from moorage.services.registry import ServiceRegistry
from moorage.testing import database as testing_database
from moorage.work.fences import FencePurge
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import fences
from moorage_plugins.compute.tables import instances
from tests import servers
from tests.functional.db.databases import FORK, Mixin, sqlite_url

_PARENTS = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "0001", None, None, None
def upgrade():
    op.create_table("tour_parents", sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.String(20)))
    op.create_table("tour_children", sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer, sa.ForeignKey("tour_parents.id", name="fk_parent", ondelete="CASCADE")))
    op.execute("INSERT INTO tour_parents VALUES (1, 'one')")
    op.execute("INSERT INTO tour_children VALUES (1, 1)")
"""
_ALTERED = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "0002", "0001", None, None
def upgrade():
    with op.batch_alter_table("tour_parents", recreate="auto") as batch:
        batch.alter_column("name", existing_type=sa.String(20), type_=sa.String(40), existing_nullable=True)
"""
_BROKEN = """
from alembic import op
revision, down_revision, branch_labels, depends_on = "0003", "0002", None, None
def upgrade():
    op.execute("DELETE FROM tour_children")
    raise ZeroDivisionError
"""


def _package(test: unittest.TestCase, name: str, *revisions: str) -> Path:
    """A package with an alembic environment, as a distribution would bring it."""
    folder = Path(tempfile.mkdtemp(prefix="moorage-test-"))
    test.addCleanup(shutil.rmtree, folder)
    source = Path(moorage.db.alembic.__path__[0])
    versions = folder / name / "versions"
    versions.mkdir(parents=True)
    for inner in (versions.parent, versions):
        (inner / "__init__.py").write_text("")
    for each in ("env.py", "script.py.mako"):
        shutil.copy(source / each, versions.parent / each)
    for number, text in enumerate(revisions, 1):
        (versions / f"{number:04d}_step.py").write_text(text)
    sys.path.insert(0, str(folder))
    test.addCleanup(sys.path.remove, str(folder))
    test.addCleanup(sys.modules.pop, name, None)
    importlib.invalidate_caches()
    return versions


def _upgrade(url: str, start: Any, answers: Any) -> None:
    database = Database(url)
    start.wait()
    try:
        answers.put(migrations.upgrade_all(database))
    except BaseException as error:
        answers.put(repr(error))


_upgrade_to = upgrading.command.upgrade


def _upgrade_to_0011(config: Any, revision: str) -> None:
    _upgrade_to(config, "0011")


class MigrationCases(Mixin):
    """What the three have in common."""

    kind = "sqlite"

    def setUp(self) -> None:
        super().setUp()
        self.url = (
            sqlite_url(type(self)) if self.kind == "sqlite" else servers.fresh_database(servers.shared(self.kind))
        )
        self.database = Database(self.url)
        self.addCleanup(self.database.close)

    def test_an_upgrade_brings_every_distribution_to_its_newest_revision(self) -> None:
        names = [each.name for each in migrations.discover()]
        self.assertEqual("moorage", names[0])
        self.assertIn("moorage_plugins", names)
        for each in migrations.discover():
            self.assertEqual((None, each.head()), (each.version(self.database), each.pending(self.database)[-1]))
        self.assertEqual(names, migrations.upgrade_all(self.database))
        for each in migrations.discover():
            self.assertEqual((each.head(), []), (each.version(self.database), each.pending(self.database)))
        self.assertEqual([], migrations.upgrade_all(self.database))

    def test_revisions_make_the_tables_that_the_code_has(self) -> None:
        migrations.upgrade_all(self.database)
        for each in migrations.discover():
            self.assertEqual([], each.differences(self.database))
            self.assertGreater(len(each.metadata.tables), 1)

    def test_tables_made_at_once_are_those_of_the_revisions(self) -> None:
        testing_database.create_all(self.database)
        for each in migrations.discover():
            self.assertEqual([], each.differences(self.database))

    def test_a_node_in_maintenance_keeps_it_and_gets_a_beginning(self) -> None:
        core = next(each for each in migrations.discover() if each.name == "moorage")
        with mock.patch.object(upgrading.command, "upgrade", _upgrade_to_0011):
            core.upgrade(self.database)
        insert = (
            "INSERT INTO nodes (uuid, name, properties, maintenance, maintenance_reason, generation, created_at, updated_at)"
            " VALUES (:name, :name, '{}', :on, 'disk', 0, 5, 7)"
        )
        with self.database.write() as tx:
            tx.execute(sa.text(insert), [{"name": "broken", "on": True}, {"name": "good", "on": False}])
        migrations.upgrade_all(self.database)
        columns = "name, maintenance_reason, maintenance_since, disabled, disabled_since"
        with self.database.read() as tx:
            found = tx.execute(sa.text(f"SELECT {columns} FROM nodes ORDER BY name")).all()
        self.assertEqual(
            [("broken", "disk", 7, False, None), ("good", "disk", None, False, None)], [tuple(r) for r in found]
        )

    def test_fences_and_services_that_there_were_keep_what_they_had(self) -> None:
        core = next(each for each in migrations.discover() if each.name == "moorage")
        with mock.patch.object(upgrading.command, "upgrade", _upgrade_to_0011):
            core.upgrade(self.database)
        service = (
            "INSERT INTO services (uuid, host, binary_, epoch, beat, beat_at, started_at, rpc_version, disabled, disabled_reason, "
            "forced_down) VALUES ('s', 'h', 'agent', 3, 4, 5, 6, '1.0', :no, '', :no)"
        ).replace("binary_", self.database_quote("binary"))
        with self.database.write() as tx:
            tx.execute(sa.text(service), {"no": False})
            tx.execute(sa.text("INSERT INTO fences (resource_type, resource_id, token) VALUES ('thing', 'one', 7)"))
        migrations.upgrade_all(self.database)
        (found,) = ServiceRegistry(self.database, SystemClock()).list()
        self.assertEqual((found.host, found.epoch, found.offers, found.can("anything")), ("h", 3, None, True))
        with self.database.read() as tx:
            token, age = tx.execute(sa.select(fences.c.token, now() - fences.c.raised_at)).one()
        self.assertEqual((token, 0 <= age < 600 * 1_000_000), (7, True))
        walk = FencePurge(self.database, SystemClock())
        self.assertFalse(walk.step(days=1))
        token = self.database.run(
            lambda tx: SqlOperationStore(self.database, lease_seconds=60).reset(tx, "thing", "one")
        )
        self.assertEqual(token, 8)

    def database_quote(self, name: str) -> str:
        with self.database.read() as tx:
            return tx.dialect.identifier_preparer.quote_identifier(name)

    def test_instances_that_are_being_moved_keep_their_destination(self) -> None:
        migrations.upgrade_all(self.database)
        revision = importlib.import_module("moorage_plugins.alembic.versions.0011_who_is_on_a_node")
        moves = {"operation": "live_migrate", "node_uuid": "n2"}
        with self.database.write() as tx:
            for uuid, status, pending in (("a", "migrating", moves), ("b", "active", None), ("c", "unshelving", moves)):
                values: dict[str, Any] = dict.fromkeys(
                    ("name", "host", "node", "flavorid", "project_id", "user_id", "fault"), ""
                )
                values |= {"uuid": uuid, "status": status, "node_uuid": "n1", "pending": pending}
                numbers = dict.fromkeys(("fence", "created_at", "updated_at"), 0)
                tx.execute(sa.insert(instances).values(**values, **numbers, resources={}, request={}))
            revision.fill_destinations(tx)
        with self.database.read() as tx:
            found = tx.execute(sa.select(instances.c.uuid, instances.c.destination_uuid).order_by(instances.c.uuid))
            self.assertEqual([("a", "n2"), ("b", ""), ("c", "")], [tuple(row) for row in found])

    def test_a_difference_is_found(self) -> None:
        migrations.upgrade_all(self.database)
        with self.database.schema_change() as tx:
            tx.exec_driver_sql("ALTER TABLE nodes ADD COLUMN stray INTEGER")
            tx.exec_driver_sql("CREATE TABLE strangers (id INTEGER)")
        core = migrations.discover()[0]
        found = core.differences(self.database)
        self.assertEqual(1, len(found), found)
        self.assertIn("stray", found[0])

    def test_two_processes_that_upgrade_at_once_take_turns(self) -> None:
        start, answers = FORK.Barrier(2), FORK.Queue()
        both = [FORK.Process(target=_upgrade, args=(self.url, start, answers)) for _ in range(2)]
        for each in both:
            each.start()
        found = sorted((answers.get(timeout=60) for _ in both), key=len)
        for each in both:
            each.join(60)
        names = [each.name for each in migrations.discover()]
        # Distributions take turns one by one, so each may do some of them; together they do each once.
        self.assertEqual(sorted(names), sorted(found[0] + found[1]))

    def test_a_database_of_a_later_release_is_refused(self) -> None:
        migrations.upgrade_all(self.database)
        core = migrations.discover()[0]
        with self.database.write() as tx:
            tx.exec_driver_sql(f"UPDATE {core.version_table} SET version_num = '9999'")
        for refused in (core.upgrade, core.pending):
            with self.assertRaisesRegex(errors.ConfigError, "revision 9999.*Install the release"):
                refused(self.database)

    def test_a_changed_table_keeps_the_rows_that_refer_to_it(self) -> None:
        _package(self, "tour_of_change", _PARENTS, _ALTERED)
        tour = migrations.Migrations("tour", "tour_of_change", new_metadata())
        self.assertTrue(tour.upgrade(self.database))
        with self.database.read() as tx:
            self.assertEqual(1, tx.exec_driver_sql("SELECT COUNT(*) FROM tour_children").scalar_one())
        if self.kind == "sqlite":
            with self.database.write() as tx:
                self.assertEqual(1, tx.exec_driver_sql("PRAGMA foreign_keys").scalar_one())

    def test_a_revision_that_fails_changes_nothing(self) -> None:
        _package(self, "tour_of_failure", _PARENTS, _ALTERED, _BROKEN)
        tour = migrations.Migrations("tour", "tour_of_failure", new_metadata())
        with self.assertRaises(ZeroDivisionError):
            tour.upgrade(self.database)
        if self.kind == "mariadb":  # commits each change of the schema by itself; what failed is rolled back
            self.assertEqual(["0003"], tour.pending(self.database))
            with self.database.read() as tx:
                self.assertEqual(1, tx.exec_driver_sql("SELECT COUNT(*) FROM tour_children").scalar_one())
        else:
            self.assertEqual(["0001", "0002", "0003"], tour.pending(self.database))
            with self.database.read() as tx:
                self.assertEqual([], sa.inspect(tx).get_table_names())

    def test_a_revision_that_exits_is_told_with_its_distribution(self) -> None:
        _package(self, "tour_of_exits", _PARENTS.replace("upgrade():\n", "upgrade():\n    raise SystemExit(3)\n"))
        exits = migrations.Migrations("tour", "tour_of_exits", new_metadata())
        told = r"of tour failed \(.*SystemExit\(3\).*Repair or uninstall tour"
        with (
            mock.patch.object(migrations, "discover", return_value=[exits]),
            self.assertRaisesRegex(errors.PluginLoadError, told),
        ):
            migrations.upgrade_all(self.database)


class SqliteMigrations(MigrationCases, unittest.TestCase):
    """On SQLite."""

    def test_rows_that_would_refer_to_nothing_undo_the_change(self) -> None:
        with self.database.schema_change() as tx:
            tx.exec_driver_sql("CREATE TABLE a (id INTEGER PRIMARY KEY)")
            tx.exec_driver_sql("CREATE TABLE b (a INTEGER REFERENCES a (id))")
        with self.assertRaisesRegex(errors.Conflict, "b to a"), self.database.schema_change() as tx:
            tx.exec_driver_sql("INSERT INTO b VALUES (7)")
        with self.database.read() as tx:
            self.assertEqual(0, tx.exec_driver_sql("SELECT COUNT(*) FROM b").scalar_one())

    def test_a_draft_of_a_revision_makes_the_tables(self) -> None:
        versions = _package(self, "tour_of_drafts")
        metadata = new_metadata()
        sa.Table(
            "drafts",
            metadata,
            sa.Column("id", BigId, primary_key=True),
            sa.Column("uuid", Uuid, nullable=False),
            sa.Column("name", exact(40)),
            sa.Column("extra", JsonText),
            sa.UniqueConstraint("uuid"),
        )
        tour = migrations.Migrations("tour", "tour_of_drafts", metadata)
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual("0001", autogenerate.write_revision(tour, "the drafts"))
        self.assertIn("exact(36)", next(versions.glob("0001*.py")).read_text())
        self.assertTrue(tour.upgrade(self.database))
        self.assertEqual(("0001", []), (tour.version(self.database), tour.differences(self.database)))


class PostgresqlMigrations(MigrationCases, unittest.TestCase):
    """On PostgreSQL."""

    kind = "postgresql"


class MariadbMigrations(MigrationCases, unittest.TestCase):
    """On MariaDB."""

    kind = "mariadb"

    def test_the_turn_is_given_back_while_the_connection_lives_on(self) -> None:
        migrations.upgrade_all(self.database)
        other = Database(self.url)
        self.addCleanup(other.close)
        with other.write() as tx:
            held = tx.exec_driver_sql(
                "SELECT IS_USED_LOCK(CONCAT(LEFT(DATABASE(), 40), '.moorage_migrations'))"
            ).scalar_one()
        self.assertIsNone(held)
