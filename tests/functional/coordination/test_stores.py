# SPDX-License-Identifier: Apache-2.0
"""Ledger, claims and controls on PostgreSQL and MariaDB."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time

from moorage import errors
from tests import servers
from tests.unit.coordination import store_tests
from tests.unit.coordination.store_tests import a_claim

LOG = logging.getLogger(__name__)

#: An engine that stops itself (SIGSTOP) in the middle of a handling's transaction.
_FREEZES = """
import os, signal, sys
from moorage import errors
from moorage.coordination.tick_leases import SqlTickLeases, TickLease
from moorage.db import Database

url, idle, sweep = sys.argv[1:]
store = SqlTickLeases(Database(url, idle_timeout=float(idle)))
try:
    with store.write() as tx:
        for each in ("o3", "o7"):
            store.end(tx, TickLease("task", 1, 1, "frozen", sweep), each)
        print("holding", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        store.end(tx, TickLease("task", 1, 1, "frozen", sweep), "o9")
except (errors.StoreUnavailable, errors.StoreBusy) as error:
    print("lost", type(error).__name__)
"""
#: Seconds after which the server ends a transaction that does nothing.
IDLE = 10


class Frozen:
    """Keeps the tests from being found without a server."""

    class Tests(store_tests.StoreTests):
        """On servers that have row locks."""

        def test_rows_of_a_frozen_engine_hold_up_no_other_engine(self) -> None:
            objects = [f"o{number}" for number in range(500)]
            first = a_claim(1, owner="frozen")
            self.assertEqual(objects, self.claims.claim(first, objects))
            frozen = subprocess.Popen(
                [sys.executable, "-c", _FREEZES, self.url, str(IDLE), first.sweep], stdout=subprocess.PIPE, text=True
            )
            self.addCleanup(frozen.wait)
            self.addCleanup(frozen.kill)
            assert frozen.stdout is not None
            self.addCleanup(frozen.stdout.close)
            self.assertEqual("holding\n", frozen.stdout.readline())
            begun = time.monotonic()
            # Had it waited for the frozen transaction, it would have got those two as well.
            claimed = self.claims.claim(a_claim(2, owner="other"), objects)
            took = time.monotonic() - begun
            self.assertEqual([each for each in objects if each not in ("o3", "o7")], claimed)
            # The server ends the frozen transaction, and its rows are free.
            late = a_claim(3, owner="other")
            servers.wait_until(
                lambda: self.claims.claim(late, ["o3", "o7"]) == ["o3", "o7"], "the frozen rows", IDLE + 40
            )
            LOG.warning("%s: claimed in %.3f s, all free after %.1f s", self.id(), took, time.monotonic() - begun)
            frozen.send_signal(signal.SIGCONT)
            self.assertIn("lost", frozen.communicate(timeout=60)[0])
            with self.assertRaises(errors.Fenced):
                self.claims.run(lambda tx: self.claims.end(tx, first, "o3"))


class PostgresqlStoreTests(Frozen.Tests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbStoreTests(Frozen.Tests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
