# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kits of filters and weighers.

A filter may answer in several forms: for one node (``host_passes``), for a set (``mask_rows``, ``filter_rows``), once for each
key (``host_key``), or before all others (``prepare``). Whatever form the scheduler picks, the answer must be the same. Mix the
kit into a ``unittest.TestCase`` and say how the filter is made; say in ``expected`` in plain words what it is for, so that the
answers are compared with its meaning and not only with each other::

    class QuietFilterTests(HostFilterTests, unittest.TestCase):
        def make_filter(self):
            return QuietFilter(conf=None)

        def expected(self, host_state, spec):
            return host_state.num_instances == 0

Fleets and requests are random, and the same in every run; ``cases`` says how many requests there are.
"""

from __future__ import annotations

import concurrent.futures
import functools
import random as random_module
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moorage import errors
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    SKIP,
    HostFilter,
    HostState,
    HostWeigher,
    RequestSpec,
    Rows,
)
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.sample import Sample, may_sample
from moorage.scheduling.snapshot import Snapshot
from moorage.testing import fleets

__all__ = ["HostFilterTests", "HostWeigherTests"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class _NoIncidents:
    """Nothing ever hung."""

    def record(self, plugin: str) -> None:
        """It is not remembered."""

    def count(self, plugin: str) -> int:
        """Never."""
        return 0


def _give_up(reason: str) -> None:
    raise AssertionError(reason)


class _FleetCases(_Base):
    def guard(self) -> PluginRunner:
        """What plugins run under; closed with the test."""
        made = PluginRunner(
            SystemClock(),
            _NoIncidents(),
            _give_up,
            deadline=600,
            threshold=1,
            window=60,
            skip_advisory=False,
            threads=1,
        )
        self.addCleanup(made.close)
        return made

    def ranked(self, line: filter_and_weigh.Pipeline, fleet: Snapshot, spec: RequestSpec) -> list[int]:
        """Returns the rows that the scheduler's own runner finds, best first."""
        return [int(row) for row in line.run(self.guard(), fleet, np.arange(fleet.size, dtype=np.intp), spec).rows]

    #: How many requests are asked; for each few of them there is a new fleet.
    cases = 400
    requests_per_fleet = 20
    seed = 1

    def make_fleet(self, random: random_module.Random) -> FleetView:
        """Returns a fleet; the default has all that Moorage's own filters look at, none, one or several of each."""
        return fleets.random_fleet(random, random.choice((0, 1, 2, 7, 20)))

    def make_request(self, random: random_module.Random) -> RequestSpec:
        """Returns a request; override it to say what your plugin looks at more often."""
        return fleets.random_request(random, 20)

    def fleets_and_requests(self) -> Iterator[tuple[Snapshot, RequestSpec]]:
        """Returns the cases of one run. Classes with the kit's own fleets and requests share them."""
        makers = type(self).make_fleet, type(self).make_request
        if makers == (_FleetCases.make_fleet, _FleetCases.make_request):
            yield from _shared_cases(self.cases, self.requests_per_fleet, self.seed)
        else:
            yield from self._new_cases()

    def _new_cases(self) -> Iterator[tuple[Snapshot, RequestSpec]]:
        random = random_module.Random(self.seed)  # noqa: S311  (no secret)
        fleet = self.make_fleet(random).snapshot()
        for number in range(self.cases):
            if number % self.requests_per_fleet == 0:
                fleet = self.make_fleet(random).snapshot()
            yield fleet, fleet.resolved(self.make_request(random))

    @staticmethod
    def some(rows: Rows, number: int) -> Rows:
        """Some of the rows, ascending."""
        return rows[np.random.default_rng(number).random(len(rows)) < 0.6]


# Making the cases takes longer than asking most plugins about them.
@functools.lru_cache(maxsize=2)
def _shared_cases(cases: int, requests_per_fleet: int, seed: int) -> Sequence[tuple[Snapshot, RequestSpec]]:
    maker = _FleetCases()
    maker.cases, maker.requests_per_fleet, maker.seed = cases, requests_per_fleet, seed
    return tuple(maker._new_cases())


