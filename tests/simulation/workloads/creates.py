# SPDX-License-Identifier: Apache-2.0
"""Creates and deletes by many clients at once on a fleet that is too small for all: claims share transactions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.control_plane.process import Platform
from moorage.instances.delete import Deleter
from tests.simulation.kernel import Process, SimThread
from tests.simulation.store import Fault
from tests.simulation.workloads.base import open_deleter
from tests.simulation.workloads.placement import SCHEDULERS, Placement, _History

__all__ = ["Creates"]

CLIENTS = 10


class Creates(Placement):
    """As :class:`Placement`, with more clients that only create and delete."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        ("allocation_sql", "claims_per_transaction"): 8,
    }
    points: ClassVar[int] = 620
    steps: ClassVar[int] = 1300

    @override
    def begin_clients(self) -> None:
        self.world.site.fault = self._with_failing_commits(self.world.site.fault)
        for number in range(1, CLIENTS + 1):
            self.client(f"client-{number}", self._client)

    def _with_failing_commits(self, usual: Fault) -> Fault:
        """Besides the usual faults, let schedulers lose a race at a commit, or the connection just before or after it, and roles
        lose one in the midst of a transaction: few other faults strike there.
        """
        left = self.random.choice((0, 1, 3))

        def fault(kind: str, writer: bool) -> str | None:
            nonlocal left
            what, me = usual(kind, writer), self.kernel.current
            is_commit = writer and kind in ("commit", "committed") and me is not None and me.process.name in SCHEDULERS
            if what is None and left and is_commit and self.random.random() < 0.1:
                left -= 1
                what = "lost" if kind == "commit" else "unknown"
            elif what is None and (
                (is_commit and kind == "commit" and self.random.random() < 0.1)
                or (writer and kind == "write" and self._loses_race(me))
            ):
                what = "busy"
            else:
                return what
            self.faults.counts[f"{what} at a {'write' if kind == 'write' else 'commit'}"] += 1
            self.kernel.note("fault", what)
            return what

        return fault

    def _loses_race(self, me: SimThread | None) -> bool:
        """Whether a statement that writes fails, as with a server that finds a deadlock."""
        return me is not None and me.process in self.faults.victims and self.random.random() < 0.01

    @override
    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        deleter = open_deleter(platform, conf)
        mine: list[_History] = []
        for _ in range(self.random.randint(1, 3)):
            living = [each for each in mine if each.asked and not each.delete_asked]
            if living and self.random.random() < 0.4:
                self._delete_several(deleter, living)
            elif self.random.random() < 0.4:
                mine += self._create_alike(platform)
            else:
                mine.append(self._create(platform))

    def _delete_several(self, deleter: Deleter, living: Sequence[_History]) -> None:
        """Deletes one instance, or several by as many threads of the process, which may share the work."""
        chosen = self.random.sample(living, self.random.randint(1, min(4, len(living))))
        others = [
            self.world.spawn(
                self.kernel.in_process(), f"delete-{number}", functools.partial(self._delete, deleter, each)
            )
            for number, each in enumerate(chosen[1:])
        ]
        self._delete(deleter, chosen[0])
        for each in others:
            each.join()

    def _create_alike(self, platform: Platform) -> list[_History]:
        """Ask for several instances alike, all or none."""
        first = self.random.getrandbits(32)
        vcpus = self.random.choice((1, 1, 2))
        made = [
            _History(f"{first:08x}-{number:04}-4000-8000-000000000000", vcpus, asked=True)
            for number in range(self.random.randint(2, 4))
        ]
        self.histories += made
        uuids = [each.uuid for each in made]
        flavor = {"flavorid": f"f{vcpus}", "resources": {"VCPU": vcpus}, "extra_specs": {"sim:delay_ms": "100"}}
        args = {"request": {"flavor": flavor}, "uuids": uuids, "request_id": f"req-{uuids[0]}"}

        def call(_uuid: str) -> None:
            try:
                platform.sender.call("scheduler", "create_instances", args)
            except errors.NoValidHost as error:
                name = "undone" if error.details.get("undone") else "refused"
                self.facts[f"{name} alike"] = self.facts.get(f"{name} alike", 0) + 1
                raise
            self.facts["alike"] = self.facts.get("alike", 0) + len(made)
            for each in made:
                each.created = True

        again = None
        if self.random.random() < 0.5:
            # A repetition at about the same time: which of the two is answered first, if at all, is left to the schedule.
            work = functools.partial(self._attempt, made[0], "create again", call)
            again = self.world.spawn(self.kernel.in_process(), "again", work)
        for _ in range(self.random.randint(1, 4)):
            if self._attempt(made[0], "create", call):
                break
        if again is not None:
            again.join()
        return made
