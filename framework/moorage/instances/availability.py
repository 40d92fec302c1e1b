# SPDX-License-Identifier: Apache-2.0
"""Reads which agents and nodes get no new instances now, and makes the condition that a claim carries.

Instances need an agent that offers ``compute``. An agent is up when it is not forced down and its last heartbeat is at most
``service_down_time`` old by the database's clock. The views of schedulers and the claims apply this one rule, so a view that is
late costs a claim at the next node and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.db import MICROSECONDS, Database, now
from moorage.fleet.interface import STATES, describe_states
from moorage.fleet.tables import nodes
from moorage.scheduling.interface import ExcludedTargets
from moorage.services.tables import lacking, offering, services
from moorage.work.interface import OnlyIf

__all__ = ["Availability", "not_forced_down"]

LOG = logging.getLogger(__name__)

_AGENT = "agent"
#: Hosts without an agent that one reading asks for; the next reading of the whole fleet has the others.
_MOST_ABSENT = 500
_STATES = tuple(nodes.c[name] for flag in STATES for name in (flag, f"{flag}_reason"))
_MARKED = sa.select(nodes.c.uuid, *_STATES)
#: A select for each flag, since each can use the index of its flag. A node with several flags is returned several times: a further
#: condition on another flag would let SQLite use the index of that flag, where nearly all nodes are.
_NODES = sa.union_all(*(_MARKED.where(nodes.c[flag] == sa.true()) for flag in STATES))


def _up(of: Any) -> sa.ColumnElement[bool]:
    oldest = now() - sa.bindparam("down_micros", type_=sa.BigInteger)
    return sa.and_(of.beat > 0, of.forced_down == sa.false(), of.beat_at > oldest)


_UP = sa.case((_up(services.c), 1), else_=0)
_UP_OF = sa.select(services.c.host).where(
    services.c.binary == _AGENT, services.c.host.in_(sa.bindparam("hosts", expanding=True)), _up(services.c)
)
#: The agent service that works on instances.
_SERVICE = "compute"
_ABLE = sa.case((offering(_SERVICE), 1), else_=0).label("able")
_AGENTS = sa.select(services.c.host, services.c.disabled, services.c.disabled_reason, _UP.label("up"), _ABLE).where(
    services.c.binary == _AGENT,
    sa.or_(
        services.c.disabled == sa.true(),
        sa.not_(_up(services.c)),
        sa.not_(offering(_SERVICE)),
        services.c.host.in_(sa.bindparam("absent", expanding=True)),
    ),
)
_ENLISTED = sa.select(services.c.host).where(services.c.binary == _AGENT)
_ENLISTED_OF = _ENLISTED.where(services.c.host.in_(sa.bindparam("hosts", expanding=True)))
#: The node of a claim with its agent.
_DESTINATION = (
    sa.select(
        nodes.c.name, nodes.c.host, *_STATES, services.c.disabled.label("agent_disabled"),
        services.c.disabled_reason.label("agent_reason"), _UP.label("up"), _ABLE,
    )
    .select_from(
        nodes.outerjoin(services, sa.and_(services.c.host == nodes.c.host, services.c.binary == _AGENT))
    )
    .where(nodes.c.uuid == sa.bindparam("of_node"))
)  # fmt: skip
_SOURCE = sa.select(_UP).where(services.c.binary == _AGENT, services.c.host == sa.bindparam("of_source"))
_FORCED_DOWN = sa.exists().where(
    services.c.binary == _AGENT, services.c.host == sa.bindparam("of_host"), services.c.forced_down == sa.true()
)
_NOT_FORCED_DOWN = sa.not_(_FORCED_DOWN)
_IS_FORCED_DOWN = sa.select(_FORCED_DOWN)
_agents = services.alias("agents")
#: The node can be claimed for the agent: what ``_state`` says of a row, as a condition.
_OPEN = sa.exists().where(
    nodes.c.uuid == sa.bindparam("of_node"),
    nodes.c.host == sa.bindparam("of_agent"),
    *(nodes.c[flag] == sa.false() for flag in STATES),
    _agents.c.binary == _AGENT,
    _agents.c.host == nodes.c.host,
    _agents.c.disabled == sa.false(),
    _up(_agents.c),
    offering(_SERVICE, _agents),
)
_sources = services.alias("sources")
_OPEN_AND_SOURCE_UP = sa.and_(
    _OPEN,
    sa.exists().where(_sources.c.binary == _AGENT, _sources.c.host == sa.bindparam("of_source"), _up(_sources.c)),
)


@functools.cache
def _lacking(powers: tuple[str, ...]) -> sa.Select[Any]:
    """Returns the hosts whose agents lack one of some powers; built once."""
    conditions = (lacking(power) for power in powers)
    return sa.select(services.c.host).where(services.c.binary == _AGENT, sa.or_(*conditions))


def not_forced_down(host: str) -> OnlyIf:
    """Returns the condition that no operator has declared the agent of a host dead, for the write of an operation on that host.

    Such an operation would stand in the way of an evacuation, and nothing would do it.
    """

    def refuse(transaction: Any) -> None:
        if transaction.execute(_IS_FORCED_DOWN, {"of_host": host}).scalar():
            # Members of projects operate on their instances, and do not see hosts.
            LOG.warning("An operation on host %s is refused, because an operator has declared its agent dead.", host)
            raise errors.Conflict(
                "The host where the instance is was declared dead by an operator, so nothing can be done to the instance there. "
                "Try again when the host is back, or when the instance has been evacuated."
            )

    return OnlyIf(_NOT_FORCED_DOWN, {"of_host": host}, refuse)


class Availability:
    """States of agents and nodes in the store. Safe for use by several threads.

    :param down_time: ``[services] service_down_time`` in seconds.
    """

    def __init__(self, database: Database, down_time: float) -> None:
        self._database = database
        self._down_micros = int(down_time * MICROSECONDS)

    def enlisted(self, hosts: Collection[str] | None = None) -> frozenset[str]:
        """Returns the hosts of all agents that were ever started; with ``hosts``, only those in it."""
        with self._database.read() as tx:
            if hosts is None:
                return frozenset(tx.execute(_ENLISTED).scalars())
            return frozenset(tx.execute(_ENLISTED_OF, {"hosts": sorted(hosts)}).scalars())

    def lacking(self, powers: Collection[str]) -> frozenset[str]:
        """Returns the hosts whose agents lack one of some powers, by what they offered at their last start. One statement."""
        if not powers:
            return frozenset()
        with self._database.read() as tx:
            return frozenset(tx.execute(_lacking(tuple(sorted(powers)))).scalars())

    def read(self, absent: Collection[str], transaction: Any = None) -> ExcludedTargets:
        """What is unavailable now. Two statements; they return only rows of agents and nodes that are unavailable.

        :param absent: hosts that had no agent when the whole fleet was read; those that still have none are down.
        :param transaction: to read in, where the caller has one.
        """
        if transaction is None:
            with self._database.read() as transaction:
                return self.read(absent, transaction)
        asked = sorted(absent)[:_MOST_ABSENT]
        agents = transaction.execute(_AGENTS, {"down_micros": self._down_micros, "absent": asked}).all()
        marked = transaction.execute(_NODES).all()
        present = {row.host for row in agents}
        return ExcludedTargets(
            frozenset(row.host for row in agents if not row.up) | (frozenset(absent) - present),
            {
                row.host: why
                for row in agents
                if (why := _unable(row.host, row.able, row.disabled, row.disabled_reason))
            },
            {row.uuid: f"the node is {describe_states(row)}" for row in marked},
        )

    def check(self, transaction: Any, node_uuid: str, host: str) -> None:
        """Refuse a claim on a node that is unavailable by now. One statement.

        :param host: the agent that shall do the work.
        :raises ConstraintViolated: says why (details: ``provider``, ``state``); another node may do.
        :raises NotFound: the node is gone (details: ``provider``).
        """
        row = transaction.execute(_DESTINATION, {"of_node": node_uuid, "down_micros": self._down_micros}).first()
        if row is None:
            raise errors.NotFound(f"Node {node_uuid} was removed.", provider=node_uuid)
        state = _state(row, host)
        if state:
            raise errors.ConstraintViolated(
                f"Node {row.name} gets no new instances: {state}.", provider=node_uuid, state=state
            )

    def require(self, node_uuid: str, host: str, *, source: str = "") -> OnlyIf:
        """Returns the condition that a node is available, for the write of the operation; :meth:`check` says why it is not.

        :param source: the host that an instance leaves; its agent must be up. Empty: there is none.
        """
        values = {"of_node": node_uuid, "of_agent": host, "down_micros": self._down_micros}
        if not source:
            return OnlyIf(_OPEN, values, lambda tx: self.check(tx, node_uuid, host))

        def refuse(transaction: Any) -> None:
            self.check_source(transaction, source)
            self.check(transaction, node_uuid, host)

        return OnlyIf(_OPEN_AND_SOURCE_UP, {**values, "of_source": source}, refuse)

    def check_source(self, transaction: Any, host: str) -> None:
        """Refuse to move an instance off a host whose agent is down: the instance may run there and cannot be stopped.

        :raises Conflict: says what to do.
        """
        if not self._up(transaction, host):
            # Members of projects may move their instances, and do not see hosts.
            LOG.warning("An instance is not moved away from host %s, because the agent of %s is down.", host, host)
            raise errors.Conflict(
                "The agent of the host where the instance is, is down: nothing can stop the instance there, so it cannot be moved "
                "away. Start the agent, wait until moorage service list shows it up, and try again."
            )

    def down(self, hosts: Collection[str]) -> frozenset[str]:
        """Returns the hosts whose agent is not up. One statement, or none without hosts."""
        if not hosts:
            return frozenset()
        with self._database.read() as tx:
            up = tx.execute(_UP_OF, {"hosts": sorted(hosts), "down_micros": self._down_micros}).scalars()
            return frozenset(hosts) - frozenset(up)

    def is_up(self, host: str) -> bool:
        """Returns whether a host has an agent that is up. One statement."""
        with self._database.read() as tx:
            return self._up(tx, host)

    def _up(self, transaction: Any, host: str) -> bool:
        values = {"of_source": host, "down_micros": self._down_micros}
        return bool(transaction.execute(_SOURCE, values).scalar_one_or_none())


def _state(row: Any, host: str) -> str:
    """Why a node cannot be claimed for an agent; empty when it can."""
    if row.host != host:
        return f"its agent is {row.host} now, and no longer {host}"
    if own := describe_states(row):
        return f"the node is {own}"
    if not row.up:
        return f"its agent {host} is down"
    return _unable(host, row.able, row.agent_disabled, row.agent_reason)


def _unable(host: str, able: int, disabled: bool, reason: str) -> str:
    """Why an agent gets no new instances, whether it is up or not; empty when it can get some."""
    if not able:
        return f"its agent {host} does not offer {_SERVICE} ([agent] services)"
    if disabled:
        return f"its agent {host} is disabled" + (f" ({reason})" if reason else "")
    return ""