class HostFilterTests(_FleetCases):
    """What every filter must hold to."""

    def make_filter(self) -> HostFilter:
        """Returns the filter under test; called once for each test."""
        raise NotImplementedError

    def expected(self, host_state: HostState, spec: RequestSpec) -> bool | None:
        """Returns whether the node should pass, said as plainly as can be; None when only the forms are to be compared."""
        return None

    def asked(self, plugin: HostFilter) -> Iterator[tuple[Snapshot, RequestSpec, Any, list[int]]]:
        """Cases with the answers of ``prepare`` and, one by one, of ``host_passes``; requests that it calls wrong are left out."""
        for fleet, spec in self.fleets_and_requests():
            try:
                prepared = plugin.prepare(spec, fleet)
            except errors.InvalidInput:
                continue
            passing = [row for row in range(fleet.size) if plugin.host_passes(fleet.host_state(row), spec)]
            yield fleet, spec, prepared, passing

    def test_it_answers_what_it_is_for(self) -> None:
        plugin = self.make_filter()
        some_pass = some_fall = False
        for fleet, spec, _, passing in self.asked(plugin):
            wanted = [self.expected(fleet.host_state(row), spec) for row in range(fleet.size)]
            if None in wanted:
                self.skipTest("this test says nothing about what is expected")
            self.assertEqual([row for row, passes in enumerate(wanted) if passes], passing, spec)
            some_pass, some_fall = some_pass or any(wanted), some_fall or not all(wanted)
        self.assertTrue(some_pass, "no node of any fleet passed: the requests do not try the filter")
        if not getattr(self, "never_refuses", False):
            self.assertTrue(some_fall, "no node of any fleet was refused: the requests do not try the filter")

    def test_answers_for_sets_are_those_for_each_node(self) -> None:
        plugin = self.make_filter()
        for number, (fleet, spec, _, passing) in enumerate(self.asked(plugin)):
            everything = np.arange(fleet.size, dtype=np.intp)
            for rows in (everything, self.some(everything, number), everything[:0]):
                before = rows.copy()
                found = plugin.filter_rows(fleet, rows, spec)
                if found is None:
                    continue
                self.assertEqual([int(row) for row in rows if row in set(passing)], [int(row) for row in found], spec)
                self.assertTrue((rows == before).all(), "filter_rows changed the rows that it was given")

    def test_a_yes_or_no_for_each_is_that_of_each_node(self) -> None:
        plugin = self.make_filter()
        for number, (fleet, spec, _, passing) in enumerate(self.asked(plugin)):
            wanted = np.isin(np.arange(fleet.size), passing)
            some = self.some(np.arange(fleet.size, dtype=np.intp), number)
            for where in (slice(None), some):
                mask = plugin.mask_rows(fleet, where, spec)
                if mask is not None:
                    self.assertEqual(np.bool_, mask.dtype)
                    self.assertEqual(wanted[where].tolist(), mask.tolist(), spec)

    def test_nodes_with_the_same_key_get_the_same_answer(self) -> None:
        plugin = self.make_filter()
        for fleet, spec, _, passing in self.asked(plugin):
            answers: dict[Any, bool] = {}
            for row in range(fleet.size):
                key = plugin.host_key(fleet.host_state(row))
                if key is NotImplemented:
                    continue
                passes = row in passing
                self.assertEqual(passes, answers.setdefault(key, passes), f"{key!r} has two answers for {spec}")

    def test_what_is_prepared_agrees(self) -> None:
        plugin = self.make_filter()
        for fleet, spec, prepared, passing in self.asked(plugin):
            if prepared is SKIP:
                self.assertEqual(list(range(fleet.size)), passing, f"it says SKIP and refuses nodes: {spec}")
            elif prepared is not None:
                self.assertLessEqual(set(passing), {int(row) for row in prepared}, spec)
                if plugin.prepare_is_final:
                    self.assertEqual(set(passing), {int(row) for row in prepared}, spec)

    def test_a_judgement_of_one_node_alone_stays_while_more_is_in_use_on_others(self) -> None:
        plugin = self.make_filter()
        if not plugin.judges_alone:
            self.skipTest("it does not declare judges_alone")
        line = filter_and_weigh.of([plugin])
        for number, (fleet, spec, _, _) in enumerate(self.asked(plugin)):
            if spec.server_group is not None or number % 4:
                continue
            everything = np.arange(fleet.size, dtype=np.intp)
            more = self.some(everything, number)
            alike = replace(spec, instance_uuid="another", properties={**spec.properties, "name": "another"})
            later = self.ranked(line, fleet.with_more_on(more, spec.flavor, counted=True), alike)
            now = self.ranked(line, fleet, spec)
            self.assertEqual(set(now) - set(more.tolist()), set(later) - set(more.tolist()), spec)

    def test_a_judgement_of_one_node_alone_is_the_same_where_other_nodes_are_not_shown(self) -> None:
        plugin = self.make_filter()
        if not plugin.judges_alone:
            self.skipTest("it does not declare judges_alone")
        line = filter_and_weigh.of([plugin])
        for number, (fleet, spec, _, _) in enumerate(self.asked(plugin)):
            rows = self.some(np.arange(fleet.size, dtype=np.intp), number)
            if not may_sample(spec) or fleet.nested.any():
                continue
            wanted = set(rows.tolist()) & set(self.ranked(line, fleet, spec))
            self.assertEqual(wanted, set(rows[self.ranked(line, _part(fleet, rows), spec)].tolist()), spec)

    def test_a_judgement_for_anyone_is_the_same_for_another_project_and_user(self) -> None:
        plugin = self.make_filter()
        if not plugin.ignores_owner:
            self.skipTest("it does not declare ignores_owner")
        for fleet, spec, _, passing in self.asked(plugin):
            if spec.hints or spec.server_group is not None:
                continue
            for project in fleets.PROJECTS:
                theirs = replace(spec, project_id=project, user_id="another")
                passes = [row for row in range(fleet.size) if plugin.host_passes(fleet.host_state(row), theirs)]
                self.assertEqual(passing, passes, spec)

    def test_the_runner_finds_what_the_loop_finds(self) -> None:
        plugin = self.make_filter()
        line = filter_and_weigh.of([plugin])
        for fleet, spec, _, passing in self.asked(plugin):
            asked = plugin.RUN_ON_REBUILD or not spec.rebuild
            wanted = passing if asked else list(range(fleet.size))
            # Nothing ever lands on what cannot host; what is rebuilt is there already.
            wanted = [row for row in wanted if spec.rebuild or fleet.can_host[row]]
            self.assertEqual(wanted, self.ranked(line, fleet, spec))

    def test_it_passes_again_what_it_passed_while_nothing_changes(self) -> None:
        plugin, guard = self.make_filter(), self.guard()
        line = filter_and_weigh.of([plugin])
        for fleet, spec, _, _ in self.asked(plugin):
            ranking = line.run(guard, fleet, np.arange(fleet.size, dtype=np.intp), spec)
            for row in ranking.rows.tolist():
                same = fleet.with_residents(row, fleet.instances_on(row).values())
                self.assertEqual("", line.refused_by(guard, same, row, spec, ranking), spec)

    def test_a_refusal_is_explained(self) -> None:
        plugin = self.make_filter()
        for fleet, spec, _, passing in self.asked(plugin):
            for row in set(range(fleet.size)) - set(passing):
                text = plugin.explain(fleet.host_state(row), spec)
                self.assertIsInstance(text, str)
                self.assertTrue(text.strip(), spec)

    def test_it_keeps_nothing_between_requests_and_threads(self) -> None:
        plugin = self.make_filter()
        cases = [(fleet, spec, passing) for fleet, spec, _, passing in self.asked(plugin)][:40]

        def again(case: tuple[Snapshot, RequestSpec, list[int]]) -> list[int]:
            fleet, spec, _ = case
            plugin.prepare(spec, fleet)
            return [row for row in range(fleet.size) if plugin.host_passes(fleet.host_state(row), spec)]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for case, found in zip(cases[::-1], pool.map(again, cases[::-1]), strict=True):
                self.assertEqual(case[2], found)


