# SPDX-License-Identifier: Apache-2.0
"""A service as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AGENT",
    "GETS_HOLDS",
    "LIVE_MIGRATES",
    "MIGRATES",
    "NEVER_ASSUMED",
    "TAKES_TOLD_BUILDS",
    "TAKES_TOLD_DELETIONS",
    "TAKES_TOLD_DELETION_SETS",
    "TAKES_TOLD_SETS",
    "POWER_CONTROL",
    "RUNS_COMMANDS",
    "SELF_FENCE_MARGIN",
    "Service",
    "ServiceIdentity",
]

#: The binary of agents.
AGENT = "agent"
#: Powers among what an agent offers, beside its agent services: what the compute driver of its host can do.
RUNS_COMMANDS, LIVE_MIGRATES, POWER_CONTROL = "compute.commands", "compute.live_migrate", "compute.power"
#: The power of an agent that tells its driver which providers an instance holds. Request groups need it.
GETS_HOLDS = "compute.holds"
#: The share of the lease of a host that fences itself which lies between the end of its workloads and the end of the lease, and
#: once more between the end of the lease and the fence. It covers clocks that differ by 1 % from true time, and late guardians.
SELF_FENCE_MARGIN = 0.1
#: The power of an agent that moves instances in the steps of :mod:`moorage.instances.moves`. Both ends of a move need it.
MIGRATES = "compute.migrate"
#: The power of an agent to which the message of a build brings the instance and the token.
TAKES_TOLD_BUILDS = "compute.told_builds"
#: The power of an agent to which one message of builds brings several.
TAKES_TOLD_SETS = "compute.told_sets"
#: The power of an agent to which the message of a deletion brings the token.
TAKES_TOLD_DELETIONS = "compute.told_deletions"
#: The power of an agent to which one message of deletions brings several, each with its token.
TAKES_TOLD_DELETION_SETS = "compute.told_deletion_sets"
#: Powers that no agent of a version without powers has. Such an agent lacks these, and may have the others.
NEVER_ASSUMED = frozenset(
    {
        POWER_CONTROL,
        GETS_HOLDS,
        MIGRATES,
        TAKES_TOLD_BUILDS,
        TAKES_TOLD_SETS,
        TAKES_TOLD_DELETIONS,
        TAKES_TOLD_DELETION_SETS,
    }
)


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
    :param beat_at: microseconds since the Unix epoch, of the database's clock.
    :param disabled: an operator wants nothing new to be placed on it.
    :param offers: the agent services that it runs (``compute``, ``block_storage``), and what they can do (``compute.commands``).
        None: an agent of an earlier version does not say, and other services than agents run none.
    :param id: a number, for clients that want one instead of the uuid.
    :param forced_down: an operator says that it is dead, whatever its heartbeats say.
    :param shard: the shard that an agent declares (``[sharding] my_shard``).
    :param fenced_epoch: the epoch in which the host was fenced, and ``fence_reason`` by what; see :attr:`fenced`. ``evacuated``:
        instances that were evacuated since then.
    :param self_fence: microseconds after which the host of an agent ends its workloads by itself when no heartbeat is confirmed,
        less a margin; None: it does not. ``self_fenced``: so much and a margin had passed since the last heartbeat when the row
        was read, by the database's clock.
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
    offers: frozenset[str] | None = None
    shard: str | None = None
    fenced_epoch: int | None = None
    fence_reason: str = ""
    evacuated: int = 0
    self_fence: int | None = None
    self_fenced: bool = False

    def can(self, agent_service: str) -> bool:
        """It is an agent that runs that agent service, as far as is known."""
        return self.binary == AGENT and (self.offers is None or agent_service in self.offers)

    @property
    def fenced(self) -> bool:
        """Whether the host of the service is fenced: the service was declared dead, and has not started since."""
        return self.forced_down and self.fenced_epoch == self.epoch

    @property
    def stopped(self) -> bool:
        """It ended in good order and has not started again."""
        return self.beat == 0
