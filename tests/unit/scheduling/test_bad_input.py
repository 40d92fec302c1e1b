# SPDX-License-Identifier: Apache-2.0
"""What a request says wrong is told in plain words, before any node is looked at."""

from __future__ import annotations

import dataclasses
import random
import unittest
from typing import Any

from moorage import errors
from moorage.scheduling.interface import FILTERS, Flavor, RequestSpec
from moorage.testing import fleets
from tests.conformance.scheduling.configuration import plugin_conf


class Case(unittest.TestCase):
    def prepare(self, name: str, **changes: Any) -> Any:
        made: Any = FILTERS.load(name).plugin
        spec = dataclasses.replace(RequestSpec("new", Flavor("small", {"VCPU": 1})), **changes)
        return made(conf=plugin_conf()).prepare(spec, fleets.random_fleet(random.Random(3), 5).snapshot())

    def refused(self, message: str, path: str, name: str, **changes: Any) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, message) as caught:
            self.prepare(name, **changes)
        self.assertEqual(path, caught.exception.details["path"])


class TestExtraSpecs(Case):
    def asked(self, name: str, key: str, text: str, message: str) -> None:
        flavor = Flavor("small", {"VCPU": 1}, {key: text})
        self.refused(message, f"flavor/extra_specs/{key}", name, flavor=flavor)

    def test_a_condition_without_an_operand(self) -> None:
        for text in (">=", "s== ", "<or>", "<all-in>", "<in>", "="):
            self.asked("compute_capabilities", "capabilities:ssd", text, "nothing stands after")
            self.asked("aggregate_instance_extra_specs", "ssd", text, "nothing stands after")

    def test_a_number_that_is_none(self) -> None:
        key = "capabilities:free_ram_mb"
        self.asked("compute_capabilities", key, ">= much", "'much' is not a number, which >= compares")
        self.asked("compute_capabilities", "hw:maxphysaddr_bits", "many bits", "must be a number of bits")

    def test_what_is_for_other_filters_is_not_looked_at(self) -> None:
        flavor = Flavor("small", {"VCPU": 1}, {"hw:cpu_policy": ">=", "trait:X": "<or>", "unheard_of": ">="})
        self.prepare("compute_capabilities", flavor=flavor)


class TestQuery(Case):
    def query(self, text: str, message: str) -> None:
        self.refused(message, "hints/query", "json", hints={"query": [text]})

    def test_what_is_no_json(self) -> None:
        self.query('["=", "$host"', "it is no JSON")

    def test_what_is_no_list(self) -> None:
        self.query('{"=": 1}', "stands where a list")
        self.query('"host-1"', "stands where a list")
        self.query('["and", {"=": 1}]', "is an object")

    def test_an_unknown_command(self) -> None:
        self.query('["xor", true, false]', '"xor" is no command; there are =, <')
        self.query('["and", ["like", "$host", "a"]]', '"like" is no command')
        self.query("[[]]", "is no command")

    def test_one_that_is_nested_too_deep(self) -> None:
        self.query("[" * 100_000, "too deep|no JSON")
        self.query('["not", ' * 60 + "true" + "]" * 60, "deeper than 50 levels")

    def test_several(self) -> None:
        self.refused("more than once", "hints/query", "json", hints={"query": ["[]", "[]"]})


class TestOthers(Case):
    def test_no_network(self) -> None:
        for hints in (
            {"build_near_host_ip": ["10.0.0.300"]},
            {"build_near_host_ip": ["10.0.0.1"], "cidr": ["24"]},
            {"build_near_host_ip": ["10.0.0.1", "10.0.0.2"]},
            {"build_near_host_ip": ["10.0.0.1"], "cidr": ["/64"]},
        ):
            self.refused("name no network", "hints/build_near_host_ip", "simple_cidr_affinity", hints=hints)

    def test_image_properties(self) -> None:
        image = {"properties": {"hw_architecture": "x86_64", "img_hv_requested_version": "newest"}}
        self.refused(
            "cannot be understood", "image/properties/img_hv_requested_version", "image_properties", image=image
        )
        image = {"properties": {"hw_architecture": "x86_64", "hw_maxphysaddr_bits": "many"}}
        self.refused("whole number", "image/properties/hw_maxphysaddr_bits", "image_properties", image=image)
