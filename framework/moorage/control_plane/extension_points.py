# SPDX-License-Identifier: Apache-2.0
"""All extension points in one table, for ``moorage plugin``, the log and the upgrade check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moorage.allocation.interface import DETECTORS, STORES
from moorage.cleanup.interface import CLEANUP_HANDLERS
from moorage.control_plane.interface import AGENT_SERVICES, API_EXTENSIONS, INSTANCE_STORES
from moorage.coordination.interface import BACKENDS, PERIODIC_TASKS
from moorage.extensions import ExtensionPoint, Finding
from moorage.observers.interface import OBSERVERS
from moorage.rpc.interface import TRANSPORTS
from moorage.scheduling.interface import FILTERS, WEIGHERS
from moorage.sharding.interface import STRATEGIES

__all__ = ["EXTENSION_POINTS", "survey"]

EXTENSION_POINTS: Sequence[ExtensionPoint[Any]] = (
    FILTERS,
    WEIGHERS,
    STORES,
    DETECTORS,
    STRATEGIES,
    INSTANCE_STORES,
    AGENT_SERVICES,
    API_EXTENSIONS,
    CLEANUP_HANDLERS,
    TRANSPORTS,
    BACKENDS,
    PERIODIC_TASKS,
    OBSERVERS,
)


def survey() -> list[Finding]:
    """What is installed in all groups; imports it."""
    return [finding for point in EXTENSION_POINTS for finding in point.survey()]
