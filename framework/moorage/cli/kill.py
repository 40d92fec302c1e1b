# SPDX-License-Identifier: Apache-2.0
"""Ending a process of a control plane on this machine, to show that nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from moorage import errors

__all__ = ["kill_one_scheduler"]


def kill_one_scheduler(state_dir: Path) -> str:
    """SIGKILL for the first scheduler that runs; its name.

    :raises NotFound: none runs.
    """
    path = state_dir / "run" / "processes.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.NotFound(
            f"{path} cannot be read: {error}. Is that the state folder of a control plane?"
        ) from error
    for row in table:
        if row["role"] == "scheduler" and row["pid"]:
            os.kill(row["pid"], signal.SIGKILL)
            return f"{row['name']} (process {row['pid']})"
    raise errors.NotFound("No scheduler runs there that could be ended.")
