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
        if row["role"] == "scheduler" and row["pid"] and _kill(row["pid"], row["name"]):
            return f"{row['name']} (process {row['pid']})"
    raise errors.NotFound(f"No scheduler of {state_dir} runs that could be ended.")


def _kill(pid: int, name: str) -> bool:
    """SIGKILL for the process, if it is that scheduler: the table may be older than the process of that number."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # What is read now is of the process that the descriptor is of, or it is gone and the signal reaches nobody.
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        if "moorage.cli.roles" not in words or ["scheduler", "--name", name] not in _triples(words):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _triples(words: list[str]) -> list[list[str]]:
    return [words[at : at + 3] for at in range(len(words))]
