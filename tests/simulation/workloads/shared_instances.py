# SPDX-License-Identifier: Apache-2.0
"""Clients that all act on the same few instances, and decide by what they have read up to four seconds before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.control_plane.factories import open_instances, open_workers
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.delete import Deleter
from moorage.instances.in_place import InPlace
from moorage.instances.interface import Instance
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import open_deleter
from tests.simulation.workloads.placement import Placement, _History

__all__ = ["SharedInstances"]

#: Statuses of an instance with an operation in progress.
_IN_PROGRESS = frozenset({"building", "rebuilding", "migrating", "deleting"})


class SharedInstances(Placement):
    """As :class:`Placement`, with two instances and four clients, and no forced operation."""

    operations: ClassVar[tuple[str, ...]] = ("live_migrate", "migrate")
    points: ClassVar[int] = 600
    steps: ClassVar[int] = 1500
    seconds: ClassVar[float] = 30.0

    @override
    def begin(self) -> None:
        #: Uuid -> status and request of the operation in progress after the last commit.
        self._before: dict[str, tuple[str, str]] = {}
        self.world.after_plugin = lambda name: self.check_hosts()
        super().begin()

    @override
    def begin_clients(self) -> None:
        for number in range(1, 5):
            self.client(f"client-{number}", self._client)

    # -- clients --------------------------------------------------------------------------------------------------

    @override
    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        instances, workers = open_instances(platform, conf), open_workers(platform, conf)
        cast = cast_to_agent(platform.sender)
        in_place = InPlace(platform.database, instances, workers, cast)
        deleter = open_deleter(platform, conf)
        if process.name in ("client-1", "client-2"):
            self._create(platform)
        for number in range(self.random.randint(3, 6)):
            platform.clock.sleep(self.random.choice((0.0, 0.3, self.random.uniform(0, 4))))
            if not self.histories:
                continue
            of = self.random.choice(self.histories)
            what = self.random.choice(("move", "move", "rebuild", "rebuild", "rebuild", "delete"))
            if what == "move":
                self._move(platform, of)
                continue
            late = self.random.choice((0.0, 0.0, self.random.uniform(0, 4)))
            if what == "delete":
                self._delete_late(deleter, of, lambda instance: platform.clock.sleep(late))  # noqa: B023
                continue
            known = None
            with contextlib.suppress(errors.MoorageError):
                known = instances.get(of.uuid)
            platform.clock.sleep(late)
            if known is not None:
                pending = {"request_id": f"{process.name}/{number}"}
                self._attempt(of, what, lambda uuid: in_place.begin(uuid, "rebuild", pending, known=known))  # noqa: B023

    def _delete_late(self, deleter: Deleter, of: _History, wait: Callable[[Instance], None]) -> None:
        """Deletes an instance, and waits between reading and writing it."""
        of.delete_asked = True

        def call(uuid: str) -> None:
            deleter.delete(uuid, check=wait)
            of.deleted = True

        self._attempt(of, "delete", call)

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        super().check_step()
        self.check_hosts()
        self.check_begun()

    def check_hosts(self) -> None:
        """An instance executes on one host at most."""
        twice = {uuid: hosts for uuid, hosts in self.executing().items() if len(set(hosts)) > 1}
        self.require(not twice, f"instances execute on more than one host: {twice}")

    def check_begun(self) -> None:
        """An operation on an instance begins only when none is in progress."""
        now: dict[str, tuple[str, str]] = {}
        for uuid, status, text in self.rows("SELECT uuid, status, pending FROM instances"):
            pending: dict[str, Any] = json.loads(text) if text else {}
            now[uuid] = status, pending.get("request_id", "")
            before = self._before.get(uuid, now[uuid])
            self.require(
                before[0] not in _IN_PROGRESS or status not in _IN_PROGRESS or before == now[uuid],
                f"instance {uuid} was {before}, and is {now[uuid]}: an operation took the place of another unasked",
            )
        self._before = now
