# SPDX-License-Identifier: Apache-2.0
"""A member as a process: URL of the server, of the database. Answers each line of its input with what it owns."""

from __future__ import annotations

import json
import sys
import time
import unittest

from moorage.db import Database
from tests.functional.coordination.nodes import Node


class _Case(unittest.TestCase):
    def runTest(self) -> None:
        """Nothing: it is here for its cleanups."""


def main() -> None:
    url, database_url = sys.argv[1:]
    case = _Case()
    node = Node(case, url, Database(database_url, lock_timeout=30))
    for _ in sys.stdin:
        member = node.membership.member_id
        told = {
            "owned": node.owned(),
            "member": member.decode() if member else None,
            "state": node.membership.state.value,
            "time": time.time(),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    case.doCleanups()


if __name__ == "__main__":
    main()
