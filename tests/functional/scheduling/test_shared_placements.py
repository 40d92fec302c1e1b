# SPDX-License-Identifier: Apache-2.0
"""Creates that wait for each other at a scheduler are placed together, and each is answered as if it were alone."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import sqlalchemy as sa
from oslo_context import context as oslo_context
from typing_extensions import override

from moorage import errors
from moorage.context import RequestContext, acting_for
from moorage.db.tables import events
from moorage.gathering import Gathered, Gathering
from moorage.rpc import wire
from moorage.scheduling import shared_placements
from moorage.scheduling.alike import AlikeRequests
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.placement import Placement, Selection
from moorage.scheduling.scheduler import Scheduler
from tests.functional.scheduling.plane import Plane
from tests.servers import wait_until

G = TypeVar("G", bound=Gathered)
#: Creates that wait in these tests.
WAITING = 6


class SharedPlacementTests(unittest.TestCase):
    """One scheduler whose first create is held until the others wait for it."""

    @override
    def setUp(self) -> None:
        made: list[Gathering[Any]] = []

        class Noted(Gathering[G]):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                made.append(self)

        for name, value in (("Gathering", Noted), ("_PATIENCE", 60.0)):
            patch = mock.patch.object(shared_placements, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.plane = Plane(self).up()
        [self.gathering] = made
        self.pool = ThreadPoolExecutor(WAITING + 1)
        self.addCleanup(self.pool.shutdown)
        self.sets: list[list[str]] = []

    def send(self, request: dict[str, Any], place: int) -> Future[Any]:
        """Send the create of a user who has a project and a request of its own."""

        def create() -> Any:
            with acting_for(RequestContext(project_id=f"project-{place}", request_id=f"req-{place}", overwrite=False)):
                args = {"request": request, "request_id": request["uuid"]}
                return self.plane.client.sender.call("scheduler", "create_instance", args)

        return self.pool.submit(create)

    def together(self, *requests: dict[str, Any]) -> list[Future[Any]]:
        """Send a create that is held until these wait, in this order."""
        first, gate = self.plane.request(), threading.Event()
        self.addCleanup(gate.set)
        alone, in_set = Scheduler.place_prepared, Scheduler.place_prepared_set

        def held(scheduler: Scheduler, work: Placement, *more: Any) -> Selection:
            if work.spec.instance_uuid == first["uuid"]:
                gate.wait(60)
            return alone(scheduler, work, *more)

        def noted(scheduler: Scheduler, works: list[Placement], *more: Any) -> Any:
            if len(works) > 1:
                self.sets.append([each.spec.instance_uuid for each in works])
            return in_set(scheduler, works, *more)

        with (
            mock.patch.object(Scheduler, "place_prepared", held),
            mock.patch.object(Scheduler, "place_prepared_set", noted),
        ):
            sent = [self.send(first, 0)]
            wait_until(lambda: self.gathering._leaders, "the first one leads", 60)
            for place, request in enumerate(requests, 1):
                sent.append(self.send(request, place))
                wait_until(lambda place=place: len(self.gathering._waiting) == place, "it waits", 60)  # type: ignore[misc]
            gate.set()
            for each in sent:
                each.exception(60)
        self.assertEqual(first["uuid"], sent[0].result()["uuid"])
        wait_until(lambda: not self.gathering._leaders, "no thread leads any more", 60)
        return sent[1:]

    def each(self, *requests: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Send the creates of several users in one message."""
        data = [
            {
                "request": request,
                "request_id": request["uuid"],
                "context": {"project_id": f"project-{place}", "request_id": f"req-{place}"},
            }
            for place, request in enumerate(requests, 1)
        ]
        found: list[dict[str, Any] | None] = self.plane.client.sender.call(
            "scheduler", "create_each", {"requests": data}
        )
        return found

    def owners(self, kind: str) -> dict[str, tuple[str, str]]:
        """The request and the project of the events of a kind, by subject."""
        columns = events.c.subject, events.c.request_id, events.c.project_id
        with self.plane.database.read() as tx:
            found = tx.execute(sa.select(*columns).where(events.c.kind == kind)).all()
        return {subject: (request, project) for subject, request, project in found}

    def test_those_that_wait_are_placed_by_one_thread_and_remain_apart(self) -> None:
        requests = [self.plane.request() for _ in range(WAITING)]
        told = len(self.plane.casts)
        answers = [each.result() for each in self.together(*requests)]
        self.assertEqual([[each["uuid"] for each in requests]], self.sets)
        self.assertEqual([each["uuid"] for each in requests], [each["uuid"] for each in answers])
        for place, each in enumerate(answers, 1):
            self.assertEqual(f"project-{place}", each["instance"]["project_id"])
            self.plane.wait_status(each["uuid"], "active")
        for kind in ("operation.place", "instance.create"):
            owners = self.owners(kind)
            found = [owners[f"instance/{each['uuid']}"] for each in requests]
            self.assertEqual([(f"req-{place}", f"project-{place}") for place in range(1, WAITING + 1)], found, kind)
        builds = [server for _, method, server in self.plane.casts[told:] if method == "build_instance"]
        self.assertLessEqual(len(builds), 1 + len({each["host"] for each in answers}))
        self.plane.wait_agreement()

    def test_one_that_is_refused_or_fails_undoes_no_other(self) -> None:
        requests = [self.plane.request(vcpus) for vcpus in (1, 500, 2, 1)]
        poison, rank = requests[3]["uuid"], AlikeRequests.rank

        def failing(alike: AlikeRequests, spec: RequestSpec, refused: Any) -> Any:
            if spec.instance_uuid == poison:
                raise errors.PluginFailed(
                    f"A filter raised for {getattr(oslo_context.get_current(), 'request_id', None)}."
                )
            return rank(alike, spec, refused)

        with mock.patch.object(AlikeRequests, "rank", failing):
            small, large, medium, bad = self.together(*requests)
        self.assertEqual(1, len(self.sets))
        self.assertIsInstance(large.exception(), errors.NoValidHost)
        self.assertIsInstance(bad.exception(), errors.PluginFailed)
        # It was decided in the name of its own request.
        self.assertIn("req-4", str(bad.exception()))
        for each in (small, medium):
            self.plane.wait_status(each.result()["uuid"], "active")
        self.assertEqual("gone", self.plane.status(requests[1]["uuid"]))

    def test_those_of_one_message_are_placed_together_and_each_has_its_own_reply(self) -> None:
        requests = [self.plane.request(vcpus) for vcpus in (1, 500, 2, 1)]
        del requests[3]["flavor"]
        small, large, medium, bad = self.each(*requests)
        assert small and medium and bad
        with self.assertRaisesRegex(errors.MoorageError, "failed unexpectedly"):
            wire.result_of(bad)
        # No node has room now. Whether one will have when claims that are being made are known is found out by itself.
        self.assertIsNone(large)
        for place, reply in ((1, small), (3, medium)):
            found = wire.result_of(reply)["instance"]
            self.assertEqual((requests[place - 1]["uuid"], f"project-{place}"), (found["uuid"], found["project_id"]))
            self.plane.wait_status(found["uuid"], "active")
            owner = self.owners("instance.create")[f"instance/{found['uuid']}"]
            self.assertEqual((f"req-{place}", f"project-{place}"), owner)
        # A repetition finds what was made, and makes nothing.
        for first, again in zip((small, medium), self.each(requests[0], requests[2]), strict=True):
            assert again
            self.assertEqual(first["result"]["node"], again["result"]["node"])
            self.assertEqual({}, again["result"]["instance"])
        self.plane.wait_agreement()

    def test_one_of_a_message_that_cannot_be_placed_together_is_left(self) -> None:
        # There are fewer hosts with so much room.
        requests = [self.plane.request(16) for _ in range(3)]
        replies = self.each(*requests)
        made = [each["result"]["node"] for each in replies if each and "result" in each]
        self.assertEqual(len(made), len(set(made)))
        for request, reply in zip(requests, replies, strict=True):
            if reply is None:
                with self.assertRaises(errors.NoValidHost):
                    self.send(request, 1).result(60)

    def test_two_for_one_instance_in_a_message_are_refused(self) -> None:
        request = self.plane.request()
        with self.assertRaisesRegex(errors.InvalidInput, "the same instance"):
            self.each(request, request)
        self.assertEqual("gone", self.plane.status(request["uuid"]))

    def test_no_two_take_the_last_room(self) -> None:
        # Two hosts of 16 and a first one of 1: there is room for one of 16, and for one of 15.
        answers = self.together(*(self.plane.request(15) for _ in range(4)))
        placed = [each.result() for each in answers if each.exception() is None]
        self.assertEqual(2, len(placed))
        self.assertEqual(2, len({each["host"] for each in placed}))
        for each in answers:
            self.assertIsInstance(each.exception(), errors.NoValidHost | None)

    def test_a_repetition_waits_for_the_next_turn_and_finds_the_claim(self) -> None:
        request, other = self.plane.request(), self.plane.request()
        first, beside, again = (each.result() for each in self.together(request, other, request))
        self.assertEqual([[request["uuid"], other["uuid"]]], self.sets)
        self.assertEqual((first["host"], first["node"]), (again["host"], again["node"]))
        self.assertEqual({}, again["instance"])
        self.assertNotEqual(first["uuid"], beside["uuid"])

    def test_a_turn_that_fails_is_told_to_each_and_repeated_by_its_client(self) -> None:
        requests = [self.plane.request() for _ in range(3)]
        place_set: Callable[..., Any] = Scheduler._place_set

        def failing(scheduler: Scheduler, works: list[Placement], **more: Any) -> Any:
            found = place_set(scheduler, works, **more)
            if len(works) > 1:
                raise RuntimeError("after the commit")
            return found

        with mock.patch.object(Scheduler, "_place_set", failing):
            answers = self.together(*requests)
        for each in answers:
            self.assertIsInstance(each.exception(), errors.MoorageError)
        for place, request in enumerate(requests, 1):
            again = self.send(request, place).result(60)
            self.plane.wait_status(again["uuid"], "active")
            self.assertEqual({}, again["instance"])


class ApartTests(unittest.TestCase):
    """A store that makes each claim in a transaction of its own."""

    @mock.patch.object(shared_placements, "_PATIENCE", 60.0)
    def test_creates_are_placed_side_by_side(self) -> None:
        plane, gate = Plane(self, allocation_sql__claims_per_transaction=1).up(), threading.Event()
        self.addCleanup(gate.set)
        first, second = plane.request(), plane.request()
        alone = Scheduler.place_prepared

        def held(scheduler: Scheduler, work: Placement, *more: Any) -> Selection:
            if work.spec.instance_uuid == first["uuid"]:
                gate.wait(60)
            return alone(scheduler, work, *more)

        def send(request: dict[str, Any]) -> Any:
            args = {"request": request, "request_id": request["uuid"]}
            return plane.client.sender.call("scheduler", "create_instance", args)

        with mock.patch.object(Scheduler, "place_prepared", held), ThreadPoolExecutor(1) as pool:
            slow = pool.submit(send, first)
            self.assertEqual(second["uuid"], send(second)["uuid"])
            self.assertFalse(slow.done())
            gate.set()
            self.assertEqual(first["uuid"], slow.result(60)["uuid"])
