# SPDX-License-Identifier: Apache-2.0
"""What becomes an event, and what does not."""

from __future__ import annotations

import unittest
from dataclasses import replace

from moorage import errors
from moorage.cleanup.requests import LEFTOVERS, CleanupRequest
from moorage.control_plane.observing import of_decision, of_service, tell_of_request
from moorage.instances.observed_claims import ObservedClaimer
from moorage.observers.interface import (
    ClaimRefused,
    ClaimWon,
    CleanupRequested,
    ObserverEvent,
    RequestDecided,
    RequestRefused,
    ServiceDown,
    ServiceFenced,
    ServiceUp,
)
from moorage.scheduling.decisions import Decision
from moorage.scheduling.interface import ClaimResult, Flavor, RequestSpec
from moorage.services.interface import Service

SPEC = RequestSpec("i1", Flavor("small", {"VCPU": 2}), project_id="p1")
SERVICE = Service("s1", "agent-1", "agent", None, 4, 17, 0, "1.0", False, "", False)


class Answers:
    """Stands for a claimer that answers what the test says."""

    def __init__(self, answer: ClaimResult | errors.MoorageError) -> None:
        self.answer = answer
        self.released: list[str] = []

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        if isinstance(self.answer, errors.MoorageError):
            raise self.answer
        return self.answer

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        return None

    def release(self, instance_uuid: str) -> None:
        self.released.append(instance_uuid)


class ClaimsTests(unittest.TestCase):
    def claim(self, answer: ClaimResult | errors.MoorageError) -> list[ObserverEvent]:
        told: list[ObserverEvent] = []
        claimer = ObservedClaimer(Answers(answer), told.append)
        try:
            self.assertIs(answer, claimer.claim(SPEC, "n1", "agent-1", "r1"))
        except errors.MoorageError as error:
            self.assertIs(answer, error)
        return told

    def test_a_claim_that_holds_is_told_with_where_it_holds(self) -> None:
        self.assertEqual([ClaimWon("r1", "i1", "n2", {"VCPU": 2})], self.claim(ClaimResult("n2")))
        self.assertEqual([ClaimWon("r1", "i1", "n2", {"VCPU": 2}, 7)], self.claim(ClaimResult("n2", together=7)))

    def test_a_repeated_claim_was_told_before(self) -> None:
        self.assertEqual([], self.claim(ClaimResult("n2", repeated=True)))

    def test_a_refusal_is_told_with_its_code(self) -> None:
        refused = ClaimRefused("r1", "i1", "n1", errors.CapacityExceeded.code)
        self.assertEqual([refused], self.claim(errors.CapacityExceeded("Full.")))

    def test_a_store_that_is_away_has_refused_nothing(self) -> None:
        self.assertEqual([], self.claim(errors.StoreUnavailable("Away.")))

    def test_what_is_given_back_is_given_back(self) -> None:
        answers = Answers(ClaimResult("n1"))
        ObservedClaimer(answers, self.fail).release("i1")
        self.assertEqual(["i1"], answers.released)


class DecisionsTests(unittest.TestCase):
    def test_a_decision_tells_how_many_claims_it_took(self) -> None:
        decision = Decision("r1", SPEC, "placed", 8, 5, {}, (), [{"node": "n9"}], (), "agent-1", "n1")
        self.assertEqual(RequestDecided("r1", "i1", "p1", "agent-1", "n1", 2, 8, 5), of_decision(decision))

    def test_a_refusal_tells_why_and_names_the_filters_that_removed_nodes(self) -> None:
        decision = Decision("r1", SPEC, "refused: no node has enough VCPU free", 8, 0, {"capacity": 8, "compute": 0})
        told = RequestRefused("r1", "i1", "p1", "no node has enough VCPU free", 8, {"capacity": 8})
        self.assertEqual(told, of_decision(decision))


class ServicesTests(unittest.TestCase):
    def test_one_that_ended_in_good_order_is_told_apart_from_one_that_fell_silent(self) -> None:
        self.assertEqual(ServiceUp("s1", "agent", "agent-1", 4), of_service(SERVICE, True))
        self.assertEqual(ServiceDown("s1", "agent", "agent-1", 4, "silent"), of_service(SERVICE, False))
        stopped = replace(SERVICE, beat=0)
        self.assertEqual(ServiceDown("s1", "agent", "agent-1", 4, "stopped"), of_service(stopped, False))

    def test_a_request_for_a_dead_service_is_told_together_with_its_death(self) -> None:
        request = CleanupRequest("q1", "s1", 5, "", "", 0, None, "agent-1", "manual", "me", None, 0)
        told: list[ObserverEvent] = []
        tell_of_request(told.append, SERVICE, request)
        dead = ServiceFenced("s1", "agent", "agent-1", 4, "declared dead for the cleanup request q1")
        self.assertEqual([dead, CleanupRequested("q1", "s1", 5, "manual", "me")], told)

    def test_what_a_living_service_left_earlier_fences_nobody(self) -> None:
        request = CleanupRequest("q1", "s1", 4, "", "", 0, None, "agent-1", LEFTOVERS, "me", None, 0)
        told: list[ObserverEvent] = []
        tell_of_request(told.append, SERVICE, request)
        self.assertEqual([CleanupRequested("q1", "s1", 4, LEFTOVERS, "me")], told)
