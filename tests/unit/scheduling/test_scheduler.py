# SPDX-License-Identifier: Apache-2.0
"""Which of the ranked nodes is taken: the best one, one of the best, and in which order others are told."""

from __future__ import annotations

import dataclasses
import random
import unittest
import uuid
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy.typing as npt
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.inventory import InventoryItem
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    ClaimResult,
    ExcludedTargets,
    Flavor,
    Fleet,
    FleetChanges,
    HostFilter,
    HostState,
    HostWeigher,
    NodeState,
    ProviderState,
    RequestSpec,
    Rows,
)
from moorage.scheduling.placement import Selection
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage_plugins.filters.compute import ComputeFilter

FLAVOR = Flavor("f", {"VCPU": 1})


class NoIncidents:
    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


class Nodes:
    def __init__(self) -> None:
        self.states = ExcludedTargets()
        self.all: list[NodeState] = []

    def nodes(self) -> list[NodeState]:
        return self.all

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        return None

    def unavailable(self) -> ExcludedTargets:
        return self.states


class Claims:
    """Holds, but on nodes that are full in truth."""

    def __init__(self, full: tuple[str, ...] = ()) -> None:
        self.full = full
        self.limits: list[Any] = []
        self.down = ""

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        self.limits.append(dict(spec.limits))
        if node_uuid in self.full:
            raise errors.CapacityExceeded("full", provider=node_uuid)
        if host == self.down:
            raise errors.ConstraintViolated("down", provider=node_uuid, state=f"its agent {host} is down")
        return ClaimResult(node_uuid)

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        return None

    def release(self, instance_uuid: str) -> None: ...


class MostCapacity(HostWeigher):
    api_version = (1, 0)

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[Any]:
        return fleet.capacity("VCPU")[rows]


class Promises(HostFilter):
    api_version = (1, 0)

    def __init__(self, promised: dict[str, Any]) -> None:
        super().__init__(conf=None)
        self.promised = promised

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return True

    @override
    def limits(self, host_state: HostState, spec: RequestSpec) -> dict[str, Any]:
        return {**self.promised, "of": host_state.nodename}


