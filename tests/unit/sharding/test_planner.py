# SPDX-License-Identifier: Apache-2.0
"""Plans: the fewest moves, locked nodes in place, as level as can be."""

from __future__ import annotations

import itertools
import unittest
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from typing_extensions import override

from moorage import errors
from moorage.sharding.interface import ShardNode, ShardStrategy
from moorage.sharding.planner import Plan, imbalance, level, lower_bound, make_plan
from moorage_plugins.strategies.affinity import AffinityStrategy
from moorage_plugins.strategies.balanced import BalancedStrategy
from moorage_plugins.strategies.hash_ring import HashRingStrategy
from tests import seeded

Homes = Sequence[str | None]


def fleet(homes: Homes) -> tuple[list[ShardNode], dict[str, str | None]]:
    nodes = [ShardNode(str(uuid.UUID(int=number)), f"node-{number}") for number in range(len(homes))]
    return nodes, {node.uuid: home for node, home in zip(nodes, homes, strict=True)}


def planned(homes: Homes, shards: Sequence[str], locked: Sequence[bool] = (), **more: Any) -> Plan:
    nodes, current = fleet(homes)
    fixed = {node.uuid for node, is_locked in zip(nodes, locked, strict=False) if is_locked}
    return make_plan("balanced", BalancedStrategy(), nodes, shards, current, locked=fixed, **more)


def spread(sizes: Sequence[int]) -> float:
    """What "level" means, without a word of the code under test: the sum of the squares."""
    return sum(size * size for size in sizes)


class TestFewestMoves(unittest.TestCase):
    @hypothesis.given(st.data())
    def test_no_other_assignment_is_as_level_with_fewer_moves(self, data: st.DataObject) -> None:
        """Against all assignments there are, for fleets small enough to write them down."""
        shards = ("a", "b", "c")[: data.draw(st.integers(1, 3))]
        homes = data.draw(st.lists(st.sampled_from([*shards, "old", None]), max_size=6))
        locked = data.draw(st.lists(st.booleans(), min_size=len(homes), max_size=len(homes)))
        plan = planned(homes, shards, locked)
        moved = {move.node: move.target for move in plan.moves}
        nodes, current = fleet(homes)
        result = [moved.get(node.uuid, current[node.uuid]) for node in nodes]
        choices = [[home] if is_locked else list(shards) for home, is_locked in zip(homes, locked, strict=True)]
        best = min(
            (spread([choice.count(shard) for shard in shards]), sum(a != b for a, b in zip(choice, homes, strict=True)))
            for choice in itertools.product(*choices)
        )
        self.assertEqual(best, (spread([result.count(shard) for shard in shards]), len(plan.moves)))
        self.assertEqual(plan.lower_bound, len(plan.moves))

    @hypothesis.given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1), st.integers(0, 60))
    def test_water_finds_its_level(self, fixed: dict[str, int], more: int) -> None:
        shards = sorted(fixed)
        total = sum(fixed.values()) + more
        found = level(fixed, fixed, shards, total)
        self.assertEqual(total, sum(found.values()))
        raised = [found[shard] for shard in shards if found[shard] > fixed[shard]]
        self.assertTrue(all(found[shard] >= fixed[shard] for shard in shards))
        if raised:
            self.assertLessEqual(max(raised) - min(found.values()), 1)

    def test_a_shard_more_or_less_moves_what_it_must_and_nothing_else(self) -> None:
        homes = [f"shard-{number % 50:02}" for number in range(100_000)]
        fifty = sorted(set(homes))
        for shards, moves in (([*fifty, "shard-50"], 1960), (fifty[:-1], 2000)):
            with self.subTest(len(shards)):
                plan = planned(homes, shards)
                self.assertEqual((moves, moves), (len(plan.moves), plan.lower_bound))
                self.assertLessEqual(plan.imbalance_after, 1.001)

    def test_of_a_fleet_of_which_most_is_locked_only_free_nodes_move(self) -> None:
        random = seeded()
        homes = [f"shard-{number % 50:02}" for number in range(100_000)]
        locked = [random.random() < 0.7 for _ in homes]
        fifty = sorted(set(homes))
        plan = planned(homes, [*fifty, "shard-50"], locked)
        self.assertEqual((1960, 1960, 0), (len(plan.moves), plan.lower_bound, plan.held))
        self.assertLessEqual(plan.imbalance_after, 1.001)
        fixed = {node.uuid for node, is_locked in zip(fleet(homes)[0], locked, strict=True) if is_locked}
        self.assertTrue(fixed.isdisjoint(move.node for move in plan.moves))
        # One shard less: its locked nodes stay in it, and the plan says so.
        plan = planned(homes, fifty[:-1], locked)
        gone = next(line for line in plan.lines if line.name == fifty[-1])
        self.assertEqual((gone.locked, 2000 - gone.locked), (gone.after, gone.outgoing))
        self.assertEqual(plan.lower_bound, len(plan.moves))

    def test_a_skewed_fleet_is_levelled_with_the_fewest_moves(self) -> None:
        random = seeded()
        shards = [f"shard-{number:02}" for number in range(50)]
        homes = [random.choice(shards[: random.randint(1, 50)]) for _ in range(100_000)]
        sizes = Counter(homes)
        plan = planned(homes, shards)
        self.assertEqual(sum(max(0, size - 2000) for size in sizes.values()), len(plan.moves))
        self.assertEqual(plan.lower_bound, len(plan.moves))
        self.assertEqual(1.0, plan.imbalance_after)


