# SPDX-License-Identifier: Apache-2.0
"""An allocation store in the memory of one process: the oracle that tests and benchmarks compare the sql store with."""

from __future__ import annotations

import importlib.metadata
import unittest
from unittest import mock

from moorage import extensions


def offer(test: unittest.TestCase) -> None:
    """Has ``[allocation] store = memory`` name the store for the time of a test: one that processes cannot share."""
    group = "moorage.allocation_stores"
    point = importlib.metadata.EntryPoint("memory", "tests.memory_store.store:MemoryStore", group)
    real = extensions.entry_points
    patched = mock.patch.object(
        extensions, "entry_points", lambda asked: [*real(asked), *([point] if asked == group else [])]
    )
    patched.start()
    test.addCleanup(patched.stop)
