# SPDX-License-Identifier: Apache-2.0
"""What the scheduler needs of allocation: it claims the room that it has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from oslo_context import context as oslo_context

from moorage.scheduling.interface.requests import Holds, RequestSpec

__all__ = ["ClaimResult", "Claimer", "WantedClaim", "SetClaimer"]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The claim holds, on ``node_uuid``; ``repeated`` when an earlier try of the same request had taken it.

    :param node_uuid: empty with ``repeated``: the instance exists and holds nothing on any node, since its build failed or it
        was shelved.
    :param shown: what was written with a new claim, as JSON data; empty where the claimer does not say.
    :param holds: which of the proposals of ``propose`` was taken; None: the first one, or there was none.
    :param token: of the operation that the claim recorded; 0 where the claimer does not say.
    :param together: how many claims the transaction made.
    """

    node_uuid: str
    repeated: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)
    holds: Holds | None = None
    token: int = 0
    together: int = field(default=1, compare=False)


class Claimer(Protocol):
    """What the scheduler needs of allocation; bound by the control plane."""

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Take the room on that node.

        :raises CapacityExceeded: another claim was faster; the next candidate may do.
        :raises ConstraintViolated: this node never takes such a size, or a limit of ``spec.limits`` is reached by now.
        :raises ResidentsChanged: the node's instances have another version than ``spec.residents``.
        :raises NotFound: the node is gone (details: ``provider``); the next candidate may do.

        A ConstraintViolated with the detail ``state`` says that the node or its agent is unavailable by now.
        """

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """What an earlier try of the same request has left; asked before a request is refused. None: nothing."""

    def release(self, instance_uuid: str) -> None:
        """Give the room of a new claim back, and take back what was recorded with it; harmless when there is none.

        :raises InUse: the claim was confirmed (:meth:`SetClaimer.confirm`) or changed since.
        """


@dataclass(frozen=True, slots=True)
class WantedClaim:
    """A claim of :meth:`SetClaimer.claim_many`; the arguments of :meth:`Claimer.claim`.

    :param context: of the request; by default that of the thread.
    """

    spec: RequestSpec
    node_uuid: str
    host: str
    request_id: str
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)


@runtime_checkable
class SetClaimer(Claimer, Protocol):
    """A claimer that makes several claims at once."""

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[ClaimResult | BaseException]:
        """Claim for several instances; of each the result, or what :meth:`claim` would have raised. No claim undoes another."""

    def confirm(self, instances: Sequence[str]) -> None:
        """Have claims stay that earlier tries of a request have made: :meth:`release` gives none of them back from here on.

        :raises Conflict: a claim is gone or was changed; none is confirmed.
        """
