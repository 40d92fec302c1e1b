# SPDX-License-Identifier: Apache-2.0
"""What the part brings: shards of the fleet."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.sharding.interface",
    options="moorage.sharding.options",
    checks={
        "shards": "moorage.sharding.interface:STRATEGIES.chosen",
    },
    api=("moorage.sharding.api",),
    collectors=("moorage.sharding.shard_metrics:ShardCollector",),
    upgrade_checks={"shards": "moorage.sharding.checks:upgrade_check"},
)
