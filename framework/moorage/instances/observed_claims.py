# SPDX-License-Identifier: Apache-2.0
"""Tells observers of claims that were won and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moorage import errors
from moorage.observers.interface import ClaimRefused, ClaimWon, ObserverEvent
from moorage.scheduling.interface import Claimer, ClaimResult, RequestSpec

__all__ = ["ObservedClaimer"]

Tell = Callable[[ObserverEvent], None]


@dataclass(frozen=True, slots=True)
class ObservedClaimer:
    """A Claimer whose claims are told of."""

    claimer: Claimer
    tell: Tell

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """As the claimer does it."""
        try:
            result = self.claimer.claim(spec, node_uuid, host, request_id)
        except (errors.CapacityExceeded, errors.ConstraintViolated) as error:
            self.tell(ClaimRefused(request_id, spec.instance_uuid, node_uuid, error.code))
            raise
        if not result.repeated:
            resources = dict(spec.flavor.resources)
            self.tell(ClaimWon(request_id, spec.instance_uuid, result.node_uuid, resources, result.together))
        return result

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """As the claimer knows it; it was told of when it was won."""
        return self.claimer.earlier(spec, request_id)

    def release(self, instance_uuid: str) -> None:
        """As the claimer does it."""
        self.claimer.release(instance_uuid)
