# SPDX-License-Identifier: Apache-2.0
"""The statuses of jobs and clusters that commands, routes and store agree on; imports nothing, so that commands start quickly."""

from __future__ import annotations

__all__ = ["ENDED", "OPEN", "RESETTABLE"]

#: Statuses of jobs that change no more, and those before.
ENDED = ("Succeeded", "Failed", "Killed")
OPEN = ("Pending", "Running", "ToBeKilled")
#: Statuses of clusters that an operator may set.
RESETTABLE = ("Active", "Error")
