# SPDX-License-Identifier: Apache-2.0
"""Filters and weighers in all their forms: the answer is that of a plain loop; what raises or answers nonsense is named."""

from __future__ import annotations

import random as random_module
import unittest
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh as pipelines
from moorage.scheduling.filter_and_weigh import Pipeline
from moorage.scheduling.interface import (
    SKIP,
    Fleet,
    HostFilter,
    HostState,
    HostWeigher,
    Mask,
    RequestSpec,
    Rows,
    Skip,
    Where,
)
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.snapshot import Snapshot
from moorage.scheduling.weights import best_of
from moorage.testing import fleets
from tests import cases, seeded


class NoIncidents:
    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


def guard(*, skip_advisory: bool = True) -> PluginRunner:
    return PluginRunner(
        SystemClock(), NoIncidents(), lambda _: None, deadline=60, threshold=3, window=300, skip_advisory=skip_advisory
    )


class Divides(HostFilter):
    """Passes nodes whose number divides by something; subclasses say so in other forms."""

    api_version = (1, 0)

    def __init__(self, by: int) -> None:
        super().__init__(conf=None)
        self.by = by

    def passes(self, name: str) -> bool:
        return int(name.rpartition("-")[2]) % self.by == 0

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return self.passes(host_state.nodename)

    def rows(self, fleet: Any) -> list[int]:
        return [row for row, node in enumerate(fleet.nodes) if self.passes(node.name)]


class Prepared(Divides):
    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return np.array(self.rows(fleet), dtype=np.intp)


class Final(Prepared):
    prepare_is_final = True


class Nearly(Divides):
    """Its set is larger than its answer."""

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return np.arange(fleet.size, dtype=np.intp)[:: 1 if self.by % 2 else 1]


class Bulk(Divides):
    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        mine = set(self.rows(fleet))
        return np.array([row for row in rows if int(row) in mine], dtype=np.intp)


class Masks(Divides):
    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask | None:
        mine = np.zeros(fleet.size, dtype=np.bool_)
        mine[self.rows(fleet)] = True
        return mine[where]


class MasksAnew(Masks):
    """Passes everything."""

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask | None:
        return np.ones(fleet.size, dtype=np.bool_)[where]


class RowsAnew(MasksAnew):
    """A subclass overrides only ``filter_rows``: that is what runs."""

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        return Bulk(self.by).filter_rows(fleet, rows, spec)


class Keyed(Divides):
    asked = 0

    @override
    def host_key(self, host_state: HostState) -> Hashable:
        return self.passes(host_state.nodename)

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        self.asked += 1
        return super().host_passes(host_state, spec_obj)


class FirstTwo(HostFilter):
    """What passes depends on what it is shown: the first two."""

    api_version = (1, 0)
    needs_order = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        raise AssertionError("it is asked for all of them at once")

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        return rows[:2]


class Free(HostWeigher):
    api_version = (1, 0)

    def __init__(self, name: str, multiplier: float) -> None:
        super().__init__(conf=None)
        self.name = name
        self._multiplier = multiplier

    @property
    @override
    def multiplier(self) -> float:
        return self._multiplier

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        return fleet.free(self.name)[rows]


def pipeline(
    filters: Sequence[HostFilter], weighers: Sequence[HostWeigher] = (), *, advisory: bool = False
) -> Pipeline:
    return Pipeline(
        [
            pipelines._Filter(
                f"{type(each).__name__}-{number}",
                "moorage.filters",
                "tests",
                f"plugin '{type(each).__name__}-{number}'",
                advisory,
                each,
            )
            for number, each in enumerate(filters)
        ],
        [
            pipelines._Weigher(
                type(each).__name__, "moorage.weighers", "tests", f"plugin '{type(each).__name__}'", each
            )
            for each in weighers
        ],
    )


