# SPDX-License-Identifier: Apache-2.0
"""What may happen to members and servers, by backend, and the test that says what comes of it."""

from __future__ import annotations

import unittest
from collections.abc import Mapping

BACKENDS = ("zookeeper", "etcd", "redis", "memcached", "file", "database")
_HERE = "tests.functional.coordination"
_CLASSES = {
    "zookeeper": "test_faults.ZookeeperFaultTests",
    "etcd": "test_faults.EtcdFaultTests",
    "redis": "test_faults.RedisFaultTests",
    "memcached": "test_faults.MemcachedFaultTests",
    "file": "test_faults.FileFaultTests",
    "database": "test_faults.DatabaseFaultTests",
}


class No(str):
    """Why a row has no test on a backend."""

    __slots__ = ()


_NO_SERVER = No("a file has no server that could fail")
_OWN = No(
    "the guard is the member's own and asks no server: shown on the reference backend, and by the simulation on all"
)


def _on_all(test: str, **others: str) -> Mapping[str, str]:
    return {backend: others.get(backend, f"{_HERE}.{name}.{test}") for backend, name in _CLASSES.items()}


def _on_zookeeper(test: str, reason: No = _OWN, **others: str) -> Mapping[str, str]:
    return {backend: others.get(backend, reason) for backend in BACKENDS} | {"zookeeper": f"{_HERE}.{test}"}


_REPLICAS = No("the server is one process here; what several of them do is theirs")
_ENGINES = "test_engines"
_START = f"{_HERE}.{_ENGINES}.StartTests"
#: Row -> backend -> the test, or why there is none.
MATRIX: Mapping[str, Mapping[str, str]] = {
    "a member is killed; or paused beyond its session, and goes on": _on_all(
        "test_a_killed_member_is_gone_after_its_session_and_a_paused_one_comes_back_as_somebody_else"
    ),
    "a member leaves in order": _on_all("test_a_member_that_leaves_in_order_is_gone_at_once"),
    "the server stands still for less than a session": _on_all(
        "test_a_server_that_pauses_shorter_than_the_session_costs_nobody_the_membership", file=_NO_SERVER
    ),
    "the server stands still for longer": _on_all(
        "test_a_server_that_pauses_longer_stops_everybody_in_time_and_all_come_back", file=_NO_SERVER
    ),
    "the server is killed and restarted at once": _on_all(
        "test_a_server_that_is_restarted_at_once_is_worked_with_again", file=_NO_SERVER
    ),
    "the server is killed and restarted when sessions are over": _on_all(
        "test_a_server_that_is_killed_and_restarted_gets_everybody_back", file=_NO_SERVER
    ),
    "the server loses its data": _on_all(
        "test_a_server_that_lost_its_data_gets_everybody_back",
        file=_NO_SERVER,
        database=f"{_HERE}.test_faults.DatabaseFaultTests.test_services_that_were_lost_stop_for_good_and_new_ones_take_over",
    ),
    "the server is down at the start": _on_all(
        "test_a_server_that_is_down_at_the_start_is_told_of_in_time",
        file=_NO_SERVER,
        database=f"{_START}.test_a_database_that_is_down_keeps_the_engine_from_starting",
    ),
    "an engine is started with a wrong backend": dict.fromkeys(
        BACKENDS, f"{_START}.test_a_wrong_backend_keeps_the_engine_from_starting_with_the_reason"
    ),
    "an engine is started with one that cannot be reached": _on_zookeeper(
        f"{_ENGINES}.StartTests.test_an_unreachable_backend_keeps_it_from_starting_unless_it_may_wait",
        No("the engine makes nothing of which backend it is; that each says so in time is a row above"),
    ),
    "one of three servers is lost, then two": _on_zookeeper(
        "test_faults.EnsembleTests."
        "test_the_loss_of_one_is_survived_and_the_loss_of_two_stops_all_work_until_one_is_back",
        _REPLICAS,
    ),
    "a member is cut off": _on_zookeeper(
        "test_network.PartitionTests.test_a_member_that_is_cut_off_stops_before_others_take_over"
    ),
    "a member is not heard": _on_zookeeper(
        "test_network.PartitionTests.test_a_member_that_hears_and_is_not_heard_stops_before_others_take_over"
    ),
    "a member does not hear": _on_zookeeper(
        "test_network.PartitionTests.test_a_member_that_is_heard_and_does_not_hear_stops_and_others_take_over"
    ),
    "a thousand sessions die at once": _on_zookeeper(
        "test_network.StampedeTests.test_those_who_stay_keep_their_sessions_when_a_thousand_others_die_at_once",
        No("what is tried is how ZooKeeper ends sessions"),
    ),
    "the time of day jumps or races": _on_zookeeper(
        "test_network.ClockTests.test_a_clock_that_jumps_or_races_costs_nobody_the_membership_and_nobody_takes_over"
    ),
    "members come and go without end": _on_zookeeper(
        "test_network.ChurnTests.test_no_change_moves_more_than_twice_what_it_must_and_all_is_owned_when_it_is_quiet"
    ),
    "members see different groups": dict.fromkeys(
        BACKENDS,
        "tests.unit.coordination.test_simulation.SimulationTests.test_with_immediate_handover_every_law_holds",
    ),
    "an engine is killed, another one paused and woken, with objects in hand": _on_zookeeper(
        f"{_ENGINES}.EngineFaultTests.test_each_object_is_handled_at_most_once_a_tick_whatever_happens_to_engines",
        No("the claims lie in the store, whatever the backend; the rows above say when a member is gone"),
        database=f"{_HERE}.{_ENGINES}.DatabaseFaultTests."
        "test_each_object_is_handled_at_most_once_a_tick_whatever_happens_to_engines",
    ),
}


class MatrixTests(unittest.TestCase):
    def test_every_row_has_its_test_on_every_backend_or_a_reason(self) -> None:
        for row, cells in MATRIX.items():
            self.assertEqual(set(cells), set(BACKENDS), row)
            tested = [cell for cell in cells.values() if not isinstance(cell, No)]
            self.assertTrue(tested, f"{row}: only reasons, no test")
            for name in tested:
                with self.subTest(row=row, test=name):
                    self.assertGreater(_found(name), 0)

    def test_a_test_that_is_not_there_would_be_noticed(self) -> None:
        some = MATRIX["a member leaves in order"]["zookeeper"]
        self.assertEqual((_found(some), _found(some + "_"), _found("tests.nowhere")), (1, 0, 0))


def _found(name: str) -> int:
    """How many tests have the name, or are in the class or module of it."""
    loader = unittest.TestLoader()
    loaded = loader.loadTestsFromName(name)
    return 0 if loader.errors else loaded.countTestCases()
