# SPDX-License-Identifier: Apache-2.0
"""A developer's tool: write a revision from what the tables of the code have and the revisions do not.

``python -m moorage.db.autogenerate "add a column" [part]``. The result is a draft: read it, and let ruff format it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moorage import errors
from moorage.db.database import Database
from moorage.db.migrations import Migrations, discover

__all__ = ["main", "write_revision"]


def write_revision(migrations: Migrations, message: str) -> str:
    """Write the next migration of one chain and return its number. It compares models with an empty, temporary SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{Path(folder) / 'draft.sqlite'}")
        try:
            # The base is there before the chain of any part.
            for each in (*discover(), migrations):
                each.upgrade(database)
            last = migrations.version(database)
            revision = f"{int(last or '0') + 1:04d}"
            migrations.write_revision(database, message, revision)
        finally:
            database.close()
    return revision


def main(arguments: Sequence[str]) -> int:
    """Write the revision that the command line asks for; the exit status."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write('Usage: python -m moorage.db.autogenerate "what changes" [part]\n')
        return 2
    wanted = arguments[1] if len(arguments) == 2 else "moorage"
    known = {each.name: each for each in discover()}
    if wanted not in known:
        sys.stderr.write(f"No part {wanted} has migrations; known are: {', '.join(sorted(known))}.\n")
        return 2
    try:
        sys.stdout.write(f"Wrote revision {write_revision(known[wanted], arguments[0])} of {wanted}.\n")
    except errors.MoorageError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
