# SPDX-License-Identifier: Apache-2.0
"""Executes a statement for many rows of parameters in one round trip.

A set form is derived from the statement for one row, so that the conditions of both are the same by construction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import visitors
from sqlalchemy.sql.functions import GenericFunction

from moorage.json_text import writer

__all__ = ["execute_set"]

_JSON = writer(ensure_ascii=False)


def execute_set(transaction: sa.Connection, statement: sa.Update | sa.Insert, rows: Sequence[Mapping[str, Any]]) -> int:
    """Executes an UPDATE, or an INSERT from a SELECT, for each of the rows; returns how many rows it has written in all.

    It is one statement on PostgreSQL and MariaDB. There no row sees what another one writes, and the rows are locked in no order.
    If other transactions may lock the same rows, lock them in an order before. No other rows are locked if the conditions name a
    key of the table. On SQLite the rows are executed one by one.

    :param rows: values of the statement's parameters: strings, integers or None. Each row has the same names and writes other rows
        of the table.
    """
    dialect = transaction.dialect.name
    if dialect == "sqlite" or len(rows) == 1:
        return transaction.execute(statement, rows).rowcount
    names = tuple(rows[0])
    if dialect == "postgresql":
        values: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    else:
        values = {"given": _JSON([[row[name] for name in names] for row in rows])}
    return transaction.execute(_as_set(statement, names, dialect), values).rowcount


#: Without a charset, a column of JSON_TABLE has the database's: latin1 would turn characters that it lacks into question marks.
_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


class _JsonTable(GenericFunction[Any]):
    """The rows of a JSON array of arrays, as MariaDB reads it."""

    name = "moorage_json_table"
    inherit_cache = True


@compiles(_JsonTable, "mysql")
@compiles(_JsonTable, "mariadb")
def _json_table(element: _JsonTable, compiler: Any, **more: Any) -> str:
    (rows, *columns) = element.clauses
    kinds = (
        f"{each.name} {'BIGINT' if isinstance(each.type, sa.Integer) else _TEXT} PATH '$[{place}]' ERROR ON ERROR"
        for place, each in enumerate(columns)
    )
    return f"JSON_TABLE({compiler.process(rows, **more)}, '$[*]' COLUMNS ({', '.join(kinds)}))"


class _GivenFirst(sa.Update):
    """An UPDATE for which MariaDB looks the table's rows up for each of the given rows, by a key of the table.

    If the table has few rows more than are given, the server would scan it and lock all its rows.
    """

    inherit_cache = True


@compiles(_GivenFirst, "mysql")
@compiles(_GivenFirst, "mariadb")
def _given_first(element: _GivenFirst, compiler: Any, **more: Any) -> str:
    def tables(_: sa.Update, written: sa.FromClause, given: Sequence[sa.FromClause], **more: Any) -> str:
        return " STRAIGHT_JOIN ".join(compiler.process(each, asfrom=True, **more) for each in (*given, written))

    compiler.update_tables_clause = tables
    text: str = compiler.visit_update(element, **more)
    return text


@functools.cache
def _as_set(statement: sa.Update | sa.Insert, names: tuple[str, ...], dialect: str) -> Any:
    """Returns the statement joined with a table of its parameters; built once.

    PostgreSQL reads that table from an array for each parameter, MariaDB from JSON.
    """
    types = {
        each.key: each.type
        for each in visitors.iterate(statement)
        if isinstance(each, sa.BindParameter) and each.key in names
    }
    columns = [sa.column(name, types[name]) for name in names]
    if dialect == "postgresql":
        arrays = [
            postgresql.ARRAY(sa.BigInteger() if isinstance(each.type, sa.Integer) else sa.Text()) for each in columns
        ]
        parameters = (
            sa.cast(sa.bindparam(name, type_=array), array) for name, array in zip(names, arrays, strict=True)
        )
        given = sa.func.unnest(*parameters).table_valued(*columns).render_derived(name="given")
    else:
        given = _JsonTable(sa.bindparam("given", type_=sa.Text), *columns).table_valued(*columns, name="given")

    def replace(element: Any, **_: Any) -> Any:
        return given.c[element.key] if isinstance(element, sa.BindParameter) and element.key in types else None

    joined: Any = visitors.replacement_traverse(statement, {}, replace)
    if dialect != "postgresql" and isinstance(statement, sa.Update):
        joined.__class__ = _GivenFirst
        unique = (each.name for each in joined.table.constraints if isinstance(each, sa.UniqueConstraint))
        joined = joined.with_hint(f"FORCE INDEX ({', '.join(['PRIMARY', *sorted(map(str, unique))])})")
    return joined.execution_options(preserve_rowcount=True)
