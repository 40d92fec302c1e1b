# SPDX-License-Identifier: Apache-2.0
"""``moorage events`` and ``moorage audit``: following over outages, and how changes and times are written."""

from __future__ import annotations

import argparse
import itertools
import unittest
from typing import Any, cast
from unittest import mock

from moorage import errors
from moorage.cli.commands import journal
from moorage.client import Client


class Api:
    """Answers in the order given; an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str | None] = []

    def events(self, after: str | None = None, **query: Any) -> dict[str, Any]:
        self.asked.append(after)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"events": [{"number": each} for each in answer[0]], "next_after": answer[1]}


def read(api: Api, *, follow: bool, after: str | None = None) -> Any:
    return journal._pages(cast(Client, api), {}, after, mock.MagicMock() if follow else None)


class FollowTests(unittest.TestCase):
    def test_it_goes_on_from_its_cursor_after_an_outage(self) -> None:
        away = errors.TransportError("away")
        api = Api(([1, 2], "2"), away, errors.StoreBusy("busy"), ([3], "3"))
        found = list(itertools.islice(read(api, follow=True), 3))
        self.assertEqual([1, 2, 3], [each["number"] for each in found])
        self.assertEqual([None, "2", "2", "2"], api.asked)

    def test_without_follow_an_outage_is_an_error_and_the_end_is_the_end(self) -> None:
        self.assertEqual([{"number": 1}], list(read(Api(([1], "1"), ([], "1")), follow=False)))
        with self.assertRaises(errors.TransportError):
            list(read(Api(([1], "1"), errors.TransportError("away")), follow=False))

    def test_a_cursor_that_is_gone_ends_it(self) -> None:
        with self.assertRaises(errors.Gone):
            list(read(Api(errors.Gone("gone", oldest=7)), follow=True, after="1"))


class AuditTests(unittest.TestCase):
    def test_a_change_shows_what_was_before(self) -> None:
        before = {"status": "active", "host": "h1", "shard": None, "fault": "no room"}
        after = {"status": "active", "host": "h2", "shard": "east", "holds": {"p": {"VCPU": 1}}, "fault": ""}
        expected = 'fault: no room -> nothing, holds: {"p": {"VCPU": 1}}, host: h1 -> h2, shard: east'
        self.assertEqual(expected, journal._change(before, after))
        self.assertEqual("", journal._change(before, before))

    def test_what_was_before_comes_with_the_event_and_work_is_no_state_of_its_subject(self) -> None:
        def event(kind: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
            return {"number": 1, "at": 0, "kind": kind, "subject": "service/s", "state": state, **more}

        holds = {"p": {"VCPU": 1}}
        found = [
            event("service.set", {"disabled": True, "epoch": 1}),
            event("operation.place", {"node": "n", "removed": {}, "received_at": 0}),
            event("service.set", {"disabled": False, "epoch": 1}, before={"disabled": True}),
            event("service.set", {"disabled": False, "forced_down": True}, before={"forced_down": None}),
            event("service.set", {"disabled": False}, before={}),
            event("claim.delete", {}, before={"holds": holds}),
        ]
        api = mock.Mock(spec=Client)
        api.events.side_effect = [{"events": found, "next_after": "6"}, {"events": [], "next_after": "6"}]
        audit = journal.Audit(mock.Mock(), None)
        arguments = argparse.Namespace(actor="alice", subject=None, since=None)
        with mock.patch("moorage.cli.base.connection", return_value=api):
            _, rows = audit.take_action(arguments)
        changes = [row[journal.AUDIT_COLUMNS.index("change")] for row in rows]
        self.assertEqual(
            ["disabled: True, epoch: 1", "node: n", "disabled: True -> False", "forced_down: True", "",
             'holds: {"p": {"VCPU": 1}} -> nothing'],
            changes,
        )  # fmt: skip
        asked = mock.call(None, wait=None, actor="alice", subject=None, since=None, before="true")
        self.assertEqual([asked, mock.call("6", **asked.kwargs)], api.events.call_args_list)

    def test_the_way_of_an_operation_names_the_message_that_came_and_none_that_did_not(self) -> None:
        state = {"operation": "build", "attempts": 1, "began_at": 20}
        event = {
            "number": 1,
            "at": 30,
            "kind": "operation.end",
            "subject": "instance/i",
            "state": {**state, "told_at": 10},
        }
        self.assertEqual(
            [("told", 10, "to do the build"), ("begun", 20, "build"), ("finished", 30, "build")],
            [(each["step"], each["time"], each["detail"]) for each in journal._steps(event)],
        )
        self.assertEqual(["begun", "finished"], [each["step"] for each in journal._steps({**event, "state": state})])

    def test_times_and_ages(self) -> None:
        self.assertEqual(1_767_225_600_000_000, journal._since("2026-01-01"))
        self.assertEqual(1_767_225_600_000_000, journal._since("2026-01-01T01:00+01:00"))
        self.assertEqual(3_600_000_000, round(journal._since("1h") - journal._since("2h"), -7))
        for wrong in ("yesterday", "h", "99999999999999d"):
            with self.assertRaises(errors.InvalidInput):
                journal._since(wrong)
