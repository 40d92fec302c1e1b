# SPDX-License-Identifier: Apache-2.0
"""Indexes for the filters of the journal"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_NUMBERED = sa.text("number IS NOT NULL")


def _create(name: str, *columns: str) -> None:
    op.create_index(name, "events", [*columns], unique=False, sqlite_where=_NUMBERED, postgresql_where=_NUMBERED)


def upgrade() -> None:
    if op.get_context().dialect.name != "mysql":
        # They contain numbered events only from now on. MariaDB has no such indexes.
        op.drop_index("ix_events_request_id", table_name="events")
        op.drop_index("ix_events_subject", table_name="events")
        _create("ix_events_request_id", "request_id")
        _create("ix_events_subject", "subject", "number")
    _create("ix_events_project_id", "project_id", "number")
    _create("ix_events_actor", "actor", "number")
    _create("ix_events_kind", "kind", "number")
    _create("ix_events_global_request_id", "global_request_id")
