# SPDX-License-Identifier: Apache-2.0
"""Claims resources of nodes that the scheduler has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from oslo_context import context as oslo_context

from moorage.scheduling.interface.requests import Holds, RequestSpec

__all__ = ["ClaimResult", "Claimer", "WantedClaim", "SetClaimer"]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Describes a claim that was made.

    :param node_uuid: the node. Empty with ``repeated``: the instance exists and holds nothing on any node, since its build failed
        or it was shelved.
    :param repeated: an earlier try of the same request made the claim.
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
    """Makes and releases claims for the scheduler. The control plane implements it with an allocation store."""

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Claims the resources of the request on a node.

        :raises CapacityExceeded: another claim was faster; the next candidate may do.
        :raises ConstraintViolated: this node never takes such a size, or a limit of ``spec.limits`` is reached by now.
        :raises ResidentsChanged: the node's instances have another version than ``spec.residents``.
        :raises NotFound: the node is gone (details: ``provider``); the next candidate may do.

        A ConstraintViolated with the detail ``state`` says that the node or its agent is unavailable by now.
        """

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """Returns the claim of an earlier try of the same request, or None. Called before a request is refused."""

    def release(self, instance_uuid: str) -> None:
        """Releases a new claim, and removes what was recorded with it. Does nothing if there is none.

        :raises InUse: the claim was confirmed (:meth:`SetClaimer.confirm`) or changed since.
        """


@dataclass(frozen=True, slots=True)
class WantedClaim:
    """Holds the arguments of :meth:`Claimer.claim` for one claim of :meth:`SetClaimer.claim_many`.

    :param context: of the request; by default that of the thread.
    """

    spec: RequestSpec
    node_uuid: str
    host: str
    request_id: str
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)


@runtime_checkable
class SetClaimer(Claimer, Protocol):
    """Makes several claims at once."""

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[ClaimResult | BaseException]:
        """Makes claims for several instances. No claim undoes another.

        :returns: for each the result, or the error that :meth:`claim` would have raised.
        """

    def confirm(self, instances: Sequence[str]) -> None:
        """Keeps claims that earlier tries of a request have made: :meth:`release` refuses to release them from now on.

        :raises Conflict: a claim is gone or was changed; none is confirmed.
        """
