# SPDX-License-Identifier: Apache-2.0
"""Tells observers of claims that were won and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.observers.interface import ClaimRefused, ClaimWon, ObserverEvent
from moorage.scheduling.interface import Claimer, ClaimResult, RequestSpec, SetClaimer, WantedClaim

__all__ = ["ObservedClaimer", "ObservedSetClaimer"]

Tell = Callable[[ObserverEvent], None]


@dataclass(frozen=True, slots=True)
class ObservedClaimer:
    """Wraps a Claimer, and notifies observers of each claim."""

    claimer: Claimer
    tell: Tell

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """As the claimer does it."""
        wanted = WantedClaim(spec, node_uuid, host, request_id)
        try:
            result = self.claimer.claim(spec, node_uuid, host, request_id)
        except errors.MoorageError as error:
            self._tell(wanted, error)
            raise
        self._tell(wanted, result)
        return result

    def _tell(self, wanted: WantedClaim, result: ClaimResult | BaseException) -> None:
        spec, request_id = wanted.spec, wanted.request_id
        if isinstance(result, errors.CapacityExceeded | errors.ConstraintViolated):
            self.tell(ClaimRefused(request_id, spec.instance_uuid, wanted.node_uuid, result.code))
        elif isinstance(result, ClaimResult) and not result.repeated:
            resources = dict(spec.flavor.resources)
            self.tell(ClaimWon(request_id, spec.instance_uuid, result.node_uuid, resources, result.together))

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """Returns the earlier claim as the claimer does; observers got their notice when it was won."""
        return self.claimer.earlier(spec, request_id)

    def release(self, instance_uuid: str) -> None:
        """As the claimer does it."""
        self.claimer.release(instance_uuid)


@dataclass(frozen=True, slots=True)
class ObservedSetClaimer(ObservedClaimer):
    """Wraps a SetClaimer, and notifies observers of each claim."""

    claimer: SetClaimer

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[ClaimResult | BaseException]:
        """As the claimer does it."""
        results = self.claimer.claim_many(wanted)
        for each, result in zip(wanted, results, strict=True):
            self._tell(each, result)
        return results

    def confirm(self, instances: Sequence[str]) -> None:
        """As the claimer does it."""
        self.claimer.confirm(instances)
