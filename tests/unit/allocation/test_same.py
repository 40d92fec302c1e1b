# SPDX-License-Identifier: Apache-2.0
"""Random histories of changes and edits: the memory store is the model of the sql store, step by step."""

from __future__ import annotations

import unittest
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    ClaimOutcome,
    Expect,
    InventoryChange,
    InventoryItem,
    ProviderFilter,
    ResourceProvider,
)
from moorage.db import Database
from moorage.testing.allocation import all_allocations, all_usages
from moorage_plugins.stores.sql import SqlStore
from tests import cases
from tests.conformance.allocation.stores import SqlCase, create_tables, memory_store, sql_store, sqlite_url
from tests.memory_store.store import MemoryStore

PROVIDERS = tuple(str(uuid.UUID(int=number)) for number in range(1, 5))
CONSUMERS = tuple(str(uuid.UUID(int=number)) for number in range(100, 104))
AGGREGATES = tuple(str(uuid.UUID(int=number)) for number in range(200, 203))
TRAITS = ("HW_CPU_X86_AVX", "CUSTOM_GOLD", "MISC_SHARES_VIA_AGGREGATE")
CLASSES = ("VCPU", "DISK_GB")

provider = st.sampled_from(PROVIDERS)
inventories = st.lists(
    st.builds(
        InventoryItem,
        st.sampled_from(CLASSES),
        total=st.integers(2, 9),
        max_unit=st.integers(3, 8),
        step_size=st.sampled_from([1, 1, 2]),
    ),
    max_size=2,
    unique_by=lambda item: item.resource_class,
).map(tuple)
resources = st.dictionaries(
    provider, st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 5), min_size=1), max_size=2
)
change = st.builds(
    AllocationChange,
    st.sampled_from(CONSUMERS),
    resources,
    st.sampled_from([Expect.ANYTHING, Expect.ANYTHING, Expect.NOTHING, 1, 2, 3]),
    project=st.sampled_from([None, "p", "q"]),
    consumer_type=st.sampled_from([None, "A", "B"]),
    request_id=st.sampled_from([None, None, "r", "s"]),
)
changes = st.lists(change, min_size=1, max_size=2, unique_by=lambda each: each.consumer)
generation = st.sampled_from([None, None, 0, 1, 2, 3])


def plain(result: Any) -> Any:
    """A result that can be compared: the order of allocations is the store's own."""
    if isinstance(result, ClaimOutcome):
        return result.consumer, result.consumer_generation, set(result.allocations), result.repeated
    return [plain(each) for each in result] if isinstance(result, tuple) else result


