# SPDX-License-Identifier: Apache-2.0
"""The workloads of the simulation, by name."""

from __future__ import annotations

from tests.simulation.workloads.automatic_evacuations import AutomaticEvacuations
from tests.simulation.workloads.base import Workload
from tests.simulation.workloads.claims import Claims
from tests.simulation.workloads.cleaning import Cleaning
from tests.simulation.workloads.creates import Creates
from tests.simulation.workloads.deliveries import Deliveries
from tests.simulation.workloads.evacuations import Evacuations
from tests.simulation.workloads.histories import ConsumerHistories, InstanceHistories
from tests.simulation.workloads.leases import Leases
from tests.simulation.workloads.moves import Moves
from tests.simulation.workloads.placement import Placement
from tests.simulation.workloads.promises import Promises
from tests.simulation.workloads.quotas import Quotas
from tests.simulation.workloads.self_fences import SelfFences
from tests.simulation.workloads.shards import Shards
from tests.simulation.workloads.shared_instances import SharedInstances
from tests.simulation.workloads.stale_feeds import StaleFeeds
from tests.simulation.workloads.sweeps import Sweeps
from tests.simulation.workloads.ticks import Ticks
from tests.simulation.workloads.versions import Versions
from tests.simulation.workloads.volumes import Volumes

__all__ = ["WORKLOADS"]

WORKLOADS: dict[str, type[Workload]] = {
    "placement": Placement,
    "creates": Creates,
    "stale_feeds": StaleFeeds,
    "promises": Promises,
    "claims": Claims,
    "cleaning": Cleaning,
    "ticks": Ticks,
    "leases": Leases,
    "sweeps": Sweeps,
    "shards": Shards,
    "volumes": Volumes,
    "deliveries": Deliveries,
    "evacuations": Evacuations,
    "self_fences": SelfFences,
    "automatic_evacuations": AutomaticEvacuations,
    "quotas": Quotas,
    "consumer_histories": ConsumerHistories,
    "instance_histories": InstanceHistories,
    "versions": Versions,
    "moves": Moves,
    "shared_instances": SharedInstances,
}
