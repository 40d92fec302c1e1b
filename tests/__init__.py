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

import hypothesis

from tests import output

SOAK = os.environ.get("MOORAGE_SOAK", "") not in {"", "0"}
SOAK_FACTOR = 40
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

if os.environ.get("MOORAGE_TEST_LOG", "") not in {"", "0"}:
    logging.basicConfig(level=logging.INFO)
else:
    logging.getLogger().addHandler(logging.NullHandler())
    output.install()


def cases(quick: int) -> int:
    """How many random cases to run: ``quick`` of them, or SOAK_FACTOR times as many in ``make soak``."""
    return quick * SOAK_FACTOR if SOAK else quick


def seeded() -> random.Random:
    """A source of chance for one test: the seed of the environment, or 1 so that ``make test`` repeats itself."""
    return random.Random(int(os.environ.get("MOORAGE_SEED", "1")))
