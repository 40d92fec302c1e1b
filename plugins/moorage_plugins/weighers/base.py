# SPDX-License-Identifier: Apache-2.0
"""What the weighers share: a multiplier from the options, which aggregates may set for their nodes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostWeigher, Rows

__all__ = ["AggregateWeigher", "Floats"]

LOG = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]


class AggregateWeigher(HostWeigher):
    """A weigher with the option ``[<group>] multiplier`` and the metadata ``<aggregate_key>`` of aggregates.

    The least of several aggregates' values counts; one that is no number leaves the option in force, with a line in the log.
    """

    group: ClassVar[str]
    aggregate_key: ClassVar[str]
    #: -1.0 for weighers whose multiplier says how much their subject is avoided.
    sign: ClassVar[float] = 1.0

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        # A reload builds new ones; to ask the configuration takes longer than to weigh.
        self._general = float(conf[self.group].multiplier)

    @property
    @override
    def multiplier(self) -> float:
        return self.sign * self._general

    @override
    def row_multipliers(self, fleet: Fleet, rows: Rows) -> Floats | None:
        column = fleet.aggregate_column(self.aggregate_key)
        if not any(column.values):
            return None
        each = [self.sign * least(self.aggregate_key, texts, self._general) for texts in column.values]
        multipliers: Floats = np.array(each, dtype=np.float64)[column.codes[rows]]
        return multipliers


def least(key: str, texts: Iterable[str], general: float) -> float:
    """Returns the least of what aggregates say; ``general`` when they say nothing, or something that is no number."""
    try:
        found = min((float(text) for text in texts), default=general)
    except ValueError as error:
        _warn_once(key, str(error))
        return general
    return found if np.isfinite(found) else general


@functools.lru_cache(1024)
def _warn_once(key: str, problem: str) -> None:
    LOG.warning("The metadata %s of an aggregate is no number (%s); the option counts there.", key, problem)
