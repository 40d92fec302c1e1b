# SPDX-License-Identifier: Apache-2.0
"""What ``moorage plugin new`` can write: one template for each family of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of plugin.

    :param name: what the author writes, and the folder of its templates.
    :param group: the entry-point group.
    :param suffix: how the class's name ends.
    :param choose: the lines of a configuration file with which a deployer uses the plugin; ``$plugin`` is its name.
    :param see: how its author sees it work in a running control plane, one sentence.
    :param needs: distributions beside Moorage that the plugin needs.
    """

    name: str
    group: str
    suffix: str
    choose: str
    see: str
    needs: tuple[str, ...] = ()


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
        "command",
        "moorage.cli",
        "Command",
        "# commands need no configuration: all that are installed are offered",
        "``moorage $words`` runs it.",
    ),
)

#: By name.
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
