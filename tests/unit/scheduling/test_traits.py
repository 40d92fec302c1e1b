# SPDX-License-Identifier: Apache-2.0
"""What requests say of traits and resource classes, and what becomes of it."""

from __future__ import annotations

import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage import errors, options
from moorage.request_groups import RequestGroup
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.scheduling.nova.loading import load_weighers
from moorage.scheduling.options import PRESETS
from moorage.scheduling.resource_request import (
    MOST_GROUPS,
    GivenResources,
    as_far_as_parsed,
    check_flavor,
    given_resources,
    held_resources,
    normal_given,
    resource_request,
    with_held_resources,
)
from moorage.scheduling.traits import NO_TRAITS, parse_traits

TRAITS = ("HW_A", "CUSTOM_B", "CUSTOM_C")
CLASSES = ("VCPU", "MEMORY_MB", "CUSTOM_GPU")


def _extra_specs(keys: dict[tuple[str, str], int], policy: str) -> dict[str, str]:
    specs = {f"resources{suffix}:{name}": str(units) for (suffix, name), units in keys.items() if units or not suffix}
    return {**specs, "group_policy": policy}


#: What flavors give, and their extra specs. They give disk, which no extra spec takes out, so that none asks for nothing.
flavors_with_groups = st.tuples(
    st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 100)).map(lambda given: {**given, "DISK_GB": 1}),
    st.builds(
        _extra_specs,
        st.dictionaries(st.tuples(st.sampled_from(("", "1", "_NIC")), st.sampled_from(CLASSES)), st.integers(0, 9)),
        st.sampled_from(("none", "isolate")),
    ),
)


def sums_of(given: dict[str, int], specs: dict[str, str]) -> dict[str, int]:
    """What an instance of the flavor holds, by the words of the language."""
    asked = [(*key.partition(":")[::2], int(value)) for key, value in specs.items() if key.startswith("resources")]
    sums = {**given, **{name: units for kind, name, units in asked if kind == "resources"}}
    for kind, name, units in asked:
        if kind != "resources":
            sums[name] = sums.get(name, 0) + units
    return sums


class TestTraits(unittest.TestCase):
    @given(
        st.dictionaries(st.sampled_from(TRAITS), st.sampled_from(("required", "forbidden"))),
        st.lists(st.sets(st.sampled_from(TRAITS), min_size=1), max_size=2),
        st.frozensets(st.sampled_from(TRAITS)),
    )
    def test_a_node_passes_as_each_key_says(self, single: dict[str, str], any_of: list[set[str]], node: Any) -> None:
        specs = {f"trait:{name}": word for name, word in single.items()}
        specs |= {"trait:in:" + ",".join(sorted(names)): "required" for names in any_of}
        possible = all(any(single.get(name) != "forbidden" for name in names) for names in any_of)
        try:
            asked = parse_traits(specs, {}).get("", NO_TRAITS)
        except errors.InvalidInput:
            self.assertFalse(possible)
            return
        self.assertTrue(possible)
        passes = all((name in node) == (word == "required") for name, word in single.items())
        passes = passes and all(names & node for names in any_of)
        self.assertEqual(passes, asked.met_by(node))
        self.assertEqual(passes, not asked.missing_in(node))

    def test_what_is_wrong_is_refused_by_name(self) -> None:
        for specs, image, message in (
            ({"trait:hw_cpu": "required"}, {}, "'hw_cpu' is none"),
            ({"trait:": "required"}, {}, "names no trait"),
            ({"trait:in:A,": "required"}, {}, "'' is none"),
            ({"trait:A": "wanted"}, {}, "is 'wanted'; write required or forbidden"),
            ({"trait:in:A,B": "forbidden"}, {}, "is 'forbidden'; write required"),
            ({"trait:A": "required"}, {"trait:A": "forbidden"}, "requires and forbids the trait A"),
        ):
            with self.subTest(specs=specs), self.assertRaisesRegex(errors.InvalidInput, message) as caught:
                parse_traits(specs, image)
            self.assertIn("/trait:", caught.exception.details["path"])


