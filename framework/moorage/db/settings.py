# SPDX-License-Identifier: Apache-2.0
"""Settings of database connections."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DatabaseSettings"]


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """How connections are made; durations in seconds."""

    pool_size: int = 10
    pool_timeout: int = 30
    recycle: int = 3600
    lock_timeout: int = 10
    #: The server ends a writing transaction that does nothing for so long.
    idle_timeout: float = 30.0
    wsrep_sync_wait: int | None = None
