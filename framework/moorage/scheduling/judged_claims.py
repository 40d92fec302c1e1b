# SPDX-License-Identifier: Apache-2.0
"""Claims nodes whose instances filters have judged: a claim holds only while the instances are those that were judged.

Filters like affinity judge the instances of a node, and the scheduler's memory of these is a little old. So they are asked again
with the instances as the store has them, and the claim names the version of these. It is refused if the version has changed.
"""

from __future__ import annotations

from collections.abc import Callable

from oslo_log import log as logging

from moorage import errors
from moorage.read_only import replaced
from moorage.scheduling.filter_and_weigh import Ranking
from moorage.scheduling.interface import ClaimResult, RequestSpec, Residents
from moorage.scheduling.placement import Choice, Placement, Reserver
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.reservations import Reservations

__all__ = ["JudgedClaims"]

LOG = logging.getLogger(__name__)

#: How often a node is judged again because its instances changed between the judgement and the claim.
_JUDGEMENTS = 10


class JudgedClaims:
    """Claims nodes. Safe for use by several threads.

    :param residents: reads the instances of a node from the store; None: claims hold whatever instances the nodes have.
    """

    def __init__(
        self,
        ranker: Ranker,
        reserver: Reserver,
        reservations: Reservations,
        residents: Callable[[str], Residents] | None,
    ) -> None:
        self._ranker = ranker
        self._reserver = reserver
        self._reservations = reservations
        self._residents = residents

    def judges(self, ranking: Ranking) -> bool:
        """Returns whether filters are asked again about a node of the ranking before it is claimed."""
        return self._residents is not None and bool(ranking.promising)

    def claim(self, work: Placement, choice: Choice, spec: RequestSpec) -> ClaimResult:
        """Claims a node while its instances are those that the filters have judged.

        :raises ConstraintViolated: a filter refuses the node by now, or its instances change all the time.
        """
        node, key = choice.node, work.key
        if self._residents is None or not self.judges(choice.ranking):
            return work.claimer.claim(spec, node.uuid, node.host, key)
        # Requests of this scheduler do not race each other for one node; the version decides among schedulers.
        with self._reservations.acquire(node.uuid):
            for _ in range(_JUDGEMENTS):
                found = self._residents(node.uuid)
                self._judge(work, choice, found)
                try:
                    return work.claimer.claim(replaced(spec, residents=found.version), node.uuid, node.host, key)
                except errors.ResidentsChanged as error:
                    LOG.debug("%s (%s)", error.message, spec.instance_uuid)
        raise errors.ConstraintViolated(
            f"The instances of node {node.name} changed {_JUDGEMENTS} times while it was being claimed.",
            provider=node.uuid,
        )

    def _judge(self, work: Placement, choice: Choice, found: Residents) -> None:
        """Asks the filters that judged instances again, with the node's instances as the store has them.

        :raises ConstraintViolated: one of them refuses the node.
        """
        fleet = choice.fleet.with_residents(choice.row, found.records)
        group, project = work.spec.server_group, work.spec.project_id
        members = [
            each.uuid
            for each in found.records
            if group is not None and (each.server_group, each.project_id) == (group.name, project)
        ]
        spec = self._ranker.with_members(work.spec, members)
        refusing = work.policy.pipeline.refused_by(work.policy.guard, fleet, choice.row, spec, choice.ranking)
        if not refusing:
            return
        known = choice.fleet.instances_on(choice.row)
        # For the next ranking.
        self._reserver.claimed([each for each in found.records if each.uuid not in known])
        raise errors.ConstraintViolated(
            f"Filter {refusing} refuses node {choice.node.name} by now.", provider=choice.node.uuid, filter=refusing
        )
