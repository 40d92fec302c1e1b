# SPDX-License-Identifier: Apache-2.0
"""Finds, runs, compares and writes revisions through Alembic's API; there is no alembic.ini.

Who only asks at which revision a database is needs none of this (:mod:`moorage.db.migrations`).
"""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import Iterator
from typing import Any, Literal

import sqlalchemy as sa
from alembic import autogenerate, command, config, migration, script

from moorage import errors, plugin_isolation
from moorage.db import schema
from moorage.db.database import Database
from moorage.db.migrations import Migrations

__all__ = ["differences", "pending", "run_environment", "upgrade", "write_revision"]

_LOCK_NAME = "moorage_migrations"
#: Seconds to wait for another process that upgrades.
_TURN = 120


def upgrade(migrations: Migrations, database: Database) -> bool:
    """See :meth:`moorage.db.migrations.Migrations.upgrade`."""
    with database.schema_change() as transaction, _turn(transaction):
        if not _pending(migrations, database, transaction):
            return False
        with plugin_isolation.isolate_plugin_call(migrations.name):
            command.upgrade(_config(migrations, transaction), "head")
        return True


def pending(migrations: Migrations, database: Database) -> list[str]:
    """See :meth:`moorage.db.migrations.Migrations.pending`."""
    with database.read() as transaction:
        return _pending(migrations, database, transaction)


def differences(migrations: Migrations, database: Database) -> list[str]:
    """See :meth:`moorage.db.migrations.Migrations.differences`."""
    with database.read() as transaction:
        context = migration.MigrationContext.configure(
            transaction,
            opts={
                "version_table": migrations.version_table,
                "include_object": _only(migrations),
                "compare_type": True,
            },
        )
        return [str(difference) for difference in autogenerate.compare_metadata(context, migrations.metadata)]


def write_revision(migrations: Migrations, database: Database, message: str, revision: str) -> None:
    """See :meth:`moorage.db.migrations.Migrations.write_revision`."""
    with database.schema_change() as transaction:
        command.revision(_config(migrations, transaction), message=message, autogenerate=True, rev_id=revision)


def _config(migrations: Migrations, transaction: sa.Connection | None) -> config.Config:
    settings = config.Config()
    settings.set_main_option("script_location", str(importlib.resources.files(migrations.package)))
    settings.set_main_option("path_separator", "os")
    settings.attributes["connection"] = transaction
    settings.attributes["migrations"] = migrations
    return settings


def _pending(migrations: Migrations, database: Database, transaction: sa.Connection) -> list[str]:
    current = migrations.version_in(transaction)
    directory = script.ScriptDirectory.from_config(_config(migrations, None))
    known = [revision.revision for revision in directory.walk_revisions()]  # the newest first
    if current is None:
        return known[::-1]
    if current not in known:
        raise errors.ConfigError(
            f"The database {database.url_safe} is at revision {current} of {migrations.name}, which this "
            f"installation does not know (its newest is {known[0]}). Install the release that made it, or a newer one."
        )
    return known[: known.index(current)][::-1]


def _only(migrations: Migrations) -> Any:
    """Tables of other distributions lie in the same database and are none of our business."""

    def is_ours(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
        return kind != "table" or name in migrations.metadata.tables

    return is_ours


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
        include_object=_only(migrations),
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
