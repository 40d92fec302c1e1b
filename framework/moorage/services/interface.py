# SPDX-License-Identifier: Apache-2.0
"""A service as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Service", "ServiceIdentity"]


@dataclass(frozen=True, slots=True)
class ServiceIdentity:
    """One incarnation of a service: what message headers, member ids and owned rows derive from.

    :param epoch: rises with every start and every eviction; a smaller one has no rights any more.
    """

    uuid: str
    host: str
    binary: str
    cluster: str | None
    epoch: int


@dataclass(frozen=True, slots=True)
class Service:
    """A row of ``services``.

    :param beat: rises with every heartbeat; 0 when the service ended in good order.
    :param beat_at: microseconds since the Unix epoch, of the database's clock; for people, it decides nothing.
    :param disabled: an operator wants nothing new to be placed on it.
    :param id: a number, for clients that want one instead of the uuid.
    :param forced_down: an operator says that it is dead, whatever its heartbeats say.
    """

    uuid: str
    host: str
    binary: str
    cluster: str | None
    epoch: int
    beat: int
    beat_at: int
    rpc_version: str
    disabled: bool
    disabled_reason: str
    forced_down: bool
    id: int = 0

    @property
    def stopped(self) -> bool:
        """It ended in good order and has not started again."""
        return self.beat == 0
