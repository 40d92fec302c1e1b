# SPDX-License-Identifier: Apache-2.0
"""Tables of the journal; :mod:`moorage.db.events` inserts events, :mod:`moorage.journal` numbers and reads them."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, core_metadata, exact, partial_index

__all__ = ["event_sequence", "events"]

#: Readers see numbered events only. The sequencer pays for the indexes of their filters, and not the transaction of a change
#: (MariaDB has no such indexes).
_NUMBERED = partial_index("number IS NOT NULL")

#: The journal: one row for each recorded change. ``number`` is NULL until a sequencer has numbered the row.
events = sa.Table(
    "events",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("number", sa.BigInteger),
    sa.Column("kind", exact(64), nullable=False),
    sa.Column("subject", exact(255), nullable=False),
    #: The fence, epoch or generation of the subject's row after the change.
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("at", Micros, nullable=False),
    sa.Column("actor", exact(255), nullable=False),
    #: The service that wrote the change, as ``scheduler:scheduler-1``.
    sa.Column("service", exact(255), nullable=False),
    sa.Column("project_id", exact(255), nullable=False),
    sa.Column("request_id", exact(64), nullable=False),
    sa.Column("global_request_id", exact(64), nullable=False),
    sa.Column("state", JsonText, nullable=False),
    sa.UniqueConstraint("number", name="uq_events_number"),
    sa.Index("ix_events_subject", "subject", "number", **_NUMBERED),
    sa.Index("ix_events_project_id", "project_id", "number", **_NUMBERED),
    sa.Index("ix_events_actor", "actor", "number", **_NUMBERED),
    sa.Index("ix_events_kind", "kind", "number", **_NUMBERED),
    # A request has few events, which are sorted by number.
    sa.Index("ix_events_request_id", "request_id", **_NUMBERED),
    sa.Index("ix_events_global_request_id", "global_request_id", **_NUMBERED),
)

#: One row: the last number that was given, the last number that was purged, and the lease of the sequencer.
event_sequence = sa.Table(
    "event_sequence",
    core_metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("last", sa.BigInteger, nullable=False),
    sa.Column("purged", sa.BigInteger, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("owner", exact(255), nullable=False),
    sa.Column("expires_at", Micros, nullable=False),
)
