# SPDX-License-Identifier: Apache-2.0
"""Which agent services may be in one agent."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.agent_role import check_types
from moorage.control_plane.interface import AgentService, LoopService
from moorage.work.job import Job, Work
from moorage.work.work_loop import WorkLoop


class WithoutLoop(AgentService):
    """Does no operations."""

    @override
    def __init__(self) -> None:
        pass

    @override
    def endpoints(self) -> Sequence[object]:
        return ()

    @override
    def start(self) -> None:
        pass

    @override
    def sweep(self) -> None:
        pass

    @override
    def stop(self) -> None:
        pass


class Nothing(Work[str]):
    """Does nothing."""

    @override
    def do(self, job: Job[str]) -> str:
        return ""

    @override
    def failed(self, job: Job[str], error: Exception) -> str | None:
        return None

    @override
    def finish(self, transaction: Any, job: Job[str], result: str) -> None:
        pass


class OfTypes(LoopService):
    """Does operations on resources of some types."""

    @override
    def __init__(self, *types: str) -> None:
        of_types: type[Nothing] = type("OfTypes", (Nothing,), {"types": types})
        work = of_types(mock.Mock(), mock.Mock(lease_seconds=60.0), mock.Mock())
        self.loop = WorkLoop("of types", work, SystemClock(), operations=1)


class TypeTests(unittest.TestCase):
    def test_services_of_different_types_go_together(self) -> None:
        check_types([("a", OfTypes("lease", "tape")), ("b", OfTypes("volume")), ("c", WithoutLoop())])

    def test_two_services_of_one_type_are_refused_by_name(self) -> None:
        with self.assertRaises(errors.ConfigError) as caught:
            check_types([("a", OfTypes("lease", "tape")), ("b", OfTypes("volume")), ("c", OfTypes("tape"))])
        self.assertIn("a and c", caught.exception.message)
        self.assertIn("'tape'", caught.exception.message)
