# SPDX-License-Identifier: Apache-2.0
"""Versions for instances that have none, on SQLite."""

from __future__ import annotations

from tests.unit.instances.adoption_tests import AdoptionTests
from tests.unit.scheduling.test_flavors import SqliteCase


class TestAdoption(AdoptionTests, SqliteCase):
    pass