class CandidateTests(unittest.TestCase):
    lacking: Collection[str] = ()

    def setUp(self) -> None:
        self.guard = PluginRunner(
            SystemClock(), NoIncidents(), self.fail, deadline=60, threshold=3, window=300, skip_advisory=True
        )
        self.addCleanup(self.guard.close)

    def scheduler(
        self, vcpus: list[float], claims: Claims | None = None, filters: tuple[HostFilter, ...] = (), **policy: Any
    ) -> Scheduler:
        view = FleetView()
        view.set_nodes(
            [NodeState(f"u{row}", f"n{row}", f"h{row}", {"VCPU": amount}, {}) for row, amount in enumerate(vcpus)]
        )
        base = SchedulingPolicy(
            filter_and_weigh.of(filters, [MostCapacity(conf=None)]), self.guard, host_subset_size=1, max_attempts=16
        )
        made = dataclasses.replace(base, **policy)
        self.source = Nodes()
        return Scheduler(
            view, self.source, claims or Claims(), lambda: made, SystemClock(), random.Random(3),
            lacking=lambda powers: self.lacking,
        )  # fmt: skip

    def place(self, scheduler: Scheduler, **more: Any) -> Selection:
        spec = RequestSpec(str(uuid.uuid4()), **({"flavor": FLAVOR} | more))
        found = scheduler.place(spec, spec.instance_uuid)
        scheduler.view.let_go(spec.instance_uuid)
        return found

    def taken(self, scheduler: Scheduler, times: int = 60) -> Counter[str]:
        return Counter(self.place(scheduler).record.node for _ in range(times))

    def test_the_first_of_the_best_is_taken(self) -> None:
        self.assertEqual(self.taken(self.scheduler([4, 8, 8, 2])), {"n1": 60})

    def test_equally_good_ones_are_taken_in_random_order_where_that_is_wanted(self) -> None:
        found = self.taken(self.scheduler([4, 8, 8, 2, 8], shuffle_best=True))
        self.assertEqual(set(found), {"n1", "n2", "n4"})

    def test_one_of_the_best_few_is_taken_at_random(self) -> None:
        found = self.taken(self.scheduler([4, 8, 7, 2, 6, 5], host_subset_size=3))
        self.assertEqual(set(found), {"n1", "n2", "n4"})
        self.assertEqual(set(self.taken(self.scheduler([4, 8], host_subset_size=10))), {"n0", "n1"})

    def test_the_next_best_are_told_in_their_order(self) -> None:
        found = self.place(self.scheduler([4, 8, 7, 2, 6], alternates=3))
        self.assertEqual(found.alternates, (("h2", "n2"), ("h4", "n4"), ("h0", "n0")))
        self.assertEqual(self.place(self.scheduler([4, 8], alternates=0)).alternates, ())

    def test_the_next_best_is_tried_when_a_claim_is_refused_and_not_told_as_one(self) -> None:
        found = self.place(self.scheduler([4, 8, 7, 2, 6], Claims(("u1", "u2"))))
        self.assertEqual((found.record.node, found.attempts), ("n4", 3))
        self.assertEqual(found.alternates, (("h0", "n0"), ("h3", "n3")))

    def test_a_node_whose_providers_refuse_is_read_again_before_it_is_barred(self) -> None:
        def node(gpu: int) -> NodeState:
            gpus = [ProviderState(f"gpu{each}", "u0", (InventoryItem("PGPU", 1),), {}) for each in range(2)]
            gpus[0] = dataclasses.replace(gpus[0], inventories=gpus[0].inventories[:gpu])
            own = ProviderState("u0", None, (InventoryItem("VCPU", 4),), {})
            return NodeState("u0", "n0", "h0", {"VCPU": 4, "PGPU": 1 + gpu}, {}, providers=(own, *gpus))

        class FirstIsGone(Claims):
            gone: tuple[str, ...] = ("gpu0",)

            def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
                assert spec.propose is not None
                self.full = (node_uuid,) if set(self.gone) & set(spec.propose(frozenset()) or {}) else ()
                return super().claim(spec, node_uuid, host, request_id)

        claims = FirstIsGone()
        scheduler = self.scheduler([], claims)
        scheduler.view.set_nodes([node(1)])
        self.source.all = [node(0)]
        found = self.place(scheduler, flavor=Flavor("g", {"PGPU": 1}))
        self.assertEqual(("n0", 2), (found.record.node, found.attempts))
        # The second refusal bars it.
        claims.gone = ("gpu0", "gpu1")
        claims.limits.clear()
        with self.assertRaises(errors.NoValidHost):
            self.place(scheduler, flavor=Flavor("g", {"PGPU": 1}))
        self.assertEqual(2, len(claims.limits))

    def test_tries_are_bounded(self) -> None:
        claims = Claims(tuple(f"u{row}" for row in range(100)))
        with self.assertRaisesRegex(errors.NoValidHost, "others claimed every node that was tried first"):
            self.place(self.scheduler([8.0] * 100, claims, max_attempts=2))
        self.assertEqual(len(claims.limits), 8)

    def test_the_claim_gets_what_filters_promised_of_that_node_and_the_least_of_several_counts(self) -> None:
        claims = Claims(("u1",))
        filters = (Promises({"num_instances": 7, "a": 1}), Promises({"num_instances": 5, "b": [2]}))
        found = self.place(self.scheduler([4, 8, 7], claims, filters))
        self.assertEqual(claims.limits, [{"num_instances": 5, "a": 1, "b": [2], "of": f"n{row}"} for row in (1, 2)])
        self.assertEqual(found.limits, claims.limits[-1])
        # Whoever forces a host asks no filter, so nobody promises anything.
        self.assertEqual(self.place(self.scheduler([4, 8], None, filters), force_hosts=("h0",)).limits, {})

    def test_a_promise_that_cannot_be_kept_with_the_instance_refuses_the_request(self) -> None:
        for promised in ({"x": object()}, {"x": float("nan")}):
            with self.assertRaisesRegex(errors.PluginFailed, "Promises"):
                self.place(self.scheduler([4], None, (Promises(promised),)))

    def test_an_agent_that_is_down_by_now_costs_one_claim_however_many_nodes_it_has(self) -> None:
        nodes = [NodeState(f"u{row}", f"n{row}", f"h{row // 100}", {"VCPU": 300.0 - row}, {}) for row in range(200)]
        claims = Claims()
        claims.down = "h0"
        scheduler = self.scheduler([], claims, (ComputeFilter(conf=None),), max_attempts=2)
        scheduler.view.set_nodes(nodes)
        self.source.states = ExcludedTargets(frozenset({"h0"}))
        found = self.place(scheduler)
        self.assertEqual((found.record.node, found.attempts), ("n100", 2))
        self.assertEqual(self.place(scheduler).attempts, 1)

    def test_a_request_that_only_states_refuse_names_the_state(self) -> None:
        claims = Claims()
        claims.down = "h0"
        scheduler = self.scheduler([4], claims)
        self.source.all = list(scheduler.view.snapshot().nodes)
        with self.assertRaisesRegex(errors.NoValidHost, "node n0 gets no new instances: its agent h0 is down"):
            self.place(scheduler, force_nodes=("n0",))

    def test_a_power_is_named_as_the_reason_only_if_no_claim_was_refused(self) -> None:
        self.lacking, no_agent = ("h1",), "no agent of the nodes that may be chosen offers compute.commands"
        needs = {"powers": ("compute.commands",)}
        scheduler = self.scheduler([8, 4], Claims(("u0",)))
        self.source.all = list(scheduler.view.snapshot().nodes)
        with self.assertRaises(errors.NoValidHost) as refused:
            self.place(scheduler, **needs)
        self.assertEqual("every node that may be chosen refused the claim", refused.exception.details["summary"])
        self.assertEqual({"refused claims": 1}, refused.exception.details["reasons"])
        self.lacking = ("h0", "h1")
        with self.assertRaisesRegex(errors.NoValidHost, no_agent):
            self.place(scheduler, **needs)

    def test_request_groups_go_to_agents_that_tell_their_driver_which_providers(self) -> None:
        asked: list[Collection[str]] = []
        scheduler = self.scheduler([8, 4])
        scheduler._ranker._lacking = lambda powers: asked.append(powers) or ("h0",)  # type: ignore[func-returns-value]
        flavor = Flavor("f", {"VCPU": 1}, {"resources1:VCPU": "1"})
        self.assertEqual("n1", self.place(scheduler, flavor=flavor).record.node)
        self.assertEqual([("compute.holds",)], asked)
        self.assertEqual("n0", self.place(scheduler).record.node)

    def test_states_that_are_read_change_only_the_nodes_that_they_name(self) -> None:
        scheduler = self.scheduler([4, 8, 2])
        before = scheduler.view.snapshot()
        scheduler.observe()
        self.assertIs(before, scheduler.view.snapshot())
        self.source.states = ExcludedTargets(
            frozenset({"h2"}), {"h0": "its agent h0 is disabled"}, {"u1": "the node is old"}
        )
        scheduler.observe()
        after = scheduler.view.snapshot()
        self.assertEqual(after.available.tolist(), [False] * 3)
        self.assertEqual(
            [node.disabled_reason for node in after.nodes], ["its agent h0 is disabled", "the node is old", ""]
        )
        self.assertEqual(before.available.tolist(), [True] * 3)
        self.source.states = ExcludedTargets()
        scheduler.observe()
        self.assertEqual(scheduler.view.snapshot().nodes, before.nodes)

    def test_every_forced_node_that_does_not_exist_is_named(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "There is no node nowhere on"):
            self.place(self.scheduler([4]), force_nodes=("n0", "nowhere"))
