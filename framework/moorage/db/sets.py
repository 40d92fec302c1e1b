# SPDX-License-Identifier: Apache-2.0
"""Executes a statement for many rows of parameters in one round trip.

A set form is derived from the statement for one row, so that the conditions of both are the same by construction.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import visitors
from sqlalchemy.sql.functions import GenericFunction

__all__ = ["execute_set"]


def execute_set(transaction: sa.Connection, statement: sa.Update | sa.Insert, rows: Sequence[Mapping[str, Any]]) -> int:
    """Executes an UPDATE, or an INSERT from a SELECT, for each of the rows; returns how many rows it has written in all.

    It is one statement on PostgreSQL and MariaDB. There no row sees what another one writes, and the rows are locked in no order.
    If other transactions may lock the same rows, lock them in an order before. On SQLite the rows are executed one by one.

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
        values = {"given": json.dumps([[row[name] for name in names] for row in rows], ensure_ascii=False)}
    return transaction.execute(_as_set(statement, names, dialect), values).rowcount


class _JsonTable(GenericFunction[Any]):
    """The rows of a JSON array of arrays, as MariaDB reads it."""

    name = "moorage_json_table"
    inherit_cache = True


@compiles(_JsonTable, "mysql")
@compiles(_JsonTable, "mariadb")
def _json_table(element: _JsonTable, compiler: Any, **more: Any) -> str:
    (rows, *columns) = element.clauses
    kinds = (
        f"{each.name} {'BIGINT' if isinstance(each.type, sa.Integer) else 'LONGTEXT'} PATH '$[{place}]' ERROR ON ERROR"
        for place, each in enumerate(columns)
    )
    return f"JSON_TABLE({compiler.process(rows, **more)}, '$[*]' COLUMNS ({', '.join(kinds)}))"


@functools.cache
def _as_set(statement: sa.Update | sa.Insert, names: tuple[str, ...], dialect: str) -> Any:
    """The statement joined with a table of its parameters; built once.

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
    return joined.execution_options(preserve_rowcount=True)
