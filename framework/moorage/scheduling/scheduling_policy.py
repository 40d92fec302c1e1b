# SPDX-License-Identifier: Apache-2.0
"""How a scheduler decides: the plugins, and how many nodes it tries. A reload changes it."""

from __future__ import annotations

from dataclasses import dataclass

from moorage.scheduling.filter_and_weigh import Pipeline
from moorage.scheduling.plugin_runner import PluginRunner

__all__ = ["SchedulingPolicy"]


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """What a reload may change, taken once for each request.

    :param sample_above: fleets of more nodes are sampled where the pipeline allows that; 0: none are.
    :param shuffle_best: equally good nodes are tried in random order.
    """

    pipeline: Pipeline
    guard: PluginRunner
    host_subset_size: int
    max_attempts: int
    alternates: int = 2
    shuffle_best: bool = False
    sample_above: int = 0

    @property
    def looked_at(self) -> int | None:
        """How many of the best nodes of a ranking are ever looked at; None: all, since equally good ones are shuffled."""
        return None if self.shuffle_best else max(self.max_attempts, self.host_subset_size)

    def samples(self, size: int) -> bool:
        """Returns whether requests to a fleet of so many nodes are decided by a sample of it."""
        return 0 < self.sample_above < size and self.pipeline.spreads
