# SPDX-License-Identifier: Apache-2.0
"""The periodic task ``evacuate_hosts``: fences hosts that fence themselves, and evacuates the instances of fenced hosts.

Every step may be done twice, and by several engines at once: a fence is one transaction with its conditions
(:mod:`moorage.services.automatic_fences`), and an evacuation is known by the name of the fence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.control_plane.factories import open_instances
from moorage.control_plane.notifications import tell_schedulers
from moorage.control_plane.process import Platform
from moorage.control_plane.scheduler_client import Schedulers
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.instances.interface import Instance
from moorage.instances.moves import RESIZED
from moorage.services.automatic_fences import AutomaticFences
from moorage.services.interface import AGENT, Service

__all__ = ["EvacuateHosts"]

LOG = logging.getLogger(__name__)
_PAGE = 500


class EvacuateHosts(PeriodicTask):
    """Evacuates fenced hosts without an operator. Fences hosts that fenced themselves, as far as the brake allows.

    Instances that their owners stopped stay where they are.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    timeout = 3600.0
    spacing = 10.0

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        platform: Platform = tools.services
        self._registry = platform.registry
        self._fences = AutomaticFences.from_config(tools.conf, tools.clock, platform.database, platform.registry)
        self._instances = open_instances(platform, tools.conf)
        self._changed = tell_schedulers(platform, "states_changed")
        section = tools.conf.control_plane
        self._schedulers = Schedulers(platform.sender, platform.clock, section.create_attempts, section.create_timeout)
        #: What the log has said of a host or an instance.
        self._told: dict[str, str] = {}

    @override
    def list_objects(self) -> Sequence[str]:
        agents = self._registry.list(binary=AGENT)
        self._fences.observer.observe(agents)
        return [each.uuid for each in agents if each.fenced or each.self_fenced]

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        agent = self._registry.get(object_id)
        if not agent.fenced:
            if not agent.self_fenced or not self._fence(agent):
                return False
            agent = self._registry.get(object_id)
        begun = 0
        for instance in self._left(agent.host):
            lease.check()
            begun += self._evacuate(agent, instance)
        return begun

    def _fence(self, agent: Service) -> bool:
        try:
            held_back = self._fences.fence(agent)
        except errors.Conflict as error:
            LOG.info("Host %s is not fenced automatically: %s", agent.host, error.message)
            return False
        if held_back:
            if self._tell_once(
                agent.uuid, f"Host {agent.host} is dead, and is not evacuated automatically yet: {held_back}."
            ):
                self._registry.record_hold_back(agent.uuid, held_back)
            return False
        self._told.pop(agent.uuid, None)
        LOG.warning("Host %s fenced itself; its agent was declared dead, and its instances are evacuated.", agent.host)
        self._changed()
        return True

    def _left(self, host: str) -> Iterator[Instance]:
        """Returns the instances of a host that are to run."""
        after = ""
        while page := self._instances.list(after=after, limit=_PAGE, host=host):
            after = page[-1].uuid
            for each in page:
                # What a cleaner found in the midst of a move to a host that died is "stopped", and was to run.
                lost = each.status == "stopped" and each.actual_state == "unknown"
                # One whose workload had ended stays "resized" until a person decides.
                runs = each.status == RESIZED and each.actual_state in ("running", "unknown")
                if lost or runs or each.status in ("active", "migrating", "resizing"):
                    yield each

    def _evacuate(self, agent: Service, instance: Instance) -> bool:
        try:
            self._schedulers.move(instance.uuid, "evacuate", {}, f"fence-{agent.uuid}-{agent.epoch}")
        except errors.MoorageError as error:
            self._tell_once(
                instance.uuid, f"Instance {instance.uuid} of host {agent.host} stays there: {error.message}"
            )
            return False
        self._told.pop(instance.uuid, None)
        return True

    def _tell_once(self, subject: str, text: str) -> bool:
        """Logs a sentence unless it was the last one about its subject; numbers in it that change are no news.

        Returns whether it was logged.
        """
        news = "".join(each for each in text if not each.isdigit())
        if self._told.get(subject) == news:
            return False
        self._told[subject] = news
        LOG.warning("%s", text)
        return True
