# SPDX-License-Identifier: Apache-2.0
"""The catalogue of flavors on SQLite, and as the API shows and changes it."""

from __future__ import annotations

import pathlib
import tempfile
import unittest
from typing import Any

import hypothesis
import jsonschema
import sqlalchemy as sa
from hypothesis import strategies as st

import tests
from moorage import context, errors
from moorage.db import Database, migrations
from moorage.http.routes import Request
from moorage.scheduling import flavors_api
from moorage.scheduling.flavor_requests import FlavorResolver
from moorage.scheduling.flavors import FlavorStore
from moorage.scheduling.tables import flavors
from tests.unit.scheduling.flavor_tests import LARGE, SMALL, FlavorTests
from tests.unit.scheduling.test_traits import flavors_with_groups, sums_of

SYSTEM = context.internal("test")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from("AB"), st.integers(1, 3), st.integers(0, 4)),
        st.tuples(st.just("deprecate"), st.sampled_from("AB"), st.one_of(st.none(), st.integers(1, 4)), st.booleans()),
    ),
    max_size=20,
)


class SqliteCase(unittest.TestCase):
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.database = Database(f"sqlite:///{pathlib.Path(folder.name) / 'moorage.sqlite'}", service="test")
        cls.addClassCleanup(cls.database.close)
        migrations.upgrade_all(cls.database)


class TestFlavors(FlavorTests, SqliteCase):
    @hypothesis.given(steps)
    @hypothesis.settings(max_examples=tests.cases(25), deadline=None)
    def test_histories_agree_with_a_model(self, history: list[tuple[Any, ...]]) -> None:
        with self.database.write() as tx:
            tx.execute(sa.delete(flavors))
        model: dict[str, list[tuple[int, bool]]] = {"A": [], "B": []}
        for what, name, number, more in history:
            versions = model[name]
            try:
                if what == "create":
                    made, new = self.store.create(name, {"VCPU": number}, {}, more)
                    self.assertEqual(new, not versions or versions[-1][0] != number)
                    if new:
                        self.assertEqual(more, len(versions))
                        versions.append((number, False))
                    self.assertEqual(len(versions), made.version)
                else:
                    self.store.deprecate(name, number, deprecated=more)
                    for place in range(len(versions)) if number is None else (number - 1,):
                        versions[place] = (versions[place][0], more)
            except errors.Conflict:
                self.assertTrue(what == "create" and more != len(versions))
            except errors.NotFound:
                self.assertTrue(what == "deprecate" and (number or 1) > len(versions))
        for name, versions in model.items():
            found = self.store.versions(name) if versions else []
            self.assertEqual(versions, [(each.resources["VCPU"], each.deprecated) for each in found])
            self.assertEqual(list(range(1, len(versions) + 1)), [each.version for each in found])


