# SPDX-License-Identifier: Apache-2.0
"""Clients that race, over HTTP: who is refused, why, and that never more is held than there is."""

from __future__ import annotations

import collections
import functools
import unittest
from typing import Any

from tests import servers
from tests.api.live import LiveDialect
from tests.api.placement.wire import Wire, at_once, claim, code, new_uuid

_CONCURRENT = "placement.concurrent_update"
_FULL = "placement.allocation.capacity_exceeded"


class Races(unittest.TestCase):
    """On SQLite; the subclasses take other databases."""

    server: str | None = None
    live: LiveDialect
    wire: Wire

    @classmethod
    def setUpClass(cls) -> None:
        url = servers.fresh_database(servers.shared(cls.server)) if cls.server else None
        cls.live = LiveDialect("placement", url=url)
        cls.addClassCleanup(cls.live.close)
        cls.wire = Wire(cls.live.url)

    def put(self, consumer: str, *args: Any, **keywords: Any) -> Any:
        return functools.partial(self.wire.send, "PUT", f"/allocations/{consumer}", claim(*args, **keywords))

    def test_racing_claims_take_all_there_is_and_never_more(self) -> None:
        provider = self.wire.provider(VCPU=20, MEMORY_MB=1000)
        consumers = [new_uuid() for _ in range(40)]
        answers = at_once([self.put(each, {provider: {"VCPU": 1, "MEMORY_MB": 10}}) for each in consumers])
        self.assertEqual({204: 20, 409: 20}, dict(collections.Counter(each.status_code for each in answers)))
        self.assertEqual({_FULL}, {code(each) for each in answers if each.status_code == 409})
        held = self.wire.get(f"/resource_providers/{provider}/allocations")["allocations"]
        granted = {each for each, answer in zip(consumers, answers, strict=True) if answer.status_code == 204}
        self.assertEqual(granted, set(held))
        self.assertEqual(
            {"VCPU": 20, "MEMORY_MB": 200}, self.wire.get(f"/resource_providers/{provider}/usages")["usages"]
        )

    def test_a_claim_that_fits_is_never_refused_for_the_sake_of_others(self) -> None:
        pool = self.wire.provider(DISK_GB=10_000)
        hosts = [self.wire.provider(VCPU=100) for _ in range(4)]
        jobs = [self.put(new_uuid(), {hosts[number % 4]: {"VCPU": 1}, pool: {"DISK_GB": 10}}) for number in range(64)]
        self.assertEqual({204}, {each.status_code for each in at_once(jobs)})
        self.assertEqual({"DISK_GB": 640}, self.wire.get(f"/resource_providers/{pool}/usages")["usages"])

    def test_of_several_that_create_one_consumer_one_wins(self) -> None:
        provider, consumer = self.wire.provider(VCPU=100), new_uuid()
        answers = at_once([self.put(consumer, {provider: {"VCPU": amount}}) for amount in range(1, 9)])
        self.assertEqual({204: 1, 409: 7}, dict(collections.Counter(each.status_code for each in answers)))
        self.assertEqual({_CONCURRENT}, {code(each) for each in answers if each.status_code == 409})
        won = next(amount for amount, each in enumerate(answers, 1) if each.status_code == 204)
        self.assertEqual({"VCPU": won}, self.wire.get(f"/resource_providers/{provider}/usages")["usages"])

    def test_of_several_that_change_one_consumer_of_a_generation_one_wins(self) -> None:
        provider, consumer = self.wire.provider(VCPU=100), new_uuid()
        self.assertEqual(204, self.put(consumer, {provider: {"VCPU": 50}})().status_code)
        generation = self.wire.get(f"/allocations/{consumer}")["consumer_generation"]
        jobs = [self.put(consumer, {provider: {"VCPU": amount}}, generation) for amount in range(1, 9)]
        answers = at_once(jobs)
        self.assertEqual({204: 1, 409: 7}, dict(collections.Counter(each.status_code for each in answers)))
        self.assertEqual({_CONCURRENT}, {code(each) for each in answers if each.status_code == 409})
        self.assertGreater(self.wire.get(f"/allocations/{consumer}")["consumer_generation"], generation)

    def test_of_several_writers_of_one_provider_generation_one_wins(self) -> None:
        aggregates, traits = [new_uuid()], ["HW_CPU_X86_AVX"]
        for part, body in (
            ("inventories", {"inventories": {"VCPU": {"total": 7}}}),
            ("inventories/VCPU", {"total": 8}),
            ("aggregates", {"aggregates": aggregates}),
            ("traits", {"traits": traits}),
        ):
            with self.subTest(part):
                provider = self.wire.provider(VCPU=9)
                path = f"/resource_providers/{provider}"
                generation = self.wire.get(path)["generation"]
                given = {**body, "resource_provider_generation": generation}
                job = functools.partial(self.wire.send, "PUT", f"{path}/{part}", given)
                answers = at_once([job] * 8)
                self.assertEqual({200: 1, 409: 7}, dict(collections.Counter(each.status_code for each in answers)))
                self.assertEqual({_CONCURRENT}, {code(each) for each in answers if each.status_code == 409})
                self.assertEqual(generation + 1, self.wire.get(path)["generation"])

    def test_claims_while_the_provider_shrinks_never_hold_more_than_there_is_then(self) -> None:
        provider = self.wire.provider(VCPU=40)
        path = f"/resource_providers/{provider}/inventories"

        def shrink() -> Any:
            while True:
                generation = self.wire.get(path)["resource_provider_generation"]
                body = {"resource_provider_generation": generation, "inventories": {"VCPU": {"total": 10}}}
                answer = self.wire.send("PUT", path, body)
                if answer.status_code != 409:
                    return answer

        claims = [self.put(new_uuid(), {provider: {"VCPU": 1}}) for _ in range(60)]
        answers = at_once([*claims[:10], shrink, *claims[10:]])
        self.assertEqual(200, answers.pop(10).status_code)
        self.assertLessEqual({each.status_code for each in answers}, {204, 409})
        granted = sum(each.status_code == 204 for each in answers)
        self.assertEqual(granted, self.wire.get(f"/resource_providers/{provider}/usages")["usages"]["VCPU"])
        self.assertLess(granted, 60)
        # Whatever was granted before the shrinking: now it is full.
        self.assertEqual(409, self.put(new_uuid(), {provider: {"VCPU": 1}})().status_code)

    def test_racing_moves_keep_the_sum(self) -> None:
        here, there = self.wire.provider(VCPU=8), self.wire.provider(VCPU=8)
        consumers = [new_uuid() for _ in range(8)]
        for each in consumers:
            self.assertEqual(204, self.put(each, {here: {"VCPU": 1}})().status_code)
        generations = [self.wire.get(f"/allocations/{each}")["consumer_generation"] for each in consumers]
        jobs = [
            functools.partial(
                self.wire.send,
                "POST",
                "/allocations",
                {
                    instance: claim({there: {"VCPU": 1}}, generation),
                    new_uuid(): claim({here: {"VCPU": 1}}),
                },
            )
            for instance, generation in zip(consumers, generations, strict=True)
        ]
        self.assertEqual({204}, {each.status_code for each in at_once(jobs)})
        for provider in (here, there):
            self.assertEqual({"VCPU": 8}, self.wire.get(f"/resource_providers/{provider}/usages")["usages"])

    def test_a_repeated_key_is_answered_as_before_and_takes_nothing_again(self) -> None:
        provider, consumer = self.wire.provider(VCPU=10), new_uuid()
        body, key = claim({provider: {"VCPU": 3}}), new_uuid()
        job = functools.partial(self.wire.send, "PUT", f"/allocations/{consumer}", body, Idempotency_Key=key)
        self.assertEqual({204}, {each.status_code for each in at_once([job] * 8)})
        held = self.wire.get(f"/allocations/{consumer}")
        self.assertEqual({"VCPU": 3}, held["allocations"][provider]["resources"])
        self.assertEqual(1, held["consumer_generation"])
        # Without the key it is another request, which expects a consumer that holds nothing.
        again = self.wire.send("PUT", f"/allocations/{consumer}", body)
        self.assertEqual((409, _CONCURRENT), (again.status_code, code(again)))


class PostgresqlRaces(Races):
    server = "postgresql"


class MariadbRaces(Races):
    server = "mariadb"
