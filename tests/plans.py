# SPDX-License-Identifier: Apache-2.0
"""How a database executes a statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

__all__ = ["plan_of"]


def plan_of(transaction: sa.Connection, statement: Any, parameters: Mapping[str, Any]) -> str:
    """What the database says of how it executes the statement, as text."""
    verb = "EXPLAIN QUERY PLAN" if transaction.dialect.name == "sqlite" else "EXPLAIN"
    filled = statement.compile(dialect=transaction.dialect).construct_expanded_state(parameters)
    values, names = filled.parameters, filled.positiontup
    given: Any = values if names is None else tuple(values[name] for name in names)
    return str(transaction.exec_driver_sql(f"{verb} {filled.statement}", given).all())
