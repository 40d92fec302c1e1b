# SPDX-License-Identifier: Apache-2.0
"""Events in the log."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.observers.interface import EVENTS, Notice, Observer, ObserverTools

__all__ = ["LogObserver"]

LOG = logging.getLogger(__name__)


class LogObserver(Observer):
    """Writes a line for each event: its kind, then its fields as one JSON object."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: ObserverTools) -> None:
        super().__init__(tools)
        wanted = frozenset(tools.conf.observer_log.kinds)
        unknown = sorted(wanted - EVENTS.keys())
        if unknown:
            raise errors.ConfigError(
                f"[observer_log] kinds names {', '.join(unknown)}; there are: {', '.join(sorted(EVENTS))}."
            )
        self._wanted = wanted or EVENTS.keys()

    @override
    def observe(self, notice: Notice) -> None:
        if notice.event.kind not in self._wanted:
            return
        event: Any = notice.event
        # JSON, so that no name of an instance can pass for another line of the log.
        LOG.info("%s %s", notice.event.kind, json.dumps(asdict(event), sort_keys=True))
