# SPDX-License-Identifier: Apache-2.0
"""Options of the store engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from oslo_config import cfg
from oslo_db import options as oslo_db_options

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("database", title="The store")
_OSLO_DB = {each.name: each for each in oslo_db_options.database_opts}

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "connection",
        secret=True,
        help="URL of the database: sqlite:////path/file, postgresql+psycopg2://user:password@host/name or "
        "mysql+pymysql://user:password@host/name. Unset: a SQLite file in the state directory. Needs a restart.",
    ),
    cfg.IntOpt(
        "max_pool_size",
        default=10,
        min=1,
        help="Connections that one process keeps open for writing, and as many for reading; up to twice as many under load. "
        "Needs a restart.",
    ),
    cfg.IntOpt("pool_timeout", default=30, min=1, help="Seconds to wait for a free connection of the pool."),
    cfg.IntOpt(
        "lock_timeout",
        default=10,
        min=1,
        help="Seconds that a statement waits for a lock before the transaction is undone and run again. On SQLite: seconds that "
        "a transaction waits for its turn to write.",
    ),
    cfg.IntOpt("connection_recycle_time", default=3600, min=1, help="Seconds after which a connection is replaced."),
    cfg.IntOpt(
        "attempts",
        default=10,
        min=1,
        help="How often a transaction that lost a race is run in all; no try begins later than twice lock_timeout after the "
        "first.",
    ),
    copy.deepcopy(_OSLO_DB["mysql_wsrep_sync_wait"]),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
