# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to messages, what a scheduler knows is what the store knows after one period of comparisons."""

from __future__ import annotations

import unittest

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moorage.scheduling.interface import InstanceRecord
from tests.unit.scheduling.simulation import SIZES, Agent, Simulation, Watcher

INDEX = st.integers(0, 10**6)


class TrackingMachine(RuleBasedStateMachine):
    """Two schedulers, three agents (one of which may be of an older release), and a network without manners."""

    simulation: Simulation
    created: int

    @initialize(silent=st.integers(0, 1))
    def begin(self, silent: int) -> None:
        self.simulation = Simulation(["h0", "h1", "h2"], schedulers=2, silent=silent)
        self.created = 0

    def agent(self, index: int) -> Agent:
        return self.simulation.agents[index % 3]

    def some(self, index: int) -> str:
        rows = sorted(self.simulation.store.rows)
        return rows[index % len(rows)]

    def owner(self, uuid: str) -> Agent:
        host = self.simulation.store.rows[uuid].host
        return next(each for each in self.simulation.agents if each.host == host)

    # -- what agents do -------------------------------------------------------------------------------------------

    @rule(agent=INDEX, flavor=st.sampled_from(sorted(SIZES)), again=st.booleans())
    def create(self, agent: int, flavor: str, again: bool) -> None:
        # Uuids come back too: an instance that is brought back from the shelf has its old one.
        uuid = f"i{max(0, self.created - 1) if again else self.created}"
        if uuid not in self.simulation.store.rows:
            self.created += not again
            self.agent(agent).create(uuid, flavor)

    @precondition(lambda self: self.simulation.store.rows)
    @rule(index=INDEX)
    def delete(self, index: int) -> None:
        uuid = self.some(index)
        self.owner(uuid).delete(uuid)

    @precondition(lambda self: self.simulation.store.rows)
    @rule(index=INDEX, flavor=st.sampled_from(sorted(SIZES)))
    def resize(self, index: int, flavor: str) -> None:
        uuid = self.some(index)
        self.owner(uuid).resize(uuid, flavor)

    @precondition(lambda self: self.simulation.store.rows)
    @rule(index=INDEX, to=INDEX)
    def migrate(self, index: int, to: int) -> None:
        uuid = self.some(index)
        if self.owner(uuid) is not self.agent(to):
            self.owner(uuid).migrate(uuid, self.agent(to))

    @rule(agent=INDEX)
    def restart(self, agent: int) -> None:
        self.agent(agent).restart()

    @rule(agent=INDEX)
    def compare(self, agent: int) -> None:
        if self.agent(agent).speaks:
            self.agent(agent).sync_instances()

    # -- what schedulers do ---------------------------------------------------------------------------------------

    @rule(scheduler=st.integers(0, 1), agent=INDEX)
    def claim_that_comes_to_nothing(self, scheduler: int, agent: int) -> None:
        host = self.agent(agent)
        record = InstanceRecord(f"ghost{self.created}", host.host, host.node, "small", SIZES["small"], "p")
        self.simulation.schedulers[scheduler].tracker.reserve(record)

    @rule(scheduler=st.integers(0, 1))
    def restart_scheduler(self, scheduler: int) -> None:
        self.simulation.schedulers[scheduler].subscription.stop(0)
        self.simulation.schedulers[scheduler] = Watcher(self.simulation, f"scheduler-{scheduler}")

    # -- what happens to messages ---------------------------------------------------------------------------------

    @precondition(lambda self: self.simulation.network.pending)
    @rule(index=INDEX)
    def deliver(self, index: int) -> None:
        self.simulation.network.deliver(index % len(self.simulation.network.pending))

    @precondition(lambda self: self.simulation.network.pending)
    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        self.simulation.network.drop(index % len(self.simulation.network.pending))

    @precondition(lambda self: self.simulation.network.pending)
    @rule(index=INDEX)
    def double(self, index: int) -> None:
        self.simulation.network.duplicate(index % len(self.simulation.network.pending))

    @rule(seconds=st.sampled_from([0.5, 3, 30]))
    def pass_time(self, seconds: float) -> None:
        self.simulation.pass_time(seconds)

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def the_columns_are_what_the_instances_add_up_to(self) -> None:
        for scheduler in self.simulation.schedulers:
            fleet = scheduler.view.snapshot()
            for row in range(fleet.size):
                here = fleet.instances_on(row)
                assert fleet.num_instances[row] == len(here)
                used = sum(each.resources["VCPU"] for each in here.values())
                assert fleet.capacity("VCPU")[row] - fleet.free("VCPU")[row] == used
                for uuid in here:
                    assert fleet.locate([uuid]) == {uuid: row}, "an instance is on two nodes"

    @rule()
    def one_period_repairs_everything(self) -> None:
        simulation = self.simulation
        simulation.sync_period()
        for scheduler in simulation.schedulers:
            scheduler.silent.freshen(scheduler.view.snapshot().rows_of_host)
            assert scheduler.known() == simulation.truth(), (scheduler.known(), simulation.truth())
            assert scheduler.used() == simulation.used()
            assert scheduler.tracker.stale() == {}

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.one_period_repairs_everything()


class TrackingModelTests(unittest.TestCase):
    def test_a_scheduler_knows_what_the_store_knows(self) -> None:
        run_state_machine_as_test(TrackingMachine)
