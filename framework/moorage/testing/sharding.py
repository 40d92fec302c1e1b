# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of shard strategies.

Mix it into a ``unittest.TestCase`` and say how the strategy is made, and which parameters it shall be tried with::

    class AlphabeticalTests(ShardStrategyTests, unittest.TestCase):
        def make_strategy(self):
            return AlphabeticalStrategy()

Fleets are random, and the same in every run; ``cases`` says how many there are.
"""

from __future__ import annotations

import copy
import json
import random as random_module
import unittest
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moorage import errors
from moorage.sharding.interface import NodePlacer, ShardNode, ShardStrategy
from moorage.sharding.planner import make_plan

__all__ = ["Case", "ShardStrategyTests", "applied", "random_case"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


@dataclass(frozen=True, slots=True)
class Case:
    """One question to a strategy."""

    nodes: tuple[ShardNode, ...]
    shards: tuple[str, ...]
    current: Mapping[str, str | None]
    locked: frozenset[str]

    def shuffled(self, random: random_module.Random) -> Case:
        """Returns the question with everything in another order."""
        nodes, shards, current = list(self.nodes), list(self.shards), list(self.current.items())
        for each in (nodes, shards, current):
            random.shuffle(each)
        return replace(self, nodes=tuple(nodes), shards=tuple(shards), current=dict(current))


def random_case(random: random_module.Random, largest: int = 60) -> Case:
    """Returns a fleet of up to ``largest`` nodes; some without a shard, some in shards that shall go, some locked."""
    shards = tuple(f"shard-{number}" for number in range(random.randint(1, 6)))
    homes = (*shards, "leaving", None)[: random.randint(1, len(shards) + 2)]
    nodes = tuple(
        ShardNode(
            uuid=str(uuid.UUID(int=random.getrandbits(128), version=4)),
            name=f"node-{number}",
            host=random.choice(("agent-1", "agent-2", None)),
            resource_class=random.choice(("gold", "silver", None)),
            conductor_group=random.choice(("", "north", "south")),
            owner=random.choice(("owner-1", None)),
            properties=json.dumps({"rack": f"rack-{random.randint(1, 5)}", "ports": random.randint(0, 9)}),
            extra=random.choice(("{}", '{"place": {"row": 7}}')),
        )
        for number in range(random.randint(0, largest))
    )
    share = random.choice((0.0, 0.0, 0.3, 1.0))
    return Case(
        nodes,
        shards,
        {node.uuid: random.choice(homes) for node in nodes},
        frozenset(node.uuid for node in nodes if random.random() < share),
    )


def applied(case: Case, answer: Mapping[str, str | None]) -> Case:
    """Returns the fleet after the moves of the answer that the core lets happen."""
    moved = {uuid: shard for uuid, shard in answer.items() if uuid not in case.locked}
    return replace(case, current={**case.current, **moved})


class ShardStrategyTests(_Base):
    """What every strategy must hold to."""

    cases = 60
    seed = 1
    #: A second plan, made when the first was carried out, moves nothing. False for a strategy that only comes nearer each time.
    settles = True

    def make_strategy(self) -> ShardStrategy:
        """Returns the strategy under test; called once for each question."""
        raise NotImplementedError

    def params(self, case: Case) -> Mapping[str, Any]:
        """Parameters that fit the case."""
        return {}

    def questions(self) -> Iterator[tuple[Case, Mapping[str, Any], Mapping[str, str | None]]]:
        """Cases, parameters and answers; what the strategy calls impossible is left out, though not all may be."""
        random = random_module.Random(self.seed)  # noqa: S311  (no secret)
        answered = 0
        for _ in range(self.cases):
            case = random_case(random)
            given = self.params(case)
            try:
                answer = self._ask(case, given)
            except errors.InvalidInput:
                continue
            answered += 1
            yield case, given, answer
        self.assertGreater(answered, 0, "the strategy refused every case: params() does not fit")

    def test_nodes_and_shards_of_the_answer_are_those_of_the_question(self) -> None:
        for case, _, answer in self.questions():
            self.assertLessEqual(answer.keys(), case.current.keys())
            moved = {shard for uuid, shard in answer.items() if shard != case.current[uuid]}
            self.assertLessEqual(moved, set(case.shards))

    def test_the_order_of_the_question_does_not_matter(self) -> None:
        random = random_module.Random(self.seed)  # noqa: S311  (no secret)
        for case, given, answer in self.questions():
            again = self._ask(case.shuffled(random), given)
            self.assertEqual(dict(answer), dict(again))

    def test_the_question_is_left_as_it_was(self) -> None:
        for case, given, _ in self.questions():
            before = copy.deepcopy((case, given))
            self._ask(case, given)
            self.assertEqual(before, (case, given))

    def test_locked_nodes_stay_and_every_node_is_in_one_place_in_the_plan(self) -> None:
        for case, given, _ in self.questions():
            plan = make_plan(
                "under test",
                self.make_strategy(),
                case.nodes,
                case.shards,
                case.current,
                locked=case.locked,
                params=given,
            )
            moved = [move.node for move in plan.moves]
            self.assertEqual(len(moved), len(set(moved)))
            self.assertTrue(case.locked.isdisjoint(moved))
            after = Counter({**case.current, **{move.node: move.target for move in plan.moves}}.values())
            self.assertEqual(dict(after), {line.name: line.after for line in plan.lines if line.after})
            self.assertEqual(len(case.nodes), sum(line.after for line in plan.lines))

    def test_it_settles(self) -> None:
        for case, given, answer in self.questions():
            if not self.settles:
                self.skipTest("the strategy comes nearer with each plan")
            then = applied(case, answer)
            again = self._ask(then, given)
            moves = {
                uuid: (then.current[uuid], shard)
                for uuid, shard in again.items()
                if shard != then.current[uuid] and uuid not in case.locked
            }
            self.assertEqual({}, moves)

    def test_an_unknown_parameter_is_refused(self) -> None:
        case = random_case(random_module.Random(self.seed))  # noqa: S311  (no secret)
        with self.assertRaises(errors.InvalidInput) as caught:
            self._ask(case, {**self.params(case), "no such parameter": 1})
        self.assertIn("no such parameter", caught.exception.message)

    def test_a_new_node_gets_one_of_the_shards_or_none(self) -> None:
        for case, given, _ in self.questions():
            strategy = self.make_strategy()
            if not isinstance(strategy, NodePlacer):
                self.skipTest("the strategy places no single nodes")
            loads: dict[str, int] = dict.fromkeys(case.shards, 0)
            for node in case.nodes:
                shard = strategy.place_one(node, dict(loads), given)
                self.assertIn(shard, (*case.shards, None))
                if shard is not None:
                    loads[shard] += 1
            self.assertIsNone(strategy.place_one(ShardNode("u", "n"), {}, {}))

    def _ask(self, case: Case, given: Mapping[str, Any]) -> Mapping[str, str | None]:
        nodes: Sequence[ShardNode] = case.nodes
        return self.make_strategy().assign(nodes, case.shards, case.current, case.locked, given)
