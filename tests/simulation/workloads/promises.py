# SPDX-License-Identifier: Apache-2.0
"""Creates, moves and resizes under the filter ``type_affinity``: no node ever has instances of two flavors."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from typing_extensions import override

from moorage.db import Database
from tests.simulation.workloads.placement import HOSTS, Placement, enrol

__all__ = ["Promises"]


class Promises(Placement):
    """As :class:`Placement`, with larger nodes and a filter that judges the instances of a node."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        ("scheduling", "enabled_filters"): ["compute", "capacity", "type_affinity"],
    }

    room_decides: ClassVar[bool] = False
    reloaded: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.reloaded,
        ("scheduling", "enabled_filters"): ["type_affinity", "capacity"],
    }

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, 8)

    @override
    def check_step(self) -> None:
        super().check_step()
        there: dict[str, dict[str, set[str]]] = {}
        occupying = "SELECT uuid, node_uuid, flavorid, pending FROM instances WHERE status NOT IN ('error', 'shelved_offloaded')"
        for uuid, node, flavor, pending in self.rows(occupying):
            there.setdefault(node, {}).setdefault(uuid, set()).add(flavor)
            to = json.loads(pending) if pending else {}
            if to.get("node_uuid"):
                # Until a move ends the instance is on both nodes: with its old flavor, and with its new one.
                there.setdefault(to["node_uuid"], {}).setdefault(uuid, set()).add(to["flavorid"])
        for node, by_instance in there.items():
            for uuid, flavors in by_instance.items():
                others = {each for other, some in by_instance.items() if other != uuid for each in some}
                self.require(
                    not others or others == flavors, f"node {node} has instances of several flavors: {by_instance}"
                )