class FlavorApiTests(SqliteCase):
    def setUp(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.delete(flavors))
        self.changes = 0
        self.routes = {
            (each.method, each.path): each for each in flavors_api.routes(FlavorStore(self.database), self._changed)
        }

    def _changed(self) -> None:
        self.changes += 1

    def ask(self, method: str, name: str = "", **values: Any) -> tuple[int, Any]:
        route = self.routes[method, "/flavors/{flavorid}" if name else "/flavors"]
        for given, schema in (("query", route.query), ("body", route.body)):
            if given in values and schema is not None:
                jsonschema.validate(values[given], dict(schema))
        answer = route.handler(Request(context=SYSTEM, path_params={"flavorid": name}, **values))
        jsonschema.validate(answer.body, dict(route.responses[answer.status] or {}))
        return answer.status, answer.body

    def create(self, resources: Any, expected: int = 0, **more: Any) -> tuple[int, Any]:
        body = {"flavorid": "small", "resources": resources, "expected_version": expected, **more}
        return self.ask("POST", body=body)

    def test_adds_shows_lists_and_deprecates(self) -> None:
        status, first = self.create(SMALL)
        self.assertEqual((201, 1, 1), (status, first["version"], self.changes))
        self.assertEqual((200, first), self.create(SMALL))
        _, second = self.create(LARGE, 1)
        self.assertEqual((200, {**second, "versions": [1, 2]}), self.ask("GET", "small"))
        self.assertEqual((200, {**first, "versions": [1, 2]}), self.ask("GET", "small", query={"version": 1}))
        self.assertEqual((200, {"flavors": [second], "next_after": None}), self.ask("GET"))
        self.assertEqual("small", self.ask("GET", query={"limit": 1})[1]["next_after"])
        _, changed = self.ask("PATCH", "small", body={"deprecated": True, "version": 1})
        self.assertEqual([(1, True)], [(each["version"], each["deprecated"]) for each in changed["versions"]])
        self.assertEqual(4, self.changes)
        with self.assertRaisesRegex(errors.NotFound, "no version 3; its versions are 1, 2"):
            self.ask("GET", "small", query={"version": 3})

    def test_extra_specs_that_no_request_may_have_are_refused(self) -> None:
        for extra_specs in ({"trait:CUSTOM_X": "perhaps"}, {"resources:VCPU": "many"}, {"trait:in:lower": "required"}):
            with self.subTest(extra_specs), self.assertRaises(errors.InvalidInput):
                self.create(SMALL, extra_specs=extra_specs)
        self.assertEqual([], self.ask("GET")[1]["flavors"])

    def test_extra_specs_may_say_the_resources(self) -> None:
        _, made = self.create(SMALL, extra_specs={"resources:VCPU": "3"})
        self.assertEqual(SMALL, made["resources"])
        self.assertEqual({"resources:VCPU": "3"}, made["extra_specs"])

    @hypothesis.given(flavors_with_groups)
    @hypothesis.settings(max_examples=tests.cases(25), deadline=None)
    def test_what_is_shown_can_be_given_again_and_is_summed_once(self, flavor: Any) -> None:
        given, specs = flavor
        with self.database.write() as tx:
            tx.execute(sa.delete(flavors))
        self.create(given, extra_specs=specs)
        _, shown = self.ask("GET", "small")
        self.assertEqual((given, specs), (shown["resources"], shown["extra_specs"]))
        contents = {name: shown[name] for name in ("resources", "extra_specs")}
        status, again = self.ask("POST", body={"flavorid": "small", "expected_version": 1, **contents})
        self.assertEqual((200, 1), (status, again["version"]))
        # A request by name and one with the contents mean the same, and hold the sums once.
        resolver = FlavorResolver(FlavorStore(self.database))
        held = {name: units for name, units in sums_of(given, specs).items() if units}
        for asked in ({"flavorid": "small"}, {"flavorid": "small", **contents}):
            found = resolver.resolved({"flavor": asked})["flavor"]
            self.assertEqual({"flavorid": "small", "resources": held, "extra_specs": specs, "version": 1}, found)

    def test_to_go_back_is_to_give_the_old_contents_again(self) -> None:
        _, first = self.create(SMALL, extra_specs={"resources1:CUSTOM_GPU": "1"})
        self.create(LARGE, 1)
        _, old = self.ask("GET", "small", query={"version": 1})
        _, third = self.create(old["resources"], 2, extra_specs=old["extra_specs"])
        self.assertEqual(
            (3, SMALL, first["extra_specs"]), tuple(third[name] for name in ("version", "resources", "extra_specs"))
        )
        found = FlavorResolver(FlavorStore(self.database)).resolved({"flavor": {"flavorid": "small"}})["flavor"]
        self.assertEqual(({"VCPU": 1, "CUSTOM_GPU": 1}, 3), (found["resources"], found["version"]))

    def test_names_that_no_path_can_have_are_refused_by_the_schema(self) -> None:
        for name in ("", "a/b", ".hidden", "x" * 256):
            with self.subTest(name), self.assertRaises(jsonschema.ValidationError):
                self.ask("POST", body={"flavorid": name, "resources": SMALL})
