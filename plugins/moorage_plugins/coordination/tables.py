# SPDX-License-Identifier: Apache-2.0
"""Members of groups; written by :mod:`moorage_plugins.coordination.database` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import Micros, Uuid, exact
from moorage_plugins.schema import plugins_metadata

__all__ = ["members"]

members = sa.Table(
    "coordination_members",
    plugins_metadata,
    sa.Column("group_name", exact(80), primary_key=True),
    sa.Column("member", exact(160), primary_key=True),
    sa.Column("service", Uuid, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("joined_at", Micros, nullable=False),
)
