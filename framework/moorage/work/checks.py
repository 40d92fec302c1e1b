# SPDX-License-Identifier: Apache-2.0
"""What the upgrade check looks at of operations."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from oslo_config import cfg

from moorage.db import Database
from moorage.work.interface import Phase
from moorage.work.tables import workers

__all__ = ["upgrade_check"]

_QUARANTINED = sa.select(workers.c.resource_type, sa.func.count()).where(workers.c.phase == Phase.QUARANTINED.value)


def upgrade_check(conf: cfg.ConfigOpts) -> Sequence[str]:
    """No operation waits for a person."""
    with Database.from_config(conf).read() as tx:
        return [
            f"{count} of {kind} are quarantined; moorage cleanup list --phase quarantined shows them."
            for kind, count in tx.execute(_QUARANTINED.group_by(workers.c.resource_type))
        ]
