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
    :param choose: the lines of a configuration file with which a deployer uses the plugin; ``$plugin`` is its name.
    :param see: how its author sees it work in a running control plane, one sentence.
    :param parts: folders of templates that it shares with others, before its own.
    """

    name: str
    group: str
    suffix: str
    choose: str
    see: str
    parts: tuple[str, ...] = ()


_ALL = (
    Family(
        "filter",
        "moorage.filters",
        "Filter",
        "[scheduling]\nenabled_filters = compute,capacity,$plugin",
        "``moorage select --explain`` tells for each filter how many nodes fell.",
    ),
    Family(
        "weigher",
        "moorage.weighers",
        "Weigher",
        "[scheduling]\nenabled_weighers = $plugin",
        "``moorage select --explain`` shows the nodes in the order that the weighers gave them.",
    ),
    Family(
        "allocation-store",
        "moorage.allocation_stores",
        "Store",
        "[allocation]\nstore = $plugin",
        "``moorage plugin check`` loads it; the roles use it once it declares SHARED_TRANSACTION, and say so until then.",
    ),
    Family(
        "shard-strategy",
        "moorage.shard_strategies",
        "Strategy",
        "[sharding]\nstrategy = $plugin",
        "``moorage shard plan`` shows where it would have each node, and why.",
    ),
    Family(
        "transport",
        "moorage.transports",
        "Transport",
        "[rpc]\ntransport_url = $plugin://",
        "``moorage plugin check`` loads it; the roles use it once it declares CROSS_PROCESS.",
    ),
    Family(
        "api",
        "moorage.api",
        "Api",
        "[api]\nenabled_apis = $plugin",
        "``curl -u USER:PASSWORD http://HOST:PORT/$plugin/`` shows what it answers.",
    ),
    Family(
        "coordination-backend",
        "moorage.coordination",
        "Backend",
        "[coordination]\nperiodic_coordination_backend = $plugin:///run/members",
        "``moorage ring show`` shows the engines that are members, and what part each has.",
    ),
    Family(
        "periodic-task",
        "moorage.periodic_tasks",
        "Task",
        "[periodic]\nenabled_tasks = reconcile,$plugin",
        "After ``moorage-manage db upgrade``, ``moorage periodic show $plugin`` shows its runs.",
        ("with-table",),
    ),
    Family(
        "cleanup-handler",
        "moorage.cleanup_handlers",
        "Handler",
        "[cleanup]\nenabled_handlers = volume,snapshot,backup,instance,$plugin",
        "After ``moorage-manage db upgrade``, ``moorage cleanup history`` shows what became of items whose service died.",
        ("with-table",),
    ),
    Family(
        "orphan-detector",
        "moorage.orphan_detectors",
        "Detector",
        "[allocation]\norphan_detectors = $plugin",
        "After ``moorage-manage db upgrade``, ``moorage allocation audit`` lists claims that hold room for nothing.",
        ("with-table",),
    ),
    Family(
        "observer",
        "moorage.observers",
        "Observer",
        "[observers]\nenabled = $plugin",
        "Each refused request becomes a line of a file in the folder ``$plugin`` of the state folder.",
    ),
    Family(
        "command",
        "moorage.cli",
        "Command",
        "# commands need no configuration: all that are installed are offered",
        "``moorage $words`` runs it.",
    ),
)

#: Entry-point groups for which nothing is written, and why.
EXCEPTIONS: Mapping[str, str] = {
    "moorage.instance_stores": "It is one half of a service, with tables and an agent of its own: begin with a copy of the "
    "reference service, moorage_plugins.compute.",
    "moorage.agent_services": "It is the other half of a service: begin with a copy of moorage_plugins.compute, or of the "
    "smaller moorage_plugins.data_processing.",
    "moorage.migrations": "They come with what has tables: cleanup-handler, periodic-task and orphan-detector write them.",
}

#: By name.
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
