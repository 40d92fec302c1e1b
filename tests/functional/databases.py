# SPDX-License-Identifier: Apache-2.0
"""Test cases that get the URL of a fresh database on a server."""

from __future__ import annotations

import unittest

from tests import servers

__all__ = ["MariadbCase", "PostgresqlCase"]


class PostgresqlCase(unittest.TestCase):
    url: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbCase(unittest.TestCase):
    url: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