class TestResources(unittest.TestCase):
    def body(self, **extra_specs: str) -> dict[str, Any]:
        specs = {key.replace("__", ":"): value for key, value in extra_specs.items()}
        return {"flavor": {"flavorid": "f", "resources": {"VCPU": 2, "MEMORY_MB": 512}, "extra_specs": specs}}

    def test_extra_specs_replace_the_amounts_of_the_flavor(self) -> None:
        asked = with_held_resources(
            self.body(resources__VCPU="0", resources__CUSTOM_GPU="1", resources__MEMORY_MB="1024")
        )
        self.assertEqual({"MEMORY_MB": 1024, "CUSTOM_GPU": 1}, asked["flavor"]["resources"])

    def test_a_body_that_asks_for_nothing_of_the_kind_is_returned_as_it_is(self) -> None:
        body = self.body(trait__A="required")
        self.assertEqual(body, with_held_resources(body))
        for body in ({"host": "h"}, {}, {"flavor": {"flavorid": "small"}}, {"image": {"properties": {"os": "x"}}}):
            check_flavor(body)

    def test_keys_that_are_nearly_of_the_language_are_refused_with_the_right_form(self) -> None:
        for key, form in (
            ("resources1", "resources:CLASS, or resources1:CLASS"),
            ("resource:VCPU", "resources:CLASS"),
            ("Resources:VCPU", "resources:CLASS"),
            ("trait1", "trait:NAME, or trait1:NAME"),
            ("trait", "trait:NAME"),
            ("Trait:CUSTOM_FAST", "trait:NAME"),
            ("group_policy2", "Write group_policy"),
            ("group_policyx", "Write group_policy"),
            ("SAME_SUBTREE", "Write same_subtree"),
        ):
            body = {"flavor": {"flavorid": "f", "resources": {"VCPU": 1}, "extra_specs": {key: "1"}}}
            with self.subTest(key), self.assertRaisesRegex(errors.InvalidInput, form) as caught:
                check_flavor(body)
            self.assertEqual(f"body/flavor/extra_specs/{key}", caught.exception.details["path"])
            self.assertIn(repr(key), caught.exception.message)
            # An instance of an earlier release may have it: there it goes on asking for nothing.
            self.assertEqual(1, len(resource_request(RequestSpec("i", Flavor("f", {"VCPU": 1}, {key: "1"}))).groups))
        others = ("hw:cpu_policy", "quota:cpu_shares", "capabilities:x", "aggregate_instance_extra_specs:trait", "gpu")
        check_flavor({"flavor": {"flavorid": "f", "resources": {"VCPU": 1}, "extra_specs": dict.fromkeys(others, "1")}})

    def test_what_is_wrong_is_refused_by_name(self) -> None:
        for key, value, message in (
            ("resources:VCPU", "-1", "write a whole number"),
            ("resources:VCPU", "two", "write a whole number"),
            ("resources:VCPU", "2147483648", "write a whole number"),
            ("resources:VCPU", "9" * 1000, "write a whole number"),
            ("resources:VCPU", "\u0662", "write a whole number"),
            ("resources:vcpu", "1", "names no resource class"),
            ("resources1:VCPU", "0", "write a whole number from 1"),
            ("resources1:VCPU", "2147483647", "in all groups together"),
            ("resources.1:VCPU", "1", "suffix that no request group can have"),
            ("resources" + "1" * 65 + ":VCPU", "1", "suffix that no request group can have"),
            ("group_policy", "apart", "write isolate or none"),
            ("same_subtree", "_A,_B", "names '_A', '_B'; the request groups are none"),
            ("same_subtree", "", "names ''"),
            ("trait_NET:A:B", "required", "names no trait"),
            ("trait_NET:CUSTOM_A", "wanted", "write required or forbidden"),
        ):
            with self.subTest(key=key), self.assertRaisesRegex(errors.InvalidInput, message) as caught:
                with_held_resources(self.body(**{key.replace(":", "__"): value}))
            self.assertEqual(f"body/flavor/extra_specs/{key}", caught.exception.details["path"])
        with self.assertRaisesRegex(errors.InvalidInput, "only a flavor asks for resources"):
            check_flavor({"image": {"properties": {"resources:VCPU": "1"}}})
        with self.assertRaisesRegex(errors.InvalidInput, "only a flavor has request groups"):
            check_flavor({"image": {"properties": {"trait1:HW_A": "required"}}})
        for more, path, message in (
            ({"resources1__PGPU": "1", "resources2__PGPU": "1"}, "group_policy", "several request groups need it"),
            ({"trait1__HW_A": "required"}, "trait1:HW_A", "belongs to a group without resources"),
            (
                {**{f"resources{number}__PGPU": "1" for number in range(MOST_GROUPS + 1)}, "group_policy": "none"},
                f"resources{MOST_GROUPS}:PGPU",
                "the most is 16",
            ),
            (
                {"resources__VCPU": "0", "resources__MEMORY_MB": "0", "trait__A": "required", "resources1__PGPU": "1"},
                "",
                "traits outside of request groups",
            ),
        ):
            with self.subTest(path=path), self.assertRaisesRegex(errors.InvalidInput, message) as caught:
                with_held_resources(self.body(**more))
            self.assertEqual(f"body/flavor/extra_specs/{path}".rstrip("/"), caught.exception.details["path"])
        with self.assertRaisesRegex(errors.InvalidInput, "asks for nothing"):
            with_held_resources(self.body(resources__VCPU="0", resources__MEMORY_MB="0"))


