# SPDX-License-Identifier: Apache-2.0
"""Refused requests by project."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

from moorage.observers.interface import Notice, Observer, ObserverTools, RequestRefused

__all__ = ["RefusalsObserver"]


class RefusalsObserver(Observer):
    """Counts refused requests by project and reason, in a JSON file for each process that is written when nothing else happens."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    kinds = frozenset({RequestRefused.kind})

    def __init__(self, tools: ObserverTools) -> None:
        super().__init__(tools)
        folder = Path(tools.conf.control_plane.state_dir)
        given = Path(tools.conf.acme_refusals.file or folder / "refusals.json")
        self._file = given.with_name(f"{given.stem}-{tools.source.service}{given.suffix}")
        self._counts: dict[str, dict[str, int]] = {}

    def observe(self, notice: Notice) -> None:
        """Count it; kinds says that there are no other events."""
        event = notice.event
        if isinstance(event, RequestRefused):
            reasons = self._counts.setdefault(event.project, {})
            reasons[event.summary] = reasons.get(event.summary, 0) + 1

    def flush(self) -> None:
        """Replace the file as a whole, so that nobody reads half of it."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._counts, sort_keys=True))
        os.replace(new, self._file)

    def close(self) -> None:
        """What was not written yet."""
        if self._counts:
            self.flush()
