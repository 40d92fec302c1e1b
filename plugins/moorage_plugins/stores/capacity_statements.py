# SPDX-License-Identifier: Apache-2.0
"""The statements that decide whether a provider has room: they take amounts of its resource classes, and give them back.

The conditions stand in the statement that writes the row. Amounts and totals are whole numbers up to 2**31 and the ratio is a
double: ``(total - reserved) * allocation_ratio`` is one multiplication of IEEE doubles on SQLite, PostgreSQL, MariaDB and in
Python, and ``used + amount`` stays below 2**53, so all compare alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sqlalchemy as sa

from moorage_plugins.stores.checks import SEED_RULE
from moorage_plugins.stores.tables import inventories

__all__ = ["release", "take"]

_OF_PROVIDER = sa.bindparam("of_provider", type_=sa.BigInteger)
_LARGE = sa.BigInteger


@functools.lru_cache(maxsize=64)
def take(classes: int, step_rule: str, lowering: bool = False, times: bool = False) -> sa.Update:
    """Take amounts of ``classes`` resource classes of a provider, each where all its conditions hold.

    Parameters: of_provider, and class_N and amount_N for N below ``classes``; when ``lowering``, lowers_N too: 1 lets the class
    be taken above its capacity, because no more is taken than was given back before; with ``times``, the parameter of that name:
    how often each amount is taken. It took everything when the rowcount is ``classes``; otherwise the transaction must be rolled
    back.
    """
    factor = sa.bindparam("times", type_=_LARGE)
    conditions = []
    for place, (of_class, amount) in enumerate(_pairs(classes)):
        stepped: sa.ColumnElement[bool] = amount % inventories.c.step_size == 0
        if step_rule == SEED_RULE:
            stepped = sa.or_(inventories.c.min_unit == amount, stepped)
        fits: sa.ColumnElement[bool] = (
            inventories.c.used + (amount * factor if times else amount)
            <= (inventories.c.total - inventories.c.reserved) * inventories.c.allocation_ratio
        )
        if lowering:
            fits = sa.or_(sa.bindparam(f"lowers_{place}", type_=sa.Integer) == 1, fits)
        conditions.append(
            sa.and_(
                inventories.c.resource_class_id == of_class,
                inventories.c.min_unit <= amount,
                inventories.c.max_unit >= amount,
                stepped,
                fits,
            )
        )
    return (
        sa.update(inventories)
        .where(inventories.c.resource_provider_id == _OF_PROVIDER, sa.or_(*conditions))
        .values(used=inventories.c.used + (_amount(classes) * factor if times else _amount(classes)))
    )


@functools.lru_cache(maxsize=64)
def release(classes: int) -> sa.Update:
    """Give amounts of ``classes`` resource classes of a provider back; parameters as for :func:`take`."""
    return (
        sa.update(inventories)
        .where(
            inventories.c.resource_provider_id == _OF_PROVIDER,
            inventories.c.resource_class_id.in_([of_class for of_class, _ in _pairs(classes)]),
        )
        .values(used=inventories.c.used - _amount(classes))
    )


def _pairs(classes: int) -> Sequence[tuple[sa.BindParameter[int], sa.BindParameter[int]]]:
    return [
        (sa.bindparam(f"class_{number}", type_=sa.Integer), sa.bindparam(f"amount_{number}", type_=_LARGE))
        for number in range(classes)
    ]


def _amount(classes: int) -> sa.ColumnElement[int]:
    whens = [(inventories.c.resource_class_id == of_class, amount) for of_class, amount in _pairs(classes)]
    return sa.case(*whens, else_=sa.literal(0, _LARGE))