class TestPlans(unittest.TestCase):
    def test_a_level_fleet_needs_no_plan(self) -> None:
        self.assertFalse(planned(["a", "b", "a", "b"], ["a", "b"]).needed)

    def test_below_the_threshold_nothing_moves_unless_a_node_has_no_shard(self) -> None:
        homes = ["a"] * 11 + ["b"] * 9
        self.assertFalse(planned(homes, ["a", "b"], threshold=0.1).needed)
        self.assertEqual(1, len(planned(homes, ["a", "b"], threshold=0.09).moves))
        self.assertEqual(1, len(planned([*homes, None], ["a", "b"], threshold=0.2).moves))

    def test_of_too_many_moves_the_most_useful_come_first_and_the_rest_is_told(self) -> None:
        homes = [None] * 2 + ["a"] * 10 + ["b"] * 6 + ["c"] * 0
        plan = planned(homes, ["a", "b", "c"], max_moves=5)
        self.assertEqual((5, plan.lower_bound - 5), (len(plan.moves), plan.withheld))
        sources = Counter(move.source for move in plan.moves)
        self.assertEqual({None: 2, "a": 3}, dict(sources))
        self.assertLess(plan.imbalance_after, plan.imbalance_before)

    def test_plans_one_after_another_end_where_one_would(self) -> None:
        homes: list[str | None] = [None] * 3 + ["a"] * 14 + ["b"] * 3
        nodes, current = fleet(homes)
        for _ in range(20):
            plan = make_plan("balanced", BalancedStrategy(), nodes, ["a", "b", "c"], current, max_moves=2)
            current |= {move.node: move.target for move in plan.moves}
        self.assertEqual([6, 7, 7], sorted(Counter(current.values()).values()))

    def test_every_move_says_why(self) -> None:
        plan = planned([None, "old", "a", "a", "a"], ["a", "b"])
        reasons = {move.source: move.reason for move in plan.moves}
        self.assertEqual("it has no shard", reasons[None])
        self.assertEqual("shard old shall be empty", reasons["old"])
        plan = planned(["a", "a", "a"], ["a", "b"])
        self.assertEqual("shard a has 3 nodes and gives some up", plan.moves[0].reason)

    def test_a_strategy_explains_in_its_own_words(self) -> None:
        nodes = [ShardNode(str(uuid.UUID(int=number)), f"n{number}", conductor_group="eu") for number in range(3)]
        current = dict.fromkeys((node.uuid for node in nodes), None)
        plan = make_plan("affinity", AffinityStrategy(), nodes, ["a"], current)
        self.assertEqual({"all of conductor_group eu goes to a"}, {move.reason for move in plan.moves})

    def test_requests_that_cannot_be_are_refused(self) -> None:
        for shards, more in (
            ([], {}),
            (["a", "a"], {}),
            (["a"], {"max_moves": -1}),
            (["a"], {"threshold": -0.1}),
            (["a"], {"params": {"max_per_shard": 1}}),
        ):
            with self.subTest(shards=shards, **more), self.assertRaises(errors.InvalidInput):
                planned([None, None], shards, **more)

    def test_imbalance_is_the_largest_over_the_mean(self) -> None:
        self.assertEqual(1.5, imbalance({"a": 3, "b": 1, None: 9}, ["a", "b"]))
        self.assertEqual(1.0, imbalance({}, ["a", "b"]))
        self.assertEqual(0, lower_bound({}, {}, ["a"]))


