# SPDX-License-Identifier: Apache-2.0
"""The tests, and the two sizes they run in: quick (``make test``) and soak (``make soak``).

Temporary files are kept in memory where there is room for them: SQLite waits for the disk at every commit. ``TMPDIR`` says
otherwise. ``MOORAGE_SOAK=1`` multiplies the number of random cases; ``MOORAGE_SEED`` repeats what a run with that seed did.

A run prints dots, failures and totals. What a test prints and logs is shown with its failure (see :mod:`tests.output`);
``MOORAGE_TEST_LOG=1`` prints all of it at once.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import hypothesis

from tests import output, queue

SOAK = os.environ.get("MOORAGE_SOAK", "") not in {"", "0"}
SOAK_FACTOR = 40
#: Whether nothing is left out: neither for want of a server, nor because it takes long.
WHOLE = os.environ.get("MOORAGE_REQUIRE_SERVERS", "") not in {"", "0"}
T = TypeVar("T", bound=Callable[..., Any])
QUICK_EXAMPLES = 50

hypothesis.settings.register_profile("quick", deadline=None, max_examples=QUICK_EXAMPLES, print_blob=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=QUICK_EXAMPLES * SOAK_FACTOR, print_blob=True)
hypothesis.settings.load_profile("soak" if SOAK else "quick")

#: A folder in memory, and how much must be free there.
MEMORY = "/dev/shm"
MEMORY_ROOM = 4 << 30

if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_ROOM:
    # In the environment too: what tests start does the same.
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

# The variable is the caller's; it is removed for the hundreds of processes that tests start: without compiled files each would
# compile every module again, and the interpreter of ``make coverage`` would measure them.
for _name in ("PYTHONDONTWRITEBYTECODE", "PYTHON"):
    os.environ.pop(_name, None)

#: The folder of the run's queue; not for processes that tests start, which may run tests of their own.
_QUEUE = os.environ.pop("MOORAGE_TEST_QUEUE", "")

if os.environ.get("MOORAGE_TEST_LOG", "") not in {"", "0"}:
    logging.basicConfig(level=logging.INFO)
else:
    logging.getLogger().addHandler(logging.NullHandler())
    output.install()


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """All tests; in a worker of a run, the queue that the workers share (see :mod:`tests.queue`)."""
    folder = Path(__file__).parent
    return queue.of_worker(_QUEUE) or loader.discover(str(folder), pattern or "test*.py", str(folder.parent))


def for_ci(why: str) -> Callable[[T], T]:
    """Leaves tests out that take long and seldom find what no other one does, unless everything is to run, as in CI."""
    return unittest.skipUnless(WHOLE, f"{why}; MOORAGE_REQUIRE_SERVERS=1 runs it, as .ci/run does")


def cases(quick: int) -> int:
    """How many random cases to run: ``quick`` of them, or SOAK_FACTOR times as many in ``make soak``."""
    return quick * SOAK_FACTOR if SOAK else quick


def seeded() -> random.Random:
    """A source of chance for one test: the seed of the environment, or 1 so that ``make test`` repeats itself."""
    return random.Random(int(os.environ.get("MOORAGE_SEED", "1")))
