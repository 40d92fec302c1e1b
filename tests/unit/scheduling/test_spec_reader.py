# SPDX-License-Identifier: Apache-2.0
"""Requests of one message are read as each by itself, whatever the ones before were."""

from __future__ import annotations

import copy
import unittest
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from moorage.context import RequestContext, acting_for
from moorage.scheduling.rpc import _SpecReader

_CALLERS = tuple(
    RequestContext(user_id=user, project_id=project, system_scope=scope, request_id="req-1", overwrite=False)
    for user, project, scope in (("u", "p", None), ("u", "q", None), ("v", "p", None), ("u", "p", "all"))
)
_FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1}, "extra_specs": {"a": "b"}, "version": 2}
_CHANGES: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"name": "other"}, {"hints": {"same_host": ["i1"]}}, {"command": ["true"]}, {"availability_zone": "z"},
    {"flavor": {**_FLAVOR, "version": 3}}, {"flavor": {**_FLAVOR, "resources": {"VCPU": 2}}}, {"image": {"id": "x"}},
    {"image": {"properties": {"secure": 1}}}, {"image": {"properties": {"secure": True}}}, {"force_hosts": ["h1"]},
)  # fmt: skip


class SpecReaderTests(unittest.TestCase):
    @example([(_CALLERS[0], {"image": {"properties": {"secure": value}}}) for value in (1, True)])
    @given(st.lists(st.tuples(st.sampled_from(_CALLERS), st.sampled_from(_CHANGES)), min_size=1, max_size=12))
    def test_each_is_read_as_if_it_were_alone(self, wanted: list[tuple[RequestContext, dict[str, Any]]]) -> None:
        together = _SpecReader()
        for number, (caller, changes) in enumerate(wanted):
            request = copy.deepcopy({"uuid": f"i{number}", "name": "n", "flavor": _FLAVOR, **changes})
            before = copy.deepcopy(request)
            with acting_for(caller):
                found, alone = together.spec(request), _SpecReader().spec(request)
            # The texts tell true from 1.
            self.assertEqual((alone, repr(alone)), (found, repr(found)))
            self.assertEqual(before, request)

    def test_what_is_alike_is_shared(self) -> None:
        together = _SpecReader()
        with acting_for(_CALLERS[0]):
            first, second = (together.spec({"uuid": uuid, "flavor": dict(_FLAVOR)}) for uuid in ("a", "b"))
        self.assertIs(first.flavor, second.flavor)
        self.assertEqual(("a", "b"), (first.instance_uuid, second.instance_uuid))