class HostWeigherTests(_FleetCases):
    """What every weigher must hold to."""

    cases = 200

    def make_weigher(self) -> HostWeigher:
        """Returns the weigher under test; called once for each test."""
        raise NotImplementedError

    def expected(self, host_state: HostState, spec: RequestSpec) -> float | None:
        """Returns the raw weight of a node, said as plainly as can be; None when nothing is to be compared."""
        return None

    def test_a_number_for_each_row(self) -> None:
        plugin = self.make_weigher()
        for number, (fleet, spec) in enumerate(self.fleets_and_requests()):
            rows = self.some(np.arange(fleet.size, dtype=np.intp), number)
            weights = np.asarray(plugin.weigh_rows(fleet, rows, spec), dtype=np.float64)
            self.assertEqual(rows.shape, weights.shape)
            self.assertTrue(np.isfinite(weights).all(), weights)
            multipliers = plugin.row_multipliers(fleet, rows)
            if multipliers is not None:
                self.assertEqual(rows.shape, multipliers.shape)
                self.assertTrue(np.isfinite(multipliers).all(), multipliers)
        self.assertIsInstance(plugin.multiplier, float)

    def test_it_weighs_what_it_is_for(self) -> None:
        plugin = self.make_weigher()
        differing = False
        for fleet, spec in self.fleets_and_requests():
            rows = np.arange(fleet.size, dtype=np.intp)
            wanted = [self.expected(fleet.host_state(row), spec) for row in range(fleet.size)]
            if None in wanted:
                self.skipTest("this test says nothing about what is expected")
            self.assertEqual(wanted, [float(weight) for weight in plugin.weigh_rows(fleet, rows, spec)], spec)
            differing = differing or len(set(wanted)) > 1
        self.assertTrue(differing, "no two nodes of any fleet differ: the requests do not try the weigher")

    def test_the_runner_ranks_by_it(self) -> None:
        plugin = self.make_weigher()
        line = filter_and_weigh.of([], [plugin])
        for fleet, spec in self.fleets_and_requests():
            rows = np.arange(fleet.size, dtype=np.intp)
            if not spec.rebuild:
                rows = rows[fleet.can_host]
            list_of = rows.tolist()
            weights = [float(weight) for weight in plugin.weigh_rows(fleet, rows, spec)]
            own = plugin.row_multipliers(fleet, rows)
            multipliers = [plugin.multiplier] * len(rows) if own is None else [float(each) for each in own]
            totals = _totals(weights, multipliers, plugin.minval, plugin.maxval)
            wanted = [list_of[place] for place in sorted(range(len(list_of)), key=lambda place, of=totals: -of[place])]  # type: ignore[misc]
            self.assertEqual(wanted, self.ranked(line, fleet, spec), spec)

    def test_a_weight_that_follows_from_its_node_alone_stays_while_more_is_in_use_on_others(self) -> None:
        plugin = self.make_weigher()
        if not plugin.weighs_alone:
            self.skipTest("it does not declare weighs_alone")
        for number, (fleet, spec) in enumerate(self.fleets_and_requests()):
            one = replace(spec, server_group=None)
            everything = np.arange(fleet.size, dtype=np.intp)
            more = self.some(everything, number)
            alike = replace(one, instance_uuid="another", properties={**spec.properties, "name": "another"})
            later = plugin.weigh_rows(fleet.with_more_on(more, spec.flavor, counted=True), everything, alike)
            others = np.setdiff1d(everything, more)
            self.assertEqual(list(plugin.weigh_rows(fleet, everything, one)[others]), list(later[others]), spec)

    def test_a_weight_that_follows_from_its_node_alone_is_the_same_where_other_nodes_are_not_shown(self) -> None:
        plugin = self.make_weigher()
        if not plugin.weighs_alone:
            self.skipTest("it does not declare weighs_alone")
        for number, (fleet, spec) in enumerate(self.fleets_and_requests()):
            rows = self.some(np.arange(fleet.size, dtype=np.intp), number)
            if not may_sample(spec) or fleet.nested.any():
                continue
            part = _part(fleet, rows)
            self.assertEqual(
                list(plugin.weigh_rows(fleet, rows, spec)), list(plugin.weigh_rows(part, part.all_rows, spec)), spec
            )

    def test_a_weight_for_anyone_is_the_same_for_another_project_and_user(self) -> None:
        plugin = self.make_weigher()
        if not plugin.ignores_owner:
            self.skipTest("it does not declare ignores_owner")
        for fleet, spec in self.fleets_and_requests():
            if spec.hints or spec.server_group is not None:
                continue
            weights = list(plugin.weigh_rows(fleet, fleet.all_rows, spec))
            for project in fleets.PROJECTS:
                theirs = replace(spec, project_id=project, user_id="another")
                self.assertEqual(weights, list(plugin.weigh_rows(fleet, fleet.all_rows, theirs)), spec)

    def test_a_weight_does_not_depend_on_the_other_rows(self) -> None:
        plugin = self.make_weigher()
        for number, (fleet, spec) in enumerate(self.fleets_and_requests()):
            everything = np.arange(fleet.size, dtype=np.intp)
            rows = self.some(everything, number)
            whole = np.asarray(plugin.weigh_rows(fleet, everything, spec))
            self.assertEqual(list(whole[rows]), list(plugin.weigh_rows(fleet, rows, spec)))


def _part(fleet: Snapshot, rows: Rows) -> Sample:
    """Returns a sample with some nodes of a fleet."""
    used = {name: column[rows] for name, column in fleet.used.items()}
    instances, busy = fleet.num_instances[rows], fleet.num_io_ops[rows]
    return Sample.of(fleet, rows, used, instances, busy, {}, fleet._places, fleet._taken)


def _totals(weights: list[float], multipliers: list[float], minval: float | None, maxval: float | None) -> list[float]:
    """Clamped, stretched to 0..1 and multiplied, one after the other."""
    if len(weights) < 2:
        return [0.0 for _ in weights]
    low = min(weights) if minval is None else minval
    high = max(weights) if maxval is None else maxval
    if high <= low:
        return [0.0 for _ in weights]
    clamped = [min(max(weight, low), high) for weight in weights]
    return [
        multiplier * ((weight - low) / (high - low)) for weight, multiplier in zip(clamped, multipliers, strict=True)
    ]