def naive(fleet: Snapshot, filters: Sequence[HostFilter], weighers: Sequence[Free], spec: RequestSpec) -> list[int]:
    """What it all means."""
    rows = [row for row in range(fleet.size) if fleet.can_host[row]]
    for each in filters:
        first = isinstance(each, FirstTwo)
        rows = [row for row in rows if first or each.host_passes(fleet.host_state(row), spec)][: 2 if first else None]
    totals = dict.fromkeys(rows, 0.0)
    for weigher in weighers:
        raw = {row: float(fleet.free(weigher.name)[row]) for row in rows}
        low, high = min(raw.values(), default=0), max(raw.values(), default=0)
        for row in rows:
            totals[row] += weigher.multiplier * ((raw[row] - low) / (high - low)) if high > low else 0.0
    return sorted(rows, key=lambda row: -totals[row]) if len(rows) > 1 else rows


class RunTests(unittest.TestCase):
    def test_whatever_form_filters_have_the_answer_is_that_of_the_plain_loop(self) -> None:
        random = seeded()
        kinds = (Divides, Prepared, Final, Nearly, Bulk, Masks, RowsAnew, Keyed)
        for _ in range(cases(150)):
            fleet = fleets.random_fleet(random, random.choice((0, 1, 2, 30, 200))).snapshot()
            spec = fleets.random_request(random)
            filters: list[HostFilter] = [
                random.choice(kinds)(random.choice((1, 2, 3, 5))) for _ in range(random.randrange(5))
            ]
            if random.random() < 0.3:
                filters.insert(random.randrange(len(filters) + 1), FirstTwo(conf=None))
            weighers = [Free(name, random.choice((-1.0, 0.0, 0.5, 2.0))) for name in ("VCPU", "MEMORY_MB")]
            made = pipeline(filters, weighers)
            wanted = naive(fleet, filters, weighers, spec)
            for most in (None, 1, 3, 10_000):
                found = made.run(guard(), fleet, fleet.all_rows, spec, most=most)
                self.assertEqual(found.rows.tolist(), wanted[:most])
                self.assertEqual(found.passed, len(wanted))
                self.assertEqual(found.considered - sum(found.removed.values()), len(wanted))

    def test_only_the_best_of_many_equal_ones_in_their_order(self) -> None:
        random = seeded()
        for _ in range(cases(200)):
            weights = np.array([random.choice((0.0, 1.0, 2.0, random.random())) for _ in range(random.randrange(2000))])
            wanted = np.argsort(-weights, kind="stable")
            for most in (1, 2, 7, 16):
                self.assertEqual(best_of(weights, most).tolist(), wanted[:most].tolist())

    def test_a_keyed_filter_is_asked_once_for_each_key(self) -> None:
        fleet = fleets.random_fleet(random_module.Random(1), 50).snapshot()
        keyed = Keyed(3)
        pipeline([keyed]).run(guard(), fleet, fleet.all_rows, fleets.random_request(seeded()))
        self.assertEqual(keyed.asked, 2)

    def test_only_some_are_asked_when_rebuilt(self) -> None:
        class OnRebuild(Divides):
            RUN_ON_REBUILD = True

        fleet = fleets.random_fleet(random_module.Random(1), 30).snapshot()
        made = pipeline([OnRebuild(2), Divides(3)])
        spec = RequestSpec("i", fleets.random_request(seeded()).flavor)

        def passed(**more: Any) -> int:
            return made.run(guard(), fleet, fleet.all_rows, spec, **more).passed

        self.assertEqual((passed(), passed(filtered=False)), (5, int(fleet.can_host.sum())))
        rebuilt = RequestSpec("i", spec.flavor, rebuild=True)
        self.assertEqual(made.run(guard(), fleet, fleet.all_rows, rebuilt).passed, 15)


