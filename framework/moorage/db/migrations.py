# SPDX-License-Identifier: Apache-2.0
"""Schema migrations: one chain of revisions for each part that has tables, with a version table of its own.

Parts name their chains (:attr:`moorage.part.Part.migrations`). Two chains are the base that every database passes first: those of
the core and of the reference plugins, from the time when a distribution had one chain. A new table belongs to the chain of its
part. No foreign key goes from one part to another, so that a part can be uninstalled: its tables stay, and are reported.

Where a database stands is read without Alembic, which every role's start would pay for; what changes it is in
:mod:`moorage.db.upgrading`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors, plugin_isolation
from moorage.db.database import Database
from moorage.part import InstalledPart, parts

__all__ = ["Migrations", "Removed", "discover", "removed", "run_environment", "tables_of", "upgrade_all"]

LOG = logging.getLogger(__name__)

_CORE = "moorage"
_VERSIONS = "alembic_version_"


@dataclass(frozen=True)
class Migrations:
    """One chain of migrations.

    :param name: the name of its part; ``moorage`` is the base of the core and comes first.
    :param package: the package that holds ``env.py`` and ``versions`` (``moorage.db.alembic``).
    :param metadata: the tables as the code knows them.
    :param tables: modules that put their tables into the metadata when they are imported; see :func:`tables_of`.
    :param base: every database passes the chain before those of single parts; only Moorage has such chains.
    """

    name: str
    package: str
    metadata: sa.MetaData
    tables: tuple[str, ...] = ()
    base: bool = False

    @property
    def version_table(self) -> str:
        """The table that holds the revision of the database."""
        return _VERSIONS + self.name.replace("-", "_").replace(".", "_").lower()

    def head(self) -> str:
        """Returns the newest revision that the installed code knows.

        :raises PluginLoadError: there is none, or there are several.
        """
        known = _revisions(self.package)
        newest = sorted(set(known).difference(*known.values()))
        if len(newest) != 1:
            raise errors.PluginLoadError(
                f"The revisions in {self.package} of {self.name} have no single end ({', '.join(newest) or 'none'}). "
                f"Repair {self.name}: each revision comes after one other."
            )
        return newest[0]

    def version(self, database: Database) -> str | None:
        """Returns the revision of the database; None when nothing was ever set up."""
        with database.read() as transaction:
            return self.version_in(transaction)

    def version_in(self, transaction: sa.Connection) -> str | None:
        """Returns the revision of the database, read in an open transaction."""
        if not sa.inspect(transaction).has_table(self.version_table):
            return None
        return transaction.execute(
            sa.select(sa.column("version_num")).select_from(sa.table(self.version_table))
        ).scalar_one_or_none()

    def pending(self, database: Database) -> list[str]:
        """Returns the revisions that :meth:`upgrade` would run, in that order.

        :raises ConfigError: the database is newer than the installed code.
        """
        from moorage.db import upgrading

        return upgrading.pending(self, database)

    def upgrade(self, database: Database) -> bool:
        """Bring the database to the newest revision; False when it was there already.

        Several processes may do this at once: they take turns. On Galera run it on one node: its locks do not reach others.
        What fails changes nothing on SQLite and PostgreSQL; MariaDB keeps the revisions, and of the failed one the statements,
        that came before.

        :raises ConfigError: the database is newer than the installed code.
        :raises StoreBusy: another process upgrades, and has not ended after two minutes.
        """
        from moorage.db import upgrading

        return upgrading.upgrade(self, database)

    def differences(self, database: Database) -> list[str]:
        """How the tables differ from what the code says; empty when they agree."""
        self.import_tables()
        from moorage.db import upgrading

        return upgrading.differences(self, database)

    def write_revision(self, database: Database, message: str, revision: str) -> None:
        """Write a new revision file from the difference between database and code; a developer's tool."""
        self.import_tables()
        from moorage.db import upgrading

        upgrading.write_revision(self, database, message, revision)

    def import_tables(self) -> None:
        """Import the modules that fill the metadata."""
        with plugin_isolation.printing_aside(), plugin_isolation.isolate_plugin_call(self.name):
            for module in self.tables:
                importlib.import_module(module)


