# SPDX-License-Identifier: Apache-2.0
"""Schema migrations: one alembic environment and one version table for each distribution that has tables.

Alembic is driven through its API; there is no alembic.ini. The core's environment comes first, then those that installed
distributions offer in the entry-point group ``moorage.migrations``. There are no foreign keys between the environments, so that a
distribution can be uninstalled.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from alembic import autogenerate, command, config, migration, script
from oslo_log import log as logging

from moorage import errors
from moorage.db import schema
from moorage.db.database import Database
from moorage.extensions import entry_points

__all__ = ["GROUP", "Migrations", "discover", "upgrade_all"]

LOG = logging.getLogger(__name__)

GROUP = "moorage.migrations"
_CORE = "moorage"
_LOCK_NAME = "moorage_migrations"
#: Seconds to wait for another process that upgrades.
_TURN = 120


@dataclass(frozen=True)
class Migrations:
    """The migrations of one distribution.

    :param distribution: its name; ``moorage`` is the core and comes first.
    :param package: the package that holds ``env.py`` and ``versions`` (``moorage.db.alembic``).
    :param metadata: the tables as the code knows them.
    :param tables: modules that put their tables into the metadata when they are imported (``moorage.fleet.tables``).
    """

    distribution: str
    package: str
    metadata: sa.MetaData
    tables: tuple[str, ...] = ()

    @property
    def version_table(self) -> str:
        """Where this distribution's revision is kept."""
        return "alembic_version_" + self.distribution.replace("-", "_").replace(".", "_").lower()

    def head(self) -> str:
        """The newest revision that the installed code knows."""
        return str(script.ScriptDirectory.from_config(self._config(None)).get_current_head())

    def version(self, database: Database) -> str | None:
        """The revision of the database; None when nothing was ever set up."""
        with database.read() as transaction:
            return self._current(transaction)

    def pending(self, database: Database) -> list[str]:
        """The revisions that :meth:`upgrade` would run, in that order.

        :raises ConfigError: the database is newer than the installed code.
        """
        with database.read() as transaction:
            return self._pending(database, transaction)

    def upgrade(self, database: Database) -> bool:
        """Bring the database to the newest revision; False when it was there already.

        Several processes may do this at once: they take turns. On Galera run it on one node: its locks do not reach others.
        What fails changes nothing on SQLite and PostgreSQL; MariaDB keeps the revisions, and of the failed one the statements,
        that came before.

        :raises ConfigError: the database is newer than the installed code.
        :raises StoreBusy: another process upgrades, and has not ended after two minutes.
        """
        with database.schema_change() as transaction, _turn(transaction):
            if not self._pending(database, transaction):
                return False
            command.upgrade(self._config(transaction), "head")
            return True

    def differences(self, database: Database) -> list[str]:
        """How the tables differ from what the code says; empty when they agree."""
        self.import_tables()
        with database.read() as transaction:
            context = migration.MigrationContext.configure(
                transaction,
                opts={
                    "version_table": self.version_table,
                    "include_object": self._is_ours,
                    "compare_type": True,
                },
            )
            return [str(difference) for difference in autogenerate.compare_metadata(context, self.metadata)]

    def write_revision(self, database: Database, message: str, revision: str) -> None:
        """Write a new revision file from the difference between database and code; a developer's tool."""
        self.import_tables()
        with database.schema_change() as transaction:
            command.revision(self._config(transaction), message=message, autogenerate=True, rev_id=revision)

    def import_tables(self) -> None:
        """Import the modules that fill the metadata."""
        for module in self.tables:
            importlib.import_module(module)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _config(self, transaction: sa.Connection | None) -> config.Config:
        location = importlib.resources.files(self.package)
        settings = config.Config()
        settings.set_main_option("script_location", str(location))
        settings.set_main_option("path_separator", "os")
        settings.attributes["connection"] = transaction
        settings.attributes["migrations"] = self
        return settings

    def _pending(self, database: Database, transaction: sa.Connection) -> list[str]:
        current = self._current(transaction)
        directory = script.ScriptDirectory.from_config(self._config(None))
        known = [revision.revision for revision in directory.walk_revisions()]  # the newest first
        if current is None:
            return known[::-1]
        if current not in known:
            raise errors.ConfigError(
                f"The database {database.url_safe} is at revision {current} of {self.distribution}, which this installation "
                f"does not know (its newest is {self.head()}). Install the release that made it, or a newer one."
            )
        return known[: known.index(current)][::-1]

    def _current(self, transaction: sa.Connection) -> str | None:
        context = migration.MigrationContext.configure(transaction, opts={"version_table": self.version_table})
        return context.get_current_revision()

    def _is_ours(self, item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
        """Tables of other distributions lie in the same database and are none of our business."""
        if kind == "table":
            return name in self.metadata.tables
        return True


@contextlib.contextmanager
def _turn(transaction: sa.Connection) -> Iterator[None]:
    """Keep other processes from upgrading meanwhile. SQLite has one writer at a time anyway."""
    name = transaction.dialect.name
    if name == "postgresql":
        transaction.execute(sa.text(f"SET LOCAL lock_timeout = '{_TURN}s'"))
        transaction.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(_LOCK_NAME))))
    if name != "mysql":
        yield
        return
    # The lock belongs to the session, as changes of the schema commit by themselves, and the session goes back to the pool. What
    # was done under it is committed (_keep) when it is released.
    # Its name is the server's, so it holds the database's.
    lock = sa.func.concat(sa.func.left(sa.func.database(), 40), "." + _LOCK_NAME)
    if transaction.execute(sa.select(sa.func.get_lock(lock, _TURN))).scalar_one() != 1:
        raise errors.StoreBusy(
            f"Another process has been upgrading the database for {_TURN} seconds; wait for it, then try again."
        )
    try:
        yield
    finally:
        if not transaction.invalidated:
            transaction.execute(sa.select(sa.func.release_lock(lock)))


