# SPDX-License-Identifier: Apache-2.0
"""Confirms resizes after ``[compute] resize_confirm_after``.

A resize is confirmed after its time only while the instance has no fault and the driver sees that it runs: the confirmation removes
the old copy, which may be the only good one. So none is confirmed while the driver does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oslo_log import log as logging

from moorage import errors
from moorage.control_plane.interface import AgentTools
from moorage.drivers.interface import Observed, WorkloadState
from moorage_plugins.compute.instances import Compared

__all__ = ["DueResizes"]

LOG = logging.getLogger(__name__)


class DueResizes:
    """The resizes on one host whose confirmation is due; used by one thread at a time."""

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        #: The resizes of which the log has said why they are not confirmed, by instance and fence.
        self._held_back: set[tuple[str, int]] = set()

    def confirm(self, rows: Sequence[Compared], found: Mapping[str, Observed]) -> None:
        """Confirms the resizes whose time is over; logs once of each of the others why it waits for a person.

        :param found: what the driver saw after the rows had been read.
        """
        held_back: set[tuple[str, int]] = set()
        for row in rows:
            if row.unconfirmed is not None and 0 <= row.confirm_after <= row.unconfirmed:
                why = self._confirm(row, found.get(row.uuid))
                if why:
                    held_back.add((row.uuid, row.fence))
                if why and (row.uuid, row.fence) not in self._held_back:
                    LOG.warning(
                        "The resize of instance %s is not confirmed after its time, so its old place stays: %s Confirm it or "
                        "revert it.",
                        row.uuid, why,
                    )  # fmt: skip
        self._held_back = held_back

    def _confirm(self, row: Compared, seen: Observed | None) -> str:
        """Confirms a resize unless something has become of the instance since its row was read; says why it needs a person."""
        if seen is None or seen.state is not WorkloadState.RUNNING:
            return f"the instance does not run ({'gone' if seen is None else seen.state.value})."
        try:
            found = self._tools.instances.get(row.uuid)
            if found.fence == row.fence:
                if found.fault:
                    return f"the instance has a fault: {found.fault.removesuffix('.')}."
                self._tools.confirm_resize(found)
                LOG.info("The resize of instance %s was confirmed after %g seconds.", row.uuid, row.confirm_after)
        except errors.MoorageError as error:
            LOG.warning("The resize of instance %s is not confirmed now: %s", row.uuid, error)
        return ""
