# SPDX-License-Identifier: Apache-2.0
"""Schema migrations: one alembic environment and one version table for each distribution that has tables.

Where a database stands is read without Alembic, which every role's start would pay for; what changes it is in
:mod:`moorage.db.upgrading`. The core's environment comes first, then those that installed distributions offer in the
entry-point group ``moorage.migrations``. There are no foreign keys between the environments, so that a distribution can be
uninstalled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors, foreign
from moorage.db.database import Database
from moorage.extensions import entry_points

__all__ = ["GROUP", "Migrations", "discover", "run_environment", "tables_of", "upgrade_all"]

LOG = logging.getLogger(__name__)

GROUP = "moorage.migrations"
_CORE = "moorage"


@dataclass(frozen=True)
class Migrations:
    """The migrations of one distribution.

    :param distribution: its name; ``moorage`` is the core and comes first.
    :param package: the package that holds ``env.py`` and ``versions`` (``moorage.db.alembic``).
    :param metadata: the tables as the code knows them.
    :param tables: modules that put their tables into the metadata when they are imported; see :func:`tables_of`.
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
        """The newest revision that the installed code knows.

        :raises PluginLoadError: there is none, or there are several.
        """
        known = _revisions(self.package)
        newest = sorted(set(known).difference(*known.values()))
        if len(newest) != 1:
            raise errors.PluginLoadError(
                f"The revisions in {self.package} of {self.distribution} have no single end ({', '.join(newest) or 'none'}). "
                f"Repair {self.distribution}: each revision comes after one other."
            )
        return newest[0]

    def version(self, database: Database) -> str | None:
        """The revision of the database; None when nothing was ever set up."""
        with database.read() as transaction:
            return self.version_in(transaction)

    def version_in(self, transaction: sa.Connection) -> str | None:
        """The same within a transaction."""
        if not sa.inspect(transaction).has_table(self.version_table):
            return None
        return transaction.execute(
            sa.select(sa.column("version_num")).select_from(sa.table(self.version_table))
        ).scalar_one_or_none()

    def pending(self, database: Database) -> list[str]:
        """The revisions that :meth:`upgrade` would run, in that order.

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
        with foreign.printing_aside(), foreign.isolate_plugin_call(self.distribution):
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
        with foreign.printing_aside(), foreign.isolate_plugin_call(owner):
            loaded = point.load()
        problem = "" if isinstance(loaded, Migrations) else f"{point.value} is not a moorage.db.migrations.Migrations"
    except Exception as error:  # noqa: BLE001  (whatever a foreign module raises when it is imported)
        loaded, problem = None, foreign.format_exception(error)
    if not problem:
        return loaded if isinstance(loaded, Migrations) else None
    version = f" {point.dist.version}" if point.dist else ""
    message = (
        f"The migrations '{point.name}' of {owner}{version} cannot be used ({problem}). Repair or uninstall {owner}."
    )
    if point.name == _CORE:
        raise errors.PluginLoadError(message)
    LOG.error("%s Its tables are neither upgraded nor checked.", message)
    return None


def upgrade_all(database: Database) -> list[str]:
    """Upgrade every environment; the names of those that changed.

    :raises PluginLoadError: a revision of one raised what is no error of a database.
    """
    return [each.distribution for each in discover() if _upgraded(each, database)]


def _upgraded(each: Migrations, database: Database) -> bool:
    try:
        return each.upgrade(database)
    except (errors.MoorageError, sa.exc.SQLAlchemyError):
        raise
    except Exception as error:
        raise errors.PluginLoadError(
            f"The migrations of {each.distribution} failed ({foreign.format_exception(error)}). Repair or uninstall "
            f"{each.distribution}, and upgrade again."
        ) from error
