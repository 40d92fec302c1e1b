# SPDX-License-Identifier: Apache-2.0
"""Removes the workloads of a host that have no instance there: what moved away, what a lost try left, what was deleted.

A workload that this control plane never made is left alone unless ``[compute] destroy_unknown`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from oslo_log import log as logging

from moorage import errors
from moorage.control_plane.interface import AgentTools
from moorage.drivers.interface import ComputeDriver, DriverError, Observed
from moorage.instances.interface import DEPARTURE, Instance
from moorage.instances.moves import kept_source

__all__ = ["UnknownWorkloads", "belongs_here", "newest_token"]

LOG = logging.getLogger(__name__)
#: Instances that one statement looks up.
_TOGETHER = 500


class UnknownWorkloads:
    """Ends workloads of one host that the store does not place there."""

    def __init__(self, tools: AgentTools, driver: ComputeDriver) -> None:
        self._tools = tools
        self._driver = driver
        #: Workloads that the log has named because this control plane never made them.
        self._named: set[str] = set()

    def remove_all(self, known: Set[str]) -> Mapping[str, DriverError]:
        """Destroys what runs here and belongs elsewhere: left by a try that was taken over, or by an instance that moved away.

        Returns why each of those that cannot be destroyed is still there. The others are destroyed all the same.

        :raises DriverError: it cannot be seen what runs here.
        """
        return self.remove_found(self._driver.inspect(), known)

    def remove_found(self, found: Mapping[str, Observed], known: Set[str]) -> Mapping[str, DriverError]:
        """Destroys the found workloads whose instance does not belong on this host; see :meth:`remove_all`.

        One statement reads the instances of :data:`_TOGETHER` workloads that are not known. While many instances are built, most of
        these were built during the look, and belong here. Each other one costs two or three statements.

        :param found: what the driver saw. :param known: instances that were on this host before the driver looked.
        """
        stuck = {}
        for uuid in self._without_place(sorted(found.keys() - known)):
            try:
                self.remove(uuid, found[uuid].token)
            except DriverError as error:
                LOG.warning("What is left of instance %s cannot be destroyed now: %s", uuid, error)
                stuck[uuid] = error
        return stuck

    def _without_place(self, uuids: Sequence[str]) -> Iterator[str]:
        """Yields the uuids without those of instances that belong on this host and have not failed.

        A failed instance may hold no claim any more.
        """
        host = self._tools.identity.host
        for start in range(0, len(uuids), _TOGETHER):
            some = uuids[start : start + _TOGETHER]
            found = self._tools.instances.find(some)
            staying = {each.uuid for each in found if each.status != "error" and _is_here(each, host)}
            yield from (uuid for uuid in some if uuid not in staying)

    def has_left(self, uuid: str) -> bool:
        """Returns whether an instance was here before, or is elsewhere now: it was moved, evacuated or shelved."""
        here = self._tools.identity.host
        departure = self._tools.workers.get(DEPARTURE, uuid)
        if departure is not None and departure.target_host == here:
            return True
        # An instance that was evacuated from its next host, too, has a departure of that host alone.
        return belongs_here(self._tools, uuid) is False

    def remove(self, uuid: str, token: int) -> bool:
        """Destroy what is here of an instance that is elsewhere, was deleted, or failed to be built; whether that was done.

        :raises DriverError: it cannot be destroyed now.
        """
        here = belongs_here(self._tools, uuid)
        if here:
            if not self._holds_nothing(uuid):
                return False
            LOG.info("Instance %s is in error and holds no claim; what is left of it on this host is destroyed.", uuid)
        elif here is not None:
            LOG.info("Instance %s is on this host no more; what it left is destroyed.", uuid)
        elif self._is_ours(uuid, token):
            LOG.warning("Instance %s runs here but does not exist; it is destroyed.", uuid)
        else:
            return False
        self._driver.destroy(uuid, token)
        return True

    def _holds_nothing(self, uuid: str) -> bool:
        """Returns whether an instance is in error without a claim: its build failed, and it can only be deleted."""
        try:
            failed = self._tools.instances.get(uuid).status == "error"
        except errors.NotFound:
            return False
        return failed and not self._tools.store.allocations(consumers=[uuid])

    def _is_ours(self, uuid: str, token: int) -> bool:
        """Whether this control plane made a workload that has no instance, or destroys what others made; reports it if not."""
        tools = self._tools
        with tools.database.read() as transaction:
            last = tools.workers.tokens(transaction, tools.instances.resource_type, [uuid]).get(uuid, 0)
        if token <= last or tools.conf.compute.destroy_unknown:
            return True
        if uuid not in self._named:
            self._named.add(uuid)
            LOG.warning(
                "A workload %s with token %d runs on host %s, and this control plane never made it. It is left alone. Remove it "
                "by hand, or have agents remove such workloads with [compute] destroy_unknown = true.",
                uuid, token, tools.identity.host,
            )  # fmt: skip
        return False


def belongs_here(tools: AgentTools, uuid: str) -> bool | None:
    """Returns whether an instance is on this host, moves to it or may go back to it; None when there is no such instance.

    One row says both, since a move may end at any moment.
    """
    try:
        found = tools.instances.get(uuid)
    except errors.NotFound:
        return None
    return _is_here(found, tools.identity.host)


def _is_here(instance: Instance, host: str) -> bool:
    """Returns whether an instance is on a host, moves to it or may go back to it."""
    return host in (instance.host, instance.pending.get("host"), kept_source(instance.pending).get("host"))


def newest_token(driver: ComputeDriver, uuid: str) -> int:
    """Returns the newest token of what runs here of an instance; 0 when nothing does."""
    seen = driver.inspect().get(uuid)
    return seen.token if seen is not None else 0
