# SPDX-License-Identifier: Apache-2.0
"""Ranges of ring positions as a condition of a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

__all__ = ["within"]


def within(column: sa.ColumnElement[Any], ranges: Sequence[tuple[int, int]]) -> sa.ColumnElement[bool]:
    """Returns a condition: an indexed BIGINT column is in one of the half-open ranges (first, end). It is false without ranges.

    The ranges of a member with 40 points are read through the index at a small part of the cost of fetching every row.
    """
    # The end of the last range is one more than the largest BIGINT.
    return sa.or_(sa.false(), *(column.between(first, end - 1) for first, end in ranges))
