# SPDX-License-Identifier: Apache-2.0
"""Random histories of a store, compared step by step with a model that is nothing but dictionaries."""

from __future__ import annotations

import contextlib
import unittest
import uuid
from fractions import Fraction
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationStore, ClaimRequest, InventoryItem, ResourceProvider
from moorage.db import Database
from moorage.testing.allocation import all_allocations, all_usages
from tests import cases
from tests.conformance.allocation.stores import SqlCase, create_tables, memory_store, sql_store, sqlite_url

PROVIDERS = tuple(str(uuid.UUID(int=number)) for number in range(1, 5))
CONSUMERS = tuple(str(uuid.UUID(int=number)) for number in range(100, 106))
CLASSES = ("VCPU", "DISK_GB", "CUSTOM_A")

inventory = st.builds(
    InventoryItem,
    st.sampled_from(CLASSES),
    total=st.integers(4, 12),
    reserved=st.integers(0, 3),
    min_unit=st.integers(1, 2),
    max_unit=st.integers(2, 8),
    step_size=st.sampled_from([1, 1, 2, 3]),
    # Exact doubles, so that the model may compute in fractions.
    allocation_ratio=st.sampled_from([1.0, 1.0, 0.5, 1.5]),
)
inventories = st.lists(inventory, max_size=3, unique_by=lambda item: item.resource_class)
resources = st.dictionaries(
    st.sampled_from(PROVIDERS),
    st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 5), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