class FailureTests(unittest.TestCase):
    def setUp(self) -> None:
        random = random_module.Random(1)
        nodes = [replace(fleets.random_node(random, number), can_host=True) for number in range(30)]
        self.fleet = fleets.random_fleet(random, 30, nodes=nodes).snapshot()
        self.spec = fleets.random_request(seeded())

    def run_with(self, plugin: HostFilter, *, advisory: bool = False, skip: bool = True) -> pipelines.Ranking:
        made = pipeline([plugin, Divides(2)], advisory=advisory)
        return made.run(guard(skip_advisory=skip), self.fleet, self.fleet.all_rows, self.spec)

    def wrong(self, hook: str, answer: Any) -> HostFilter:
        def method(self: HostFilter, *arguments: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        kind: type[HostFilter] = type("Wrong", (Divides,), {hook: method, "advisory": True})
        return kind(2)  # type: ignore[call-arg]

    def test_a_filter_that_raises_refuses_the_request_and_is_named(self) -> None:
        for hook in ("prepare", "mask_rows", "filter_rows", "host_passes", "host_key"):
            with self.subTest(hook), self.assertRaises(errors.PluginFailed) as caught:
                self.run_with(self.wrong(hook, LookupError("oh")))
            self.assertIn("'Wrong-0'", caught.exception.message)
            self.assertIn("LookupError: oh", caught.exception.message)

    def test_a_filter_that_answers_nonsense_has_failed(self) -> None:
        for hook in ("prepare", "filter_rows"):
            for answer in (np.array([-1]), np.array([99]), np.array([[1]]), np.array([0.5]), "rows", [None]):
                with self.subTest(hook=hook, answer=answer), self.assertRaises(errors.PluginFailed):
                    self.run_with(self.wrong(hook, answer))
        for answer in (np.arange(29)[::-1], np.array([0, 0])):
            with (
                self.subTest("more than it was given, or twice", answer=answer),
                self.assertRaises(errors.PluginFailed),
            ):
                made = pipeline([Divides(2), self.wrong("filter_rows", answer)])
                made.run(guard(), self.fleet, np.array([0, 1]), self.spec)
        masks: tuple[Any, ...] = (np.ones(29, np.bool_), np.ones(30), [True], np.True_, "rows")
        for mask in masks:
            with self.subTest(hook="mask_rows", answer=mask), self.assertRaises(errors.PluginFailed):
                self.run_with(self.wrong("mask_rows", mask))

    def test_what_is_only_advice_is_left_out_and_said(self) -> None:
        for hook in ("prepare", "mask_rows", "filter_rows", "host_passes"):
            found = self.run_with(self.wrong(hook, LookupError("oh")), advisory=True)
            self.assertEqual((found.passed, found.skipped), (15, ("Wrong-0",)))
            with self.assertRaises(errors.PluginFailed):
                self.run_with(self.wrong(hook, LookupError("oh")), advisory=True, skip=False)

    def test_a_request_that_is_called_wrong_is_no_failure_of_the_filter(self) -> None:
        for advisory in (False, True):
            with self.assertRaises(errors.InvalidInput):
                self.run_with(self.wrong("prepare", errors.InvalidInput("the hint is no number")), advisory=advisory)

    def test_a_weigher_that_answers_nonsense_is_named(self) -> None:
        for answer in (np.array([1.0]), np.full(30, np.nan), np.full(30, np.inf), "heavy"):

            class Wrong(HostWeigher):
                api_version = (1, 0)
                answer: Any = None

                @override
                def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
                    found: npt.NDArray[np.float64] = self.answer
                    return found

            weigher = Wrong(conf=None)
            weigher.answer = answer
            with self.subTest(answer=answer), self.assertRaisesRegex(errors.PluginFailed, "Wrong"):
                pipeline([], [weigher]).run(guard(), self.fleet, self.fleet.all_rows, self.spec)

    def test_a_filter_that_skips_is_not_asked(self) -> None:
        class Skips(Divides):
            @override
            def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
                return SKIP

        found = pipeline([Skips(2)]).run(guard(), self.fleet, self.fleet.all_rows, self.spec)
        self.assertEqual((found.passed, found.removed), (30, {}))
