# SPDX-License-Identifier: Apache-2.0
"""What agents tell schedulers, and that schedulers understand it."""

from __future__ import annotations

import dataclasses
import json
import unittest
import uuid
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage import errors
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.instance_tracker import record_from_json
from moorage.scheduling.interface import InstanceRecord
from moorage.scheduling.reporter import Reporter

ONE = InstanceRecord("u1", "h", "n", "small", {"VCPU": 1}, "p", {"image": "x"})
TWO = InstanceRecord("u2", "h", "n", "big", {"VCPU": 4}, "p")


class Wire:
    def __init__(self, failure: Exception | None = None) -> None:
        self.messages: list[tuple[str, str, dict[str, Any]]] = []
        self.failure = failure

    def fanout(self, topic: str, method: str, args: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self.messages.append((topic, method, json.loads(json.dumps(args))))


class ReporterTests(unittest.TestCase):
    def setUp(self) -> None:
        self.wire = Wire()
        self.reporter = Reporter(self.wire, "h")

    def last(self, method: str) -> dict[str, Any]:
        topic, name, args = self.wire.messages[-1]
        self.assertEqual((topic, name, args["host_name"]), ("scheduler", method, "h"))
        return args

    def test_operations_tell_the_whole_instance_and_replace_nothing(self) -> None:
        def created(instance: InstanceRecord) -> None:
            self.reporter.created([instance])

        def migrated(instance: InstanceRecord) -> None:
            self.reporter.live_migrated(instance, source=False)

        reporter = self.reporter
        for number, tell in enumerate((created, reporter.resized, reporter.unshelved, reporter.rebuilt, migrated), 1):
            tell(ONE)
            args = self.last("update_instance_info")
            self.assertNotIn("replace", args)
            self.assertEqual([record_from_json(each, "h") for each in args["instance_or_list"]], [ONE])
            self.assertEqual(len(self.wire.messages), number)

    def test_what_leaves_the_host_is_told_as_gone(self) -> None:
        self.reporter.deleted(["u1"])
        self.reporter.shelved_offloaded("u1")
        self.reporter.live_migrated(ONE, source=True)
        self.assertEqual(
            self.wire.messages,
            [("scheduler", "delete_instance_info", {"host_name": "h", "instance_uuid": "u1"})] * 3,
        )

    def test_many_that_are_gone_are_told_at_once(self) -> None:
        self.reporter.deleted(["u1", "u2"])
        self.assertEqual(self.last("delete_instance_info")["instance_uuid"], ["u1", "u2"])
        self.reporter.deleted([])
        self.assertEqual(len(self.wire.messages), 1)

    def test_more_than_a_message_may_hold_are_told_in_parts_and_compared(self) -> None:
        many = [InstanceRecord(f"u{number}", "h", "n", "small", {"VCPU": 1}) for number in range(2500)]
        self.reporter.host_started(many)
        parts = [args["instance_or_list"] for _, method, args in self.wire.messages if method == "update_instance_info"]
        self.assertEqual([each["uuid"] for part in parts for each in part], [each.uuid for each in many])
        self.assertEqual(len(parts), 3)
        self.assertEqual(len(self.last("sync_instance_info")["instance_uuids"]), 2500)

    def test_a_start_replaces_also_by_nothing(self) -> None:
        self.reporter.host_started([])
        self.assertEqual(self.last("update_instance_info"), {"host_name": "h", "instance_or_list": [], "replace": True})

    def test_a_comparison_carries_uuids_and_digest(self) -> None:
        self.reporter.sync([ONE, TWO])
        args = self.last("sync_instance_info")
        self.assertEqual(args["instance_uuids"], ["u1", "u2"])
        self.assertEqual(args["digest"], instance_digest([("u2", "big"), ("u1", "small")]))

    def test_a_comparison_that_no_message_holds_is_sent_in_ranges_of_uuids(self) -> None:
        instances = [InstanceRecord(f"u{number}", "h", "n", f"f{number}", {}) for number in (3, 1, 4, 2, 5)]
        Reporter(self.wire, "h", largest=2 * 64 + 63).sync(instances)
        self.assertEqual(
            [
                {"host_name": "h", "instance_uuids": uuids, "digest": instance_digest(pairs), "between": between}
                for uuids, pairs, between in (
                    (["u1", "u2"], [("u1", "f1"), ("u2", "f2")], ["", "u3"]),
                    (["u3", "u4"], [("u3", "f3"), ("u4", "f4")], ["u3", "u5"]),
                    (["u5"], [("u5", "f5")], ["u5", None]),
                )
            ],
            [args for _, method, args in self.wire.messages if method == "sync_instance_info"],
        )

    def test_the_comparison_of_as_many_as_one_message_takes_fits_into_it(self) -> None:
        many = [InstanceRecord(str(uuid.uuid4()), "h" * 255, "n", "small", {}) for _ in range(200)]
        for count in (100, 101, 200):
            del self.wire.messages[:]
            Reporter(self.wire, "h" * 255, largest=6400).sync(many[:count])
            self.assertEqual(1 if count == 100 else 2, len(self.wire.messages))
            for _, _, args in self.wire.messages:
                self.assertLess(len(json.dumps(args)), 6400)

    def test_without_tracking_nothing_is_sent(self) -> None:
        silent = Reporter(self.wire, "h", enabled=False)
        silent.host_started([ONE])
        silent.created([ONE])
        silent.deleted(["u1"])
        silent.sync([ONE])
        self.assertEqual(self.wire.messages, [])

    def test_an_operation_does_not_fail_because_it_cannot_be_told(self) -> None:
        with self.assertLogs("moorage.scheduling.reporter", "WARNING"):
            Reporter(Wire(errors.NoListener("nobody")), "h").created([ONE])


PAIRS = st.lists(st.tuples(st.text(), st.text()), max_size=8, unique_by=lambda pair: pair[0])


class DigestTests(unittest.TestCase):
    @given(PAIRS, st.randoms())
    def test_order_does_not_matter(self, pairs: list[tuple[str, str]], random: Any) -> None:
        shuffled = list(pairs)
        random.shuffle(shuffled)
        self.assertEqual(instance_digest(pairs), instance_digest(shuffled))

    @given(PAIRS, PAIRS)
    def test_others_have_others(self, first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
        self.assertEqual(instance_digest(first) == instance_digest(second), set(first) == set(second))

    def test_a_resize_shows(self) -> None:
        resized = dataclasses.replace(ONE, flavorid="big")
        self.assertNotEqual(
            instance_digest([(ONE.uuid, ONE.flavorid)]), instance_digest([(ONE.uuid, resized.flavorid)])
        )

    def test_it_stays_the_same_from_release_to_release(self) -> None:
        self.assertEqual(instance_digest([]), "0" * 16)
        self.assertEqual(instance_digest([("u1", "small"), ("u2", "big")]), "85ccc1f10c3e0477")
