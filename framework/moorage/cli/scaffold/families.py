# SPDX-License-Identifier: Apache-2.0
"""What ``moorage plugin new`` can write: one template for each family of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EXCEPTIONS", "FAMILIES", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of plugin.

    :param name: what the author writes, and the folder of its templates.
    :param group: the entry-point group.
    :param suffix: how the class's name ends.
    :param see: how its author sees it work in a running control plane, one sentence; ``$plugin`` is its name.
    :param parts: folders of templates that it shares with others, before its own.
    :param value: what a deployer writes for the plugin in the option that chooses; the option is the extension point's.
    """

    name: str
    group: str
    suffix: str
    see: str
    parts: tuple[str, ...] = ()
    value: str = "$plugin"


_ALL = (
    Family(
        "filter",
        "moorage.filters",
        "Filter",
        "``moorage select --explain`` shows how many nodes each filter removed.",
    ),
    Family(
        "weigher",
        "moorage.weighers",
        "Weigher",
        "``moorage select --explain`` shows the nodes in the order that the weighers gave them.",
        ("with-options",),
    ),
    Family(
        "allocation-store",
        "moorage.allocation_stores",
        "Store",
        "``moorage plugin check`` loads it; with ``[allocation] store`` the roles use it.",
    ),
    Family(
        "shard-strategy",
        "moorage.shard_strategies",
        "Strategy",
        "``moorage shard plan`` shows where it would have each node, and why.",
    ),
    Family(
        "transport",
        "moorage.transports",
        "Transport",
        "``moorage plugin check`` loads it; the roles use it once it declares CROSS_PROCESS.",
        value="$plugin://",
    ),
    Family(
        "api",
        "moorage.api",
        "Api",
        "``curl -u USER:PASSWORD http://HOST:PORT/$plugin/`` shows what it answers.",
    ),
    Family(
        "coordination-backend",
        "moorage.coordination",
        "Backend",
        "``moorage ring show`` shows the engines that are members, and what part each has.",
        value="$plugin:///run/members",
    ),
    Family(
        "periodic-task",
        "moorage.periodic_tasks",
        "Task",
        "After ``moorage-manage db upgrade``, ``moorage periodic show $plugin`` shows its runs.",
        ("with-table",),
    ),
    Family(
        "cleanup-handler",
        "moorage.cleanup_handlers",
        "Handler",
        "After ``moorage-manage db upgrade``, ``moorage cleanup history`` shows what became of items whose service died.",
        ("with-table",),
    ),
    Family(
        "agent-service",
        "moorage.agent_services",
        "Agent",
        "After ``moorage-manage db upgrade`` and a restart, ``POST /scheduling/v1/$plugin/items`` has an agent make an item.",
        ("with-table",),
    ),
    Family(
        "compute-driver",
        "moorage.compute_drivers",
        "Driver",
        "``moorage instance create`` builds with it on every agent that has chosen it.",
        ("with-options",),
    ),
    Family(
        "orphan-detector",
        "moorage.orphan_detectors",
        "Detector",
        "After ``moorage-manage db upgrade``, ``moorage allocation audit`` lists claims that hold room for nothing.",
        ("with-table",),
    ),
    Family(
        "quota-source",
        "moorage.quota_sources",
        "Source",
        "``moorage quota show`` lists the limits that it says, after the first reading by an engine.",
    ),
    Family(
        "observer",
        "moorage.observers",
        "Observer",
        "Each refused request becomes a line of a file in the folder ``$plugin`` of the state folder.",
        ("with-options",),
    ),
    Family(
        "command",
        "moorage.cli",
        "Command",
        "``moorage $words`` runs it.",
    ),
)

#: Entry-point groups for which nothing is written, and why.
EXCEPTIONS: Mapping[str, str] = {
    "moorage.instance_stores": "It is one half of a service, with tables and an agent of its own: begin with a copy of the "
    "reference service, moorage_plugins.compute.",
    "moorage.fencing_drivers": "It is one method: begin with a copy of moorage_plugins/drivers/redfish/fencing.py.",
    "moorage.parts": "It comes with what has options or tables: weigher, observer, agent-service, cleanup-handler, "
    "periodic-task and orphan-detector write it.",
}

#: By name.
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