def tables_of(package: str) -> tuple[str, ...]:
    """The modules named ``tables`` of a package and of those in it (``moorage.fleet.tables``), by name; imports none of them."""

    def within(folder: Traversable, name: str) -> Iterator[str]:
        for each in folder.iterdir():
            if each.name == "tables.py":
                yield f"{name}.tables"
            elif each.joinpath("__init__.py").is_file():
                yield from within(each, f"{name}.{each.name}")

    return tuple(sorted(within(importlib.resources.files(package), package)))


def run_environment(context: Any) -> None:
    """The whole of an ``env.py``: run the migrations on the connection that was passed in.

    :param context: ``alembic.context``.
    """
    from moorage.db import upgrading

    upgrading.run_environment(context)


def _revisions(package: str) -> dict[str, tuple[str, ...]]:
    """Revision -> those it comes after, read from the files: to import them is to import Alembic."""
    found = {}
    for file in (importlib.resources.files(package) / "versions").iterdir():
        if file.name.endswith(".py"):
            named = _constants(file.read_text(encoding="utf-8"))
            if "revision" in named:
                before = named.get("down_revision") or ()
                found[named["revision"]] = (before,) if isinstance(before, str) else tuple(before)
    return found


def _constants(source: str) -> dict[str, Any]:
    """What a module assigns to the two names that order revisions."""
    found = {}
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in {"revision", "down_revision"}:
                found[target.id] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
    return found


def discover() -> Sequence[Migrations]:
    """Returns the chains of all parts that are installed: the core's first, then the other bases, then by name.

    What cannot be imported is reported in the log and left out, so that a stray package does not stop a service.

    :raises PluginLoadError: a part of Moorage itself cannot be imported, or two chains would share a version table.
    """
    found: dict[str, Migrations] = {}
    for part in parts():
        loaded = _load(part) if part.declared.migrations else None
        if loaded is None:
            continue
        if found.setdefault(loaded.version_table, loaded) is not loaded:
            raise errors.PluginLoadError(
                f"Two chains of migrations ('{loaded.name}' of {' '.join(part.distribution)} is one) use the version table "
                f"{loaded.version_table}. Uninstall one of the distributions."
            )
    return sorted(found.values(), key=lambda each: (each.name != _CORE, not each.base, each.name))


def _load(part: InstalledPart) -> Migrations | None:
    value = part.declared.migrations
    try:
        loaded = part.load(value)
        if not isinstance(loaded, Migrations):
            raise errors.PluginLoadError(f"{value} is not a moorage.db.migrations.Migrations.")
    except errors.PluginLoadError as error:
        if part.distribution[0] == _CORE:
            raise
        LOG.error("%s The tables of the part '%s' are neither upgraded nor checked.", error.message, part.name)
        return None
    return loaded


@dataclass(frozen=True, slots=True)
class Removed:
    """What parts have left in a database that are not installed any more, or cannot be used.

    :param chains: their names -> the revision of the database.
    :param tables: the tables that no installed part knows; empty where no chain is left.
    """

    chains: Mapping[str, str]
    tables: Sequence[str]


def removed(database: Database) -> Removed:
    """Find tables and migration chains of parts that are no longer installed. Imports the models of all installed parts."""
    known = discover()
    with database.read() as transaction:
        there = sa.inspect(transaction).get_table_names()
        versions = {table for table in there if table.startswith(_VERSIONS)}
        chains = {
            table.removeprefix(_VERSIONS): transaction.execute(
                sa.select(sa.column("version_num")).select_from(sa.table(table))
            ).scalar_one_or_none()
            or "nothing"
            for table in sorted(versions - {each.version_table for each in known})
        }
    if not chains:
        return Removed({}, ())
    for each in known:
        each.import_tables()
    ours = {table.name for each in known for table in each.metadata.tables.values()}
    return Removed(chains, sorted(set(there) - versions - ours))


def upgrade_all(database: Database) -> list[str]:
    """Upgrades every chain of migrations; returns the names of the chains that changed.

    :raises PluginLoadError: a revision of one raised what is no error of a database.
    """
    return [each.name for each in discover() if _upgraded(each, database)]


def _upgraded(each: Migrations, database: Database) -> bool:
    try:
        return each.upgrade(database)
    except (errors.MoorageError, sa.exc.SQLAlchemyError):
        raise
    except Exception as error:
        raise errors.PluginLoadError(
            f"The migrations of {each.name} failed ({plugin_isolation.format_exception(error)}). Repair or uninstall "
            f"{each.name}, and upgrade again."
        ) from error