class Bad(ShardStrategy):
    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @override
    def assign(
        self,
        nodes: Sequence[ShardNode],
        shards: Sequence[str],
        current: Mapping[str, str | None],
        locked: Set[str],
        params: Mapping[str, Any],
    ) -> Mapping[str, str | None]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)


class TestBadPlugins(unittest.TestCase):
    def test_a_plugin_that_fails_or_answers_nonsense_refuses_the_plan_by_name(self) -> None:
        nodes, current = fleet([None])
        for answer in (ZeroDivisionError("oh"), {"stranger": "a"}, {nodes[0].uuid: "b"}):
            with self.subTest(answer=answer), self.assertRaisesRegex(errors.PluginFailed, "bad one"):
                make_plan("bad one", Bad(answer), nodes, ["a"], current)

    def test_a_move_of_a_locked_node_does_not_happen_and_is_counted(self) -> None:
        nodes, current = fleet(["old", None])
        answer = dict.fromkeys(current, "a")
        plan = make_plan("bad one", Bad(answer), nodes, ["a"], current, locked={nodes[0].uuid})
        self.assertEqual(([nodes[1].uuid], 1), ([move.node for move in plan.moves], plan.held))


class TestStrategies(unittest.TestCase):
    def test_a_ring_moves_about_one_part_in_n(self) -> None:
        nodes, current = fleet([None] * 20_000)
        shards = [f"s{number}" for number in range(20)]
        first = HashRingStrategy().assign(nodes, shards, current, set(), {})
        second = HashRingStrategy().assign(nodes, [*shards, "s20"], first, set(), {})
        moved = [uuid for uuid in first if first[uuid] != second[uuid]]
        self.assertEqual({"s20"}, {second[uuid] for uuid in moved})
        self.assertLess(len(moved), 2 * 20_000 / 21)

    def test_groups_are_never_torn(self) -> None:
        random = seeded()
        nodes = [
            ShardNode(str(uuid.UUID(int=number)), f"n{number}", properties=f'{{"rack": {number // 40}}}')
            for number in range(8_000)
        ]
        shards = [f"s{number}" for number in range(10)]
        current = {node.uuid: random.choice(shards) for node in nodes}
        params = {"group_by": "properties.rack"}
        plan = make_plan("affinity", AffinityStrategy(), nodes, shards, current, params=params)
        after: dict[str, str | None] = {**current, **{move.node: move.target for move in plan.moves}}
        of_rack: dict[int, set[str | None]] = {}
        for number, node in enumerate(nodes):
            of_rack.setdefault(number // 40, set()).add(after[node.uuid])
        self.assertTrue(all(len(found) == 1 for found in of_rack.values()))
        self.assertEqual(1.0, plan.imbalance_after)
        more = make_plan("affinity", AffinityStrategy(), nodes, [*shards, "new"], after, params=params)
        # 200 racks in 11 shards: the new one gets 18, whole.
        self.assertEqual(18 * 40, len(more.moves))
        self.assertEqual({"new"}, {move.target for move in more.moves})