class SameMachine(stateful.RuleBasedStateMachine):
    """Does everything to both stores."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        case = SqlCase()
        case.database = self.database
        case.empty()
        self.model: MemoryStore = memory_store()
        self.store: SqlStore = sql_store(self.database)
        self.both(lambda store: store.create_trait("CUSTOM_GOLD"))
        for number, each in enumerate(PROVIDERS[:2]):
            self.both(lambda store, each=each, number=number: store.create_provider(  # type: ignore[misc]
                ResourceProvider(each, f"name {number}", inventories=(InventoryItem("VCPU", 6), InventoryItem("DISK_GB", 6)))
            ))  # fmt: skip

    def both(self, work: Callable[[Any], Any]) -> None:
        answers = []
        for store in (self.model, self.store):
            try:
                answers.append(("ok", plain(work(store))))
            except errors.MoorageError as error:
                answers.append(("refused", error))
        first, second = answers
        # Where several things are wrong, each may name another one.
        assert first[0] == second[0], answers
        assert first[0] == "refused" or first == second, answers

    @stateful.rule(given=changes)
    def replace(self, given: list[AllocationChange]) -> None:
        self.both(lambda store: store.replace(given))

    @stateful.rule(given=changes, fails=st.just(True))
    def replace_and_fail(self, given: list[AllocationChange], fails: bool) -> None:
        def companion(_: Any) -> None:
            raise errors.InUse("a companion")

        # Repetitions do not call the companion.
        self.both(lambda store: bool(store.replace(given, companion)))

    @stateful.rule(items=st.dictionaries(provider, st.tuples(inventories, generation), max_size=2), given=changes)
    def reshape(self, items: Mapping[str, tuple[Any, int | None]], given: list[AllocationChange]) -> None:
        wanted = [InventoryChange(each, kept, expected) for each, (kept, expected) in items.items()]
        self.both(lambda store: store.reshape(wanted, given))

    @stateful.rule(consumer=st.sampled_from(CONSUMERS))
    def release(self, consumer: str) -> None:
        self.both(lambda store: store.release(consumer))

    @stateful.rule(of_provider=provider, parent=st.one_of(st.none(), provider))
    def create(self, of_provider: str, parent: str | None) -> None:
        given = ResourceProvider(of_provider, f"name of {of_provider}", parent=parent)
        self.both(lambda store: store.create_provider(given).root)

    @stateful.rule(of_provider=provider, parent=st.one_of(st.none(), provider), reparent=st.booleans())
    def move(self, of_provider: str, parent: str | None, reparent: bool) -> None:
        self.both(lambda store: store.update_provider(of_provider, parent=parent, reparent=reparent))

    @stateful.rule(of_provider=provider)
    def delete(self, of_provider: str) -> None:
        self.both(lambda store: store.delete_provider(of_provider))

    @stateful.rule(of_provider=provider, items=inventories, expected=generation)
    def edit(self, of_provider: str, items: tuple[InventoryItem, ...], expected: int | None) -> None:
        self.both(lambda store: store.set_inventories(of_provider, items, expected).generation)

    @stateful.rule(of_provider=provider, traits=st.sets(st.sampled_from(TRAITS)), expected=generation)
    def set_traits(self, of_provider: str, traits: set[str], expected: int | None) -> None:
        self.both(lambda store: store.set_traits(of_provider, traits, expected))

    @stateful.rule(of_provider=provider, aggregates=st.sets(st.sampled_from(AGGREGATES)), expected=generation)
    def set_aggregates(self, of_provider: str, aggregates: set[str], expected: int | None) -> None:
        self.both(lambda store: store.set_aggregates(of_provider, aggregates, expected))

    @stateful.rule(
        wanted=st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 4)),
        required=st.sets(st.sampled_from(TRAITS), max_size=2),
        member_of=st.sets(st.sampled_from(AGGREGATES), max_size=2),
        in_tree=st.one_of(st.none(), provider),
    )
    def find(self, wanted: dict[str, int], required: set[str], member_of: set[str], in_tree: str | None) -> None:
        query = ProviderFilter(
            in_tree=in_tree,
            resources=wanted,
            required=(frozenset(required),) if required else (),
            member_of=(frozenset(member_of),) if member_of else (),
        )
        self.both(lambda store: [each.uuid for each in store.find_providers(query)])
        self.both(
            lambda store: {uuid: [e.provider.uuid for e in found] for uuid, found in store.pools(PROVIDERS).items()}
        )

    @stateful.invariant()
    def the_same_is_stored(self) -> None:
        assert set(all_allocations(self.model)) == set(all_allocations(self.store))
        assert all_usages(self.model) == all_usages(self.store)
        for consumer in CONSUMERS:
            one, two = self.model.consumer(consumer), self.store.consumer(consumer)
            assert (one and one.consumer) == (two and two.consumer), (one, two)
        assert self.model.project_usages("p") == self.store.project_usages("p")
        assert self.store.drift() == []


def machine(of_database: Database) -> type[SameMachine]:
    class Machine(SameMachine):
        database = of_database

    return Machine


class SameTests(unittest.TestCase):
    @override
    def setUp(self) -> None:
        self.database = Database(sqlite_url(self))
        self.addCleanup(self.database.close)
        create_tables(self.database)

    def test_both_stores_do_the_same(self) -> None:
        settings = hypothesis.settings(max_examples=cases(25), stateful_step_count=30, deadline=None)
        stateful.run_state_machine_as_test(machine(self.database), settings=settings)
