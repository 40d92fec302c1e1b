# SPDX-License-Identifier: Apache-2.0
"""Aggregates and properties of nodes, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import functools
import threading
import unittest
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING

from moorage import errors
from moorage.db import Database
from moorage.fleet.aggregates import HOST, NODE, AggregateStore
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.properties import change_node

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


def together(*work: Callable[[], object]) -> list[object]:
    """Do all of it at the same moment; results and errors."""
    barrier = threading.Barrier(len(work))

    def one(function: Callable[[], object]) -> object:
        barrier.wait(60)
        try:
            return function()
        except errors.MoorageError as error:
            return error

    with futures.ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(one, work))


class AggregateTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.store = AggregateStore(self.database)
        self.nodes = NodeStore(self.database)
        self.name = self.id().rpartition(".")[2][-60:]
        specs = [NodeSpec(uuid_of_name(f"{self.name}-{n}"), f"{self.name}-{n}", host=f"{self.name}-h") for n in (0, 1)]
        with self.database.write() as tx:
            self.nodes.ensure(tx, specs)
        self.node = specs[0].uuid

    def test_it_is_found_by_name_and_by_uuid(self) -> None:
        made = self.store.create(self.name, {"ssd": "true"})
        self.assertEqual(made, self.store.get(self.name))
        self.assertEqual(made, self.store.get(made.uuid))
        self.assertIn(made, self.store.list())
        self.assertEqual({"ssd": "true"}, made.metadata)

    def test_what_is_not_there_is_said(self) -> None:
        for ask in (self.store.get, self.store.remove, lambda name: self.store.change(name, metadata={})):
            with self.assertRaisesRegex(errors.NotFound, "There is no aggregate nothing; moorage aggregate list"):
                ask("nothing")
        self.store.create(self.name, {})
        for kind, text in ((HOST, "no host nobody that has nodes"), (NODE, "no node nobody")):
            with self.assertRaisesRegex(errors.NotFound, text):
                self.store.add(self.name, kind, "nobody")
            with self.assertRaisesRegex(errors.NotFound, f"The {kind} nobody is no member"):
                self.store.take_out(self.name, kind, "nobody")

    def test_a_name_belongs_to_one(self) -> None:
        self.store.create(self.name, {})
        other = self.store.create(self.name + "-other", {})
        for work in (lambda: self.store.create(self.name, {}), lambda: self.store.change(other.uuid, name=self.name)):
            with self.assertRaisesRegex(errors.AlreadyExists, "already"):
                work()

    def test_metadata_are_merged(self) -> None:
        self.store.create(self.name, {"a": "1", "b": "2"})
        changed = self.store.change(self.name, metadata={"b": None, "c": "3"})
        self.assertEqual({"a": "1", "c": "3"}, changed.metadata)
        self.assertEqual(1, changed.generation)

    def test_members_are_hosts_and_nodes(self) -> None:
        self.store.create(self.name, {"k": "v"})
        self.store.add(self.name, HOST, f"{self.name}-h")
        self.store.add(self.name, HOST, f"{self.name}-h")
        found = self.store.add(self.name, NODE, f"{self.name}-0")
        self.assertEqual(((f"{self.name}-h",), (self.node,)), (found.hosts, found.nodes))
        membership = self.store.membership()
        self.assertEqual([(self.name, {"k": "v"})], membership.of(f"{self.name}-h", "other"))
        self.assertEqual([(self.name, {"k": "v"})], membership.of("other", self.node))
        self.assertEqual([(self.name, {"k": "v"})], membership.of(f"{self.name}-h", self.node))
        self.assertEqual([], membership.of("other", "other"))
        self.store.take_out(self.name, NODE, f"{self.name}-0")
        self.assertEqual([], self.store.membership().of("other", self.node))

    def test_a_removed_one_has_no_members(self) -> None:
        self.store.create(self.name, {})
        self.store.add(self.name, NODE, self.node)
        self.store.remove(self.name)
        self.store.create(self.name, {})
        self.assertEqual(((), ()), (self.store.get(self.name).hosts, self.store.get(self.name).nodes))

    def test_a_removed_node_is_in_none(self) -> None:
        self.store.create(self.name, {})
        self.store.add(self.name, NODE, self.node)
        with self.database.write() as tx:
            self.store.forget_node(tx, self.node)
        self.assertEqual((), self.store.get(self.name).nodes)

    def test_changes_at_the_same_moment_are_all_kept(self) -> None:
        self.store.create(self.name, {})

        def change(number: int) -> Callable[[], object]:
            return lambda: self.store.change(self.name, metadata={f"k{number}": str(number)})

        together(*(change(number) for number in range(6)))
        self.assertEqual({f"k{number}": str(number) for number in range(6)}, self.store.get(self.name).metadata)

    def test_a_member_that_is_added_by_several_is_one(self) -> None:
        self.store.create(self.name, {})
        answers = together(*[lambda: self.store.add(self.name, NODE, self.node)] * 4)
        self.assertEqual([], [each for each in answers if isinstance(each, Exception)])
        self.assertEqual((self.node,), self.store.get(self.name).nodes)

    def test_nothing_is_added_to_what_is_removed_at_the_same_moment(self) -> None:
        for number in range(5):
            made = self.store.create(f"{self.name}-{number}", {})
            uuid = made.uuid
            together(
                functools.partial(self.store.add, uuid, NODE, self.node), functools.partial(self.store.remove, uuid)
            )
            self.assertEqual([], self.store.membership().of("other", self.node))

    def test_properties_are_merged_and_none_is_lost(self) -> None:
        change_node(self.database, self.node, {"ssd": True, "rack": "a"})
        together(
            *(
                lambda number=number: change_node(self.database, self.node, {f"p{number}": number})
                for number in range(6)
            )
        )
        change_node(self.database, self.node, {"rack": None})
        wanted = {"ssd": True, **{f"p{number}": number for number in range(6)}}
        self.assertEqual(wanted, self.nodes.get(self.node).properties)
        with self.assertRaisesRegex(errors.NotFound, "There is no node nothing"):
            change_node(self.database, "nothing", {"a": 1})
