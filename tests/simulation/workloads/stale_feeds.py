# SPDX-License-Identifier: Apache-2.0
"""Creates and deletes by many clients where one of two schedulers gets no messages about instances while faults are injected."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from moorage.rpc.interface import Handler, Message, Subscription
from moorage.scheduling.placement import Selection
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.snapshot import Snapshot
from tests.simulation.kernel import Process
from tests.simulation.network import SimTransport
from tests.simulation.workloads.creates import Creates
from tests.simulation.workloads.placement import SCHEDULERS
from tests.simulation.workloads.versions import TOLD

__all__ = ["StaleFeeds"]

#: The scheduler that gets no messages, and what it does not get.
DEAF = SCHEDULERS[1]
FEED = TOLD | {"claimed_instances"}
#: Claims that one request may try: ``[scheduling] max_attempts`` in each of four rankings.
MOST = 4 * 3


class StaleFeeds(Creates):
    """As :class:`Creates`, with filters that believe the view. Counts claims, and those that the store refused, by scheduler."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Creates.settings,
        ("scheduling", "enabled_filters"): ["compute", "capacity"],
    }
    reloaded: ClassVar[dict[tuple[str, str], Any]] = {**Creates.reloaded, ("scheduling", "enabled_filters"): []}

    @override
    def make_platform(self, role: Any, process: Process, name: str) -> Any:
        made = super().make_platform(role, process, name)
        if name == DEAF:
            self._deafen(made.transport)
        return made

    def _deafen(self, transport: SimTransport) -> None:
        serve = transport.serve

        def deaf(topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
            def handle(message: Message) -> Any:
                return None if self.faults.on and message.method in FEED else handler(message)

            return serve(topic, server, handle, threads=threads)

        transport.serve = deaf  # type: ignore[method-assign]

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_refusal(self, scheduler: Scheduler, fleet: Snapshot, work: Any, began: float) -> None:
        super().check_refusal(scheduler, fleet, work, began)
        self._count("refused", work)

    @override
    def check_claimed(self, scheduler: Scheduler, work: Any, made: Selection) -> None:
        super().check_claimed(scheduler, work, made)
        if not made.repeated:
            self._count("placed", work)

    def _count(self, what: str, work: Any) -> None:
        """A request tries no more claims than are allowed, however old the view is."""
        lost = len(work.decision.refusals)
        self.require(lost <= MOST, f"instance {work.spec.instance_uuid} tried {lost} claims")
        name = self.kernel.in_process().name.partition("#")[0]
        for key, amount in ((what, 1), ("conflicts", lost)):
            self.facts[f"{name} {key}"] = self.facts.get(f"{name} {key}", 0) + amount
