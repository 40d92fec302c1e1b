# SPDX-License-Identifier: Apache-2.0
"""Three engines deliver the journal to two webhooks: every wanted event arrives, in order, and no cursor runs ahead."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors, threads
from moorage.control_plane.journal_delivery import Delivery
from moorage.control_plane.periodic_loop import SharedLook
from moorage.control_plane.process import Platform
from moorage.db import Database, JournalEvent, record
from moorage.journal.delivery import POLL
from moorage.journal.sender import WebhookSink
from moorage.journal.sequencer import Sequencer
from moorage.journal.webhooks import WebhookStore
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import Workload

__all__ = ["Deliveries"]

#: Webhooks, and the kinds that they want.
WANTED: Mapping[str, tuple[str, ...]] = {"all": (), "things": ("thing.*",)}
KINDS = ("thing.create", "thing.change", "other.change")
#: Events of one message.
BATCH = 3
#: Seconds that deliveries may take to end at a reload.
_LAST_DELIVERIES = 5.0


class _Deliverer:
    """The deliveries of an engine."""

    binary = "engine"

    def start(self, platform: Platform, conf: Any) -> None:
        """Begin."""
        self._platform = platform
        self._reloading = threads.lock()
        self._delivery = Delivery(platform, conf)
        self._delivery.start()
        looks = {"look for events to deliver": (POLL, lambda transaction: self._delivery.look(transaction))}
        self._look = SharedLook(platform, looks, first=0.0)
        self._look.start()

    def reload(self, conf: Any) -> None:
        """As engines do it, whose process reloads once at a time."""
        with self._reloading:
            old, self._delivery = self._delivery, Delivery(self._platform, conf)
            old.stop(_LAST_DELIVERIES)
            self._delivery.start()


class _Numberer:
    """The sequencer of a scheduler."""

    binary = "scheduler"

    def start(self, platform: Platform, conf: Any) -> None:
        """Begin."""
        self._platform = platform
        threads.start(self._run, name="sequencer")

    def reload(self, conf: Any) -> None:
        """Nothing of it is configured."""

    def _run(self) -> None:
        sequencer = Sequencer(self._platform.database)
        while True:
            # The store may be away; it is asked again.
            with contextlib.suppress(errors.MoorageError):
                sequencer.number()
            self._platform.clock.sleep(0.5)


class Deliveries(Workload):
    """Production's deliveries, and receivers in the place of the network, which refuse, are slow, and lose their answers."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        ("services", "report_interval"): 3.0,
        ("services", "service_down_time"): 10.0,
        ("journal", "webhook_timeout"): 1.0,
    }
    reloaded: ClassVar[dict[tuple[str, str], Any]] = {("journal", "webhook_timeout"): 2.0}
    points: ClassVar[int] = 300
    steps: ClassVar[int] = 700
    seconds: ClassVar[float] = 30.0
    healing: ClassVar[float] = 900.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        webhooks = WebhookStore(database)
        for name, kinds in WANTED.items():
            webhooks.create(name, f"https://{name}.example.org/", after="oldest", kinds=kinds)

    @override
    def run(self) -> str:
        with (
            mock.patch.object(WebhookSink, "_post", lambda sink, *request: self._post(sink, *request)),
            mock.patch.object(WebhookSink, "batch", BATCH),
        ):
            return super().run()

    @override
    def begin(self) -> None:
        #: Numbers that each receiver has accepted, and the furthest place of each cursor, by the name of the webhook.
        self._accepted: dict[str, set[int]] = {name: set() for name in WANTED}
        self._cursors: dict[str, int] = {}
        self._healed = False
        self.start_role("numberer", _Numberer)
        for number in (1, 2, 3):
            self.start_role(f"engine-{number}", _Deliverer)

    @override
    def begin_clients(self) -> None:
        for number in (1, 2):
            self.client(f"writer-{number}", self._writer)

    def _writer(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        for version in range(self.random.randint(6, 14)):
            event = JournalEvent(self.random.choice(KINDS), f"thing/{process.name}", version)

            def write(tx: sa.Connection, event: JournalEvent = event) -> None:
                record(tx, event)

            try:
                platform.database.run(write)
            except errors.MoorageError as error:
                self.kernel.note("refused", type(error).__name__)
            platform.clock.sleep(self.random.choice((0.0, 0.0, 0.5, 3.0)))

    # -- receivers --------------------------------------------------------------------------------------------------

    def _post(self, sink: Any, scheme: str, host: str, port: int, path: str, body: bytes, headers: Any) -> int:
        """One message, in the thread of the engine that sends it."""
        name, clock = sink._webhook.name, sink._clock
        numbers = [each["number"] for each in json.loads(body)["events"]]
        fate = "well" if self._healed else self.random.choice((*("well",) * 6, "refused", "lost", "unanswered", "slow"))
        clock.sleep(self.random.uniform(1, 30) if fate == "slow" else self.random.choice((0.0, 0.05)))
        if fate == "refused":
            return 503
        if fate == "lost":
            raise TimeoutError("simulated")
        self._accept(name, numbers)
        if fate == "unanswered":
            raise TimeoutError("simulated")
        clock.sleep(self.random.choice((0.0, 0.05)))
        return 204

    def _accept(self, name: str, numbers: list[int]) -> None:
        accepted = self._accepted[name]
        early = [each for each in self._wanted(name, numbers[-1]) if each not in accepted and each not in numbers]
        self.require(not early, f"the webhook {name} got {numbers} before {early}")
        self.require(numbers == sorted(numbers), f"the webhook {name} got {numbers}, which is out of order")
        accepted.update(numbers)
        self.kernel.note("accepted", f"{name}: {numbers}")

    def _wanted(self, name: str, upto: int) -> list[int]:
        """The numbers of the events that a webhook wants, in order."""
        found = self.rows("SELECT number, kind FROM events WHERE number IS NOT NULL ORDER BY number")
        return [number for number, kind in found if number <= upto and (name == "all" or kind.startswith("thing."))]

    # -- checks -------------------------------------------------------------------------------------------------------

    def _positions(self) -> dict[str, int]:
        names = dict(self.rows("SELECT uuid, name FROM webhooks"))
        found = self.rows("SELECT name, position FROM event_subscriptions")
        return {names[name.removeprefix("webhook/")]: position for name, position in found}

    @override
    def check_step(self) -> None:
        for name, position in self._positions().items():
            before = self._cursors.get(name, 0)
            self.require(position >= before, f"the cursor of the webhook {name} went back from {before} to {position}")
            self._cursors[name] = position
            if position > before:
                ahead = [each for each in self._wanted(name, position) if each not in self._accepted[name]]
                self.require(
                    not ahead, f"the cursor of the webhook {name} is at {position}, and {ahead} were not accepted"
                )

    @override
    def quiet(self) -> str:
        self._healed = True
        ((waiting,),) = self.rows("SELECT count(*) FROM events WHERE number IS NULL")
        ((last,),) = self.rows("SELECT coalesce(max(number), 0) FROM events")
        behind = {name: position for name, position in self._positions().items() if position < last}
        return f"{waiting} events have no number, and {behind} are behind {last}" if waiting or behind else ""

    @override
    def check(self) -> None:
        self.check_step()
        ((last,),) = self.rows("SELECT coalesce(max(number), 0) FROM events")
        for name, accepted in self._accepted.items():
            missing = [each for each in self._wanted(name, last) if each not in accepted]
            self.require(not missing, f"the webhook {name} never got {missing}")
