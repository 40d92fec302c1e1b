# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server that follows another one, for tests of failover."""

from __future__ import annotations

import psycopg2
from typing_extensions import override

from tests.servers.base import HOST, newest
from tests.servers.kinds import Postgresql

__all__ = ["PostgresqlStandby"]


class PostgresqlStandby(Postgresql):
    """Follows ``primary``, whose commits wait for it once it is there (synchronous_standby_names)."""

    def __init__(self, primary: Postgresql) -> None:
        super().__init__(durable=True)
        self._primary = primary
        self.password = primary.password

    @override
    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PGPASSWORD": self.password}

    @override
    def prepare(self) -> None:
        if not (self.folder / "data").exists():
            program = newest("/usr/lib/postgresql/*/bin/pg_basebackup") or "pg_basebackup"
            where = ("--host", HOST, "--port", str(self._primary.port), "--username", "postgres")
            how = ("--checkpoint", "fast", "--wal-method", "stream", "--write-recovery-conf", "--no-sync")
            self._run(program, *where, *how, "--pgdata", str(self.folder / "data"))

    def follow(self) -> None:
        """From now on the primary acknowledges nothing that is not here too."""
        self._say(self._primary.port, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")

    def lag(self) -> None:
        """Receive everything and apply nothing, until promoted."""
        self._say(self.port, "SELECT pg_wal_replay_pause()")

    def promote(self) -> None:
        """Be the primary from now on."""
        self._say(
            self.port,
            "ALTER SYSTEM SET synchronous_standby_names = ''",
            "SELECT pg_reload_conf()",
            "SELECT pg_promote(true, 60)",
        )

    def _say(self, port: int, *statements: str) -> None:
        connection = psycopg2.connect(host=HOST, port=port, user="postgres", password=self.password, dbname="postgres")
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for each in statements:
                    cursor.execute(each)
        finally:
            connection.close()
