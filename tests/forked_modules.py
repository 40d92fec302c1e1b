# SPDX-License-Identifier: Apache-2.0
"""Imports what processes of tests need, in the process that :mod:`tests.forking` forks them from."""

from __future__ import annotations

import gc
import pkgutil

from moorage.cli import roles, up, validation
from tests import forking
from tests.functional.allocation import claimer, victim

__all__ = ["claimer", "forking", "up", "validation", "victim"]

for _role in roles.ROLES.values():
    pkgutil.resolve_name(_role)

# The collector of a child need not look through the modules, nor copy them when it does.
gc.collect()
gc.freeze()
