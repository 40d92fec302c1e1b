# SPDX-License-Identifier: Apache-2.0
"""What the tables of all families share: one naming convention and a few portable column types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from moorage.json_text import writer

__all__ = [
    "INNODB",
    "NAMING",
    "BigId",
    "ExactString",
    "JsonText",
    "Micros",
    "Uuid",
    "core_metadata",
    "exact",
    "json_text",
    "names_of",
    "new_metadata",
    "partial_index",
    "source_of",
]

#: Writes JSON as text, the same for equal data: without spaces, keys in order.
json_text = writer(sort_keys=True)

TypeT = TypeVar("TypeT", bound=sa.types.TypeEngine[Any])

#: Constraints are named explicitly: databases derive different names, and migrations must find them.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


#: How MariaDB keeps a table, whatever the server's defaults are; ``op.create_table(..., **INNODB)`` in migrations.
INNODB: Mapping[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}


def partial_index(condition: str) -> Mapping[str, Any]:
    """Returns the arguments of a partial index, for ``sa.Index`` and ``op.create_index``: it has the rows that meet the condition.

    A change of another row does not write the index. SQLite and PostgreSQL use it for a statement only if the conditions of the
    statement imply this one, whatever its parameters are: ``column > :value`` implies ``column IS NOT NULL``, but a comparison with
    a literal must be repeated in the statement. MariaDB has no such indexes: there the index has all rows.
    """
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def new_metadata() -> sa.MetaData:
    """Returns a MetaData with the project's naming convention; one for each distribution that has tables.

    Tables that are put into it get :data:`INNODB`.
    """
    metadata = sa.MetaData(naming_convention=NAMING)
    metadata.info["moorage"] = True
    return metadata


@sa.event.listens_for(sa.Table, "before_parent_attach")
def _keep_in_innodb(table: sa.Table, parent: sa.MetaData) -> None:
    if parent.info.get("moorage"):
        table.kwargs.update({key: value for key, value in INNODB.items() if key not in table.kwargs})


#: The tables of the core.
core_metadata = new_metadata()


def _written(source: str, column_type: TypeT) -> TypeT:
    """Say how a new revision writes the type (:func:`source_of`)."""
    column_type.moorage_source = source  # type: ignore[attr-defined]
    return column_type


def source_of(column_type: object) -> str | None:
    """How a revision writes one of the types of this module; None for any other."""
    source = getattr(column_type, "moorage_source", None)
    return source if isinstance(source, str) else None


#: A primary key that counts up; SQLite counts only INTEGER keys up.
BigId = _written("BigId", sa.BigInteger().with_variant(sa.Integer(), "sqlite"))
#: Microseconds since the Unix epoch, see :mod:`moorage.db.time`.
Micros = sa.BigInteger


def names_of(columns: Iterable[sa.Column[Any]]) -> tuple[str, ...]:
    """Returns the names of columns as plain text.

    SQLAlchemy's names are of a subclass of ``str``. Mappings with such keys are slower, and writing them as JSON takes several
    times as long.
    """
    return tuple([str(each.name) for each in columns])


def exact(length: int) -> sa.types.TypeEngine[str]:
    """Returns a string that is compared and ordered by its code points on every database.

    MariaDB folds case by default, and PostgreSQL orders by the language of the server, so that pages by key would differ. One
    difference remains: MariaDB takes trailing spaces for nothing when it compares.
    """
    binary = mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin")
    return _written(
        f"exact({length})",
        sa.String(length)
        .with_variant(sa.String(length, collation="C"), "postgresql")
        .with_variant(binary, "mysql")
        .with_variant(binary, "mariadb"),
    )


ExactString = exact

#: A uuid as its 36 characters of text, as all APIs write it.
Uuid = exact(36)


class JsonText(sa.types.TypeDecorator[Any]):
    """JSON kept as text, the same on every database; None stays NULL."""

    moorage_source = "JsonText()"
    impl = sa.Text().with_variant(mysql.LONGTEXT(), "mysql").with_variant(mysql.LONGTEXT(), "mariadb")
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Python data to text."""
        if value is None:
            return None
        # Most of the columns of most nodes.
        return "{}" if value == {} else json_text(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        """Text to Python data."""
        return None if value is None else json.loads(value)
