# SPDX-License-Identifier: Apache-2.0
"""The reference strategies on the conformance kit."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from moorage.sharding.interface import ShardStrategy
from moorage.testing.sharding import Case, ShardStrategyTests
from moorage_plugins.strategies.affinity import AffinityStrategy
from moorage_plugins.strategies.balanced import BalancedStrategy
from moorage_plugins.strategies.hash_ring import HashRingStrategy
from moorage_plugins.strategies.rules import RulesStrategy


class BalancedTests(ShardStrategyTests, unittest.TestCase):
    @override
    def make_strategy(self) -> ShardStrategy:
        return BalancedStrategy()


class BalancedWithCapTests(BalancedTests):
    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {"max_per_shard": 12}


class BalancedByWeightTests(BalancedTests):
    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {"weight": "properties.ports"}


class HashRingTests(ShardStrategyTests, unittest.TestCase):
    @override
    def make_strategy(self) -> ShardStrategy:
        return HashRingStrategy()

    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {"replicas": 20, "hash_function": "xxh3"}


class AffinityTests(ShardStrategyTests, unittest.TestCase):
    @override
    def make_strategy(self) -> ShardStrategy:
        return AffinityStrategy()


class AffinityByRackTests(AffinityTests):
    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {"group_by": "properties.rack"}


class AffinityInPartsTests(AffinityTests):
    settles = False

    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {"group_by": "properties.rack", "max_per_shard": 3}


class RulesTests(ShardStrategyTests, unittest.TestCase):
    fallback = "stay"

    @override
    def make_strategy(self) -> ShardStrategy:
        return RulesStrategy()

    @override
    def params(self, case: Case) -> Mapping[str, Any]:
        return {
            "pins": {"node-3": case.shards[-1]},
            "rules": [
                {"match": {"name": "node-.?1", "conductor_group": "north"}, "shard": case.shards[0]},
                {"match": {"properties.ports": 9}, "shard": case.shards[-1]},
            ],
            "fallback": self.fallback,
        }


class RulesWithFallbackTests(RulesTests):
    fallback = "balanced"