class TestGroups(unittest.TestCase):
    def test_groups_are_parsed_with_their_traits_and_sums_count_them(self) -> None:
        specs = {
            "resources:VCPU": "1",
            "resources1:PGPU": "1",
            "trait1:CUSTOM_A": "required",
            "trait1:in:CUSTOM_B,CUSTOM_C": "required",
            "trait1:CUSTOM_OLD": "forbidden",
            "resources_NUMA:VCPU": "2",
            "trait:HW_A": "required",
            "group_policy": "isolate",
            "same_subtree": "1, _NUMA",
        }
        body = with_held_resources(
            {"flavor": {"flavorid": "f", "resources": {"VCPU": 8, "MEMORY_MB": 512}, "extra_specs": specs}}
        )
        resources = body["flavor"]["resources"]
        self.assertEqual({"VCPU": 3, "MEMORY_MB": 512, "PGPU": 1}, resources)
        query = resource_request(
            RequestSpec("i", Flavor("f", resources, specs), image={"properties": {"trait:HW_B": "forbidden"}})
        )
        required = (frozenset({"CUSTOM_A"}), frozenset({"CUSTOM_B", "CUSTOM_C"}))
        self.assertEqual(
            (
                RequestGroup("", {"VCPU": 1, "MEMORY_MB": 512}, (frozenset({"HW_A"}),), frozenset({"HW_B"})),
                RequestGroup("1", {"PGPU": 1}, required, frozenset({"CUSTOM_OLD"})),
                RequestGroup("_NUMA", {"VCPU": 2}),
            ),
            query.groups,
        )
        self.assertTrue(query.isolate)
        self.assertEqual((frozenset({"1", "_NUMA"}),), query.same_subtree)

    def test_a_flavor_whose_sums_lack_its_groups_is_refused(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "are the sums of all groups"):
            resource_request(RequestSpec("i", Flavor("f", {"VCPU": 1}, {"resources1:PGPU": "1"})))


class TestGivenAndHeld(unittest.TestCase):
    @given(flavors_with_groups)
    def test_what_is_held_is_found_from_what_is_given_and_back(
        self, flavor: tuple[dict[str, int], dict[str, str]]
    ) -> None:
        given, specs = GivenResources(flavor[0]), flavor[1]
        held = held_resources(given, specs)
        self.assertEqual({key: value for key, value in sums_of(*flavor).items() if value}, held)
        back = given_resources(held, specs)
        self.assertEqual(held, held_resources(back, specs))
        # Amounts that extra specs replace cannot be found.
        self.assertEqual(back, normal_given(given, specs))
        self.assertEqual(back, normal_given(back, specs))
        if not any(key.startswith("resources:") for key in specs):
            self.assertEqual(given, back)


class TestStoredRequests(unittest.TestCase):
    def test_what_cannot_be_parsed_asks_for_what_the_instance_holds(self) -> None:
        traits, other = {"trait:CUSTOM_FAST": "required"}, {"gpu": "yes", "trait1": "odd"}
        for broken in (
            {"resources1:CUSTOM_GPU": "1"},
            {"group_policy": "x"},
            {"resources1:VCPU": "1", "resources2:VCPU": "1"},
            {"same_subtree": "_A"},
            {"resources.1:VCPU": "1"},
        ):
            spec = RequestSpec("the-instance", Flavor("f", {"VCPU": 2}, {**broken, **traits, **other}, 3))
            with self.subTest(broken), self.assertLogs("moorage.scheduling.resource_request", "WARNING") as logged:
                found = as_far_as_parsed(spec)
            self.assertEqual(1, len(logged.output))
            self.assertIn("the-instance", logged.output[0])
            self.assertEqual(Flavor("f", {"VCPU": 2}, {**traits, **other}, 3), found.flavor)
            (group,) = resource_request(found).groups
            self.assertEqual(RequestGroup("", {"VCPU": 2}, (frozenset({"CUSTOM_FAST"}),)), group)

    def test_traits_that_cannot_be_parsed_are_left_out_of_flavor_and_image(self) -> None:
        image = {"id": "i", "properties": {"trait:CUSTOM_FAST": "forbidden", "os": "linux"}}
        spec = RequestSpec("i", Flavor("f", {"VCPU": 2}, {"trait:CUSTOM_FAST": "required"}), image=image)
        with self.assertLogs("moorage.scheduling.resource_request", "WARNING"):
            found = as_far_as_parsed(spec)
        self.assertEqual(({}, {"id": "i", "properties": {"os": "linux"}}), (found.flavor.extra_specs, found.image))

    def test_what_can_be_parsed_stays_as_it_is(self) -> None:
        spec = RequestSpec("i", Flavor("f", {"VCPU": 2}, {"resources1:VCPU": "1", "trait1": "x"}))
        with self.assertNoLogs("moorage.scheduling.resource_request"):
            self.assertIs(spec, as_far_as_parsed(spec))


class TestPresets(unittest.TestCase):
    def test_each_preset_ranks_by_its_weighers_and_multipliers(self) -> None:
        for name, preset in PRESETS.items():
            with self.subTest(name):
                conf = options.defaults(scheduling={"preset": name})
                self.assertEqual(preset.weighers, tuple(each.name for each in load_weighers(conf)))
                for weigher, multiplier in preset.multipliers.items():
                    self.assertEqual(multiplier, conf[f"weigher_{weigher}"].multiplier)

    def test_what_is_configured_wins(self) -> None:
        conf = options.defaults(
            scheduling={"preset": "pack", "enabled_weighers": ["cpu"]}, weigher_cpu={"multiplier": 3.0}
        )
        self.assertEqual(["cpu"], [each.name for each in load_weighers(conf)])
        self.assertEqual(3.0, conf.weigher_cpu.multiplier)
