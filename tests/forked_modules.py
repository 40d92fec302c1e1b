# SPDX-License-Identifier: Apache-2.0
"""Imports what processes of tests need, in the process that :mod:`tests.forking` forks them from."""

from __future__ import annotations

import gc
import pkgutil
import tempfile
from pathlib import Path

from moorage.cli import roles, up, validation
from moorage.db import Database, migrations
from tests import forking
from tests.functional.allocation import claimer, victim

__all__ = ["claimer", "forking", "up", "validation", "victim"]

for _role in roles.ROLES.values():
    pkgutil.resolve_name(_role)

# What a start imports late (parts, plugins, migrations), by doing what `moorage up` does before it starts the roles.
with tempfile.TemporaryDirectory() as _folder:
    _conf = up.LaunchPlan(Path(_folder), coordination="database").load()
    validation.check(_conf)
    _database = Database.from_config(_conf)
    migrations.upgrade_all(_database)
    _database.close()

# The collector of a child need not look through the modules, nor copy them when it does.
gc.collect()
gc.freeze()
