# SPDX-License-Identifier: Apache-2.0
"""The strategy on Moorage's conformance kit, and what rendezvous hashing promises beyond it."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Mapping
from typing import Any

from acme_moorage.strategies import RendezvousStrategy

from moorage import errors
from moorage.sharding.interface import ShardNode, ShardStrategy
from moorage.testing.sharding import Case, ShardStrategyTests

NODES = [ShardNode(str(number), f"node-{number}") for number in range(2000)]


class RendezvousTests(ShardStrategyTests, unittest.TestCase):
    def make_strategy(self) -> ShardStrategy:
        return RendezvousStrategy()

    def params(self, case: Case) -> Mapping[str, Any]:
        return {"weights": {case.shards[0]: 2.5}}

    def assigned(self, shards: list[str], **params: Any) -> Mapping[str, str | None]:
        return RendezvousStrategy().assign(NODES, shards, {}, set(), params)

    def test_a_shard_that_comes_takes_its_own_and_moves_nothing_else(self) -> None:
        before, after = self.assigned(["a", "b", "c"]), self.assigned(["a", "b", "c", "d"])
        self.assertEqual({"d"}, {after[uuid] for uuid in before if before[uuid] != after[uuid]})

    def test_a_weight_makes_a_shard_larger_and_moves_nodes_to_it_alone(self) -> None:
        before, after = self.assigned(["a", "b"]), self.assigned(["a", "b"], weights={"b": 3})
        self.assertEqual({"b"}, {after[uuid] for uuid in before if before[uuid] != after[uuid]})
        self.assertTrue(0.72 < Counter(after.values())["b"] / len(NODES) < 0.78, Counter(after.values()))

    def test_parameters_that_make_no_sense_are_refused_in_words(self) -> None:
        for params in (
            {"colour": 1},
            {"weights": 3},
            {"weights": {"a": 0}},
            {"weights": {"a": True}},
            {"weights": {"z": 1}},
        ):
            with self.subTest(params=params), self.assertRaises(errors.InvalidInput):
                self.assigned(["a", "b"], **params)