class Model:
    """What a store should do, without any thought of speed or of several users."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, InventoryItem]] = {}
        self.claims: dict[str, tuple[str | None, dict[tuple[str, str], int]]] = {}

    def used(self, of_provider: str, of_class: str) -> int:
        return sum(held.get((of_provider, of_class), 0) for _, held in self.claims.values())

    def ensure(self, of_provider: str, wanted: list[InventoryItem]) -> str:
        kept = {item.resource_class for item in wanted}
        for name in self.items.get(of_provider, {}):
            if name not in kept and self.used(of_provider, name):
                return "in_use"
        self.items[of_provider] = {item.resource_class: item for item in wanted}
        return "ok"

    def claim(self, consumer: str, wanted: dict[str, dict[str, int]], request_id: str | None) -> set[str]:
        """The outcomes that are right: more than one where several things are wrong at once."""
        if consumer in self.claims:
            known = self.claims[consumer][0]
            return {"repeated"} if request_id is not None and known == request_id else {"conflict"}
        problems = {"missing"} if set(wanted) - set(self.items) else set()
        for of_provider, amounts in wanted.items():
            for name, amount in amounts.items():
                item = self.items.get(of_provider, {}).get(name)
                if item is None:
                    problems |= {"capacity"} if of_provider in self.items else set()
                    continue
                if not item.min_unit <= amount <= item.max_unit or (
                    amount % item.step_size and amount != item.min_unit
                ):
                    problems.add("constraint")
                elif self.used(of_provider, name) + amount > (item.total - item.reserved) * Fraction(
                    item.allocation_ratio
                ):
                    problems.add("capacity")
        if not problems:
            held = {(p, name): amount for p, amounts in wanted.items() for name, amount in amounts.items()}
            self.claims[consumer] = (request_id, held)
        return problems or {"ok"}

    def delete(self, of_provider: str) -> str:
        if of_provider not in self.items:
            return "absent"
        if any(key[0] == of_provider for _, held in self.claims.values() for key in held):
            return "in_use"
        del self.items[of_provider]
        return "ok"


class StoreMachine(stateful.RuleBasedStateMachine):
    """Drives a store and the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.stores = (memory_store(),) * 2
        self._make_classes()

    def _make_classes(self) -> None:
        """The model knows all classes from the start, so the store must."""
        maker = ResourceProvider("classes", "classes", True, inventories=(InventoryItem("CUSTOM_A", 1),))
        self.stores[0].ensure_providers([maker])
        self.stores[0].delete_provider("classes")

    def either(self, first: bool) -> AllocationStore:
        return self.stores[0 if first else 1]

    @stateful.rule(first=st.booleans(), of_provider=st.sampled_from(PROVIDERS), wanted=inventories)
    def ensure(self, first: bool, of_provider: str, wanted: list[InventoryItem]) -> None:
        expected = self.model.ensure(of_provider, wanted)
        given = ResourceProvider(of_provider, f"name of {of_provider}", True, inventories=tuple(wanted))
        outcome = "ok"
        try:
            self.either(first).ensure_providers([given])
        except errors.InUse:
            outcome = "in_use"
        assert outcome == expected, (outcome, expected)

    @stateful.rule(
        first=st.booleans(),
        consumer=st.sampled_from(CONSUMERS),
        wanted=resources,
        request_id=st.sampled_from(["r", "r", "s", None]),
        fails=st.sampled_from([False, False, False, True]),
    )
    def claim(
        self, first: bool, consumer: str, wanted: dict[str, dict[str, int]], request_id: str | None, fails: bool
    ) -> None:
        before = dict(self.model.claims)
        expected = self.model.claim(consumer, wanted, request_id)
        if fails and expected == {"ok"}:
            self.model.claims = before
            expected = {"undone"}

        def companion(_: Any) -> None:
            if fails:
                raise ZeroDivisionError

        request = ClaimRequest(consumer, wanted, request_id)
        try:
            outcome = "repeated" if self.either(first).claim(request, companion).repeated else "ok"
        except errors.CapacityExceeded:
            outcome = "capacity"
        except errors.ConstraintViolated:
            outcome = "constraint"
        except errors.NotFound:
            outcome = "missing"
        except errors.Conflict:
            outcome = "conflict"
        except ZeroDivisionError:
            outcome = "undone"
        assert outcome in expected, (outcome, expected)

    @stateful.rule(first=st.booleans(), consumer=st.sampled_from(CONSUMERS))
    def release(self, first: bool, consumer: str) -> None:
        expected = self.model.claims.pop(consumer, None) is not None
        assert self.either(first).release(consumer) == expected

    @stateful.rule(first=st.booleans(), of_provider=st.sampled_from(PROVIDERS))
    def delete(self, first: bool, of_provider: str) -> None:
        expected = self.model.delete(of_provider)
        outcome = "in_use"
        with contextlib.suppress(errors.InUse):
            outcome = "ok" if self.either(first).delete_provider(of_provider) else "absent"
        assert outcome == expected, (outcome, expected)

    @stateful.invariant()
    def stored_is_what_the_model_says(self) -> None:
        stored = {(i.consumer, i.provider, i.resource_class): i.used for i in all_allocations(self.stores[1], limit=4)}
        expected = {
            (consumer, *key): used for consumer, (_, held) in self.model.claims.items() for key, used in held.items()
        }
        assert stored == expected, (stored, expected)
        shown = {
            each.provider.uuid: {item.resource_class: (item, each.used[item.resource_class]) for item in each.provider.inventories}
            for each in all_usages(self.stores[0], limit=3)
        }  # fmt: skip
        assert shown == {
            identity: {name: (item, self.model.used(identity, name)) for name, item in items.items()}
            for identity, items in self.model.items.items()
        }, (shown, self.model.items)


def sqlite_machine(database: Database) -> type[StoreMachine]:
    """The machine on two sql stores of one database, with memories of their own."""

    class SqliteMachine(StoreMachine):
        @override
        def __init__(self) -> None:
            stateful.RuleBasedStateMachine.__init__(self)
            self.model = Model()
            case = SqlCase()
            case.database = database
            case.empty()
            self.stores = (sql_store(database), sql_store(database))  # type: ignore[assignment]
            self._make_classes()

    return SqliteMachine


class ModelTests(unittest.TestCase):
    def test_the_memory_store_does_what_the_model_does(self) -> None:
        settings = hypothesis.settings(max_examples=cases(60), stateful_step_count=40, deadline=None)
        stateful.run_state_machine_as_test(StoreMachine, settings=settings)

    def test_the_sql_store_does_what_the_model_does(self) -> None:
        database = Database(sqlite_url(self))
        self.addCleanup(database.close)
        create_tables(database)
        settings = hypothesis.settings(max_examples=cases(40), stateful_step_count=30, deadline=None)
        stateful.run_state_machine_as_test(sqlite_machine(database), settings=settings)
