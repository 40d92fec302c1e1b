# SPDX-License-Identifier: Apache-2.0
"""The tables of Acme's plugins: prefixed, in a MetaData of their own, without foreign keys to Moorage's."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import Micros, Uuid, exact, new_metadata

__all__ = ["licences", "members", "metadata"]

metadata = new_metadata()

#: ``status``: available, taking, held, returning. ``fence``: the last token that wrote the row.
licences = sa.Table(
    "acme_licences",
    metadata,
    sa.Column("uuid", Uuid, primary_key=True),
    sa.Column("product", exact(80), nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("holder", exact(255), nullable=False),
    sa.Column("held_until", Micros, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
)

members = sa.Table(
    "acme_members",
    metadata,
    sa.Column("group_name", exact(80), primary_key=True),
    sa.Column("member", exact(160), primary_key=True),
    sa.Column("expires_at", Micros, nullable=False),
)