def run_environment(context: Any) -> None:
    """The whole of an ``env.py``: run the migrations on the connection that was passed in.

    :param context: ``alembic.context``.
    """
    settings = context.config
    migrations: Migrations = settings.attributes["migrations"]
    context.configure(
        connection=settings.attributes["connection"],
        target_metadata=migrations.metadata,
        version_table=migrations.version_table,
        include_object=migrations._is_ours,
        render_item=_render,
        on_version_apply=_keep,
        render_as_batch=True,
        transactional_ddl=False,
    )
    context.run_migrations()


def _keep(ctx: migration.MigrationContext, **kw: Any) -> None:
    """Commit each revision of MariaDB with its number, which would else be lost, unlike its tables, when a later one fails."""
    if ctx.dialect.name == "mysql" and ctx.connection is not None:
        ctx.connection.exec_driver_sql("COMMIT")


def _render(kind: str, item: Any, context: Any) -> str | Literal[False]:
    """Write Moorage's column types by their names into a new revision."""
    source = schema.source_of(item) if kind == "type" else None
    if source is None:
        return False
    context.imports.add(f"from moorage.db.schema import {source.partition('(')[0]}")
    return source


def discover() -> Sequence[Migrations]:
    """The environments of all installed distributions, the core's first, then by name.

    What cannot be imported is reported in the log and left out, so that a stray package does not stop a service.

    :raises PluginLoadError: the core's cannot be imported, or two distributions would share a version table.
    """
    found: dict[str, Migrations] = {}
    for point in entry_points(GROUP):
        owner = point.dist.name if point.dist else "an unknown distribution"
        loaded = _load(point, owner)
        if loaded is None:
            continue
        if found.setdefault(loaded.version_table, loaded) is not loaded:
            raise errors.PluginLoadError(
                f"Two migrations ('{point.name}' of {owner} is one) use the version table {loaded.version_table}. "
                "Uninstall one of the distributions."
            )
    return sorted(found.values(), key=lambda each: (each.distribution != _CORE, each.distribution))


def _load(point: importlib.metadata.EntryPoint, owner: str) -> Migrations | None:
    try:
        loaded = point.load()
        problem = "" if isinstance(loaded, Migrations) else f"{point.value} is not a moorage.db.migrations.Migrations"
    except Exception as error:  # noqa: BLE001  (whatever a foreign module raises when it is imported)
        loaded, problem = None, f"{type(error).__name__}: {error}"
    if not problem:
        return loaded if isinstance(loaded, Migrations) else None
    message = f"The migrations '{point.name}' of {owner} cannot be used ({problem}). Repair or uninstall {owner}."
    if point.name == _CORE:
        raise errors.PluginLoadError(message)
    LOG.error("%s Its tables are neither upgraded nor checked.", message)
    return None


def upgrade_all(database: Database) -> list[str]:
    """Upgrade every environment; the names of those that changed."""
    return [each.distribution for each in discover() if each.upgrade(database)]
