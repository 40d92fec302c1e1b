# SPDX-License-Identifier: Apache-2.0
"""Keeps the rows of services: enlisting, heartbeats, epochs, evictions.

Whether a service is up is an opinion of the one who watches its beats (:mod:`moorage.services.liveness`). Its death is a write
here, an eviction, which :mod:`moorage.cleanup.coordinator` decides on.

Every statement that can race carries its condition: a beat and an eviction of the same (epoch, beat) cannot both succeed.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.clock import Clock
from moorage.db import MICROSECONDS, Database, Duplicate, JournalEvent, now, record
from moorage.services.interface import AGENT, SELF_FENCE_MARGIN, Service, ServiceIdentity
from moorage.services.tables import services

__all__ = ["SELF_FENCED", "ServiceRegistry"]

_BEAT = (
    sa.update(services)
    .where(services.c.uuid == sa.bindparam("of_uuid"), services.c.epoch == sa.bindparam("of_epoch"))
    .values(beat=services.c.beat + 1, beat_at=now())
)
_BEAT_PROMISING = _BEAT.values(
    self_fence=sa.bindparam("of_self_fence", type_=sa.BigInteger), self_fence_start=services.c.started_at
)
#: What ends an incarnation without a start of its agent, so that a fence stays. MariaDB takes the new value of a column that the
#: same statement has set before; so the epoch is set last.
_NEXT_EPOCH = (
    (
        services.c.fenced_epoch,
        sa.case((services.c.fenced_epoch == services.c.epoch, services.c.epoch + 1), else_=services.c.fenced_epoch),
    ),
    (services.c.epoch, services.c.epoch + 1),
)
_EVICT = (
    sa.update(services)
    .where(
        services.c.uuid == sa.bindparam("of_uuid"),
        services.c.epoch == sa.bindparam("of_epoch"),
        services.c.beat == sa.bindparam("of_beat"),
    )
    .ordered_values(*_NEXT_EPOCH)
)
_RETIRE = (
    sa.update(services)
    .where(services.c.uuid == sa.bindparam("of_uuid"), services.c.epoch == sa.bindparam("of_epoch"))
    .values(beat=0, beat_at=now())
)
_OF_HOST = (services.c.binary == sa.bindparam("of_binary"), services.c.host == sa.bindparam("of_host"))
_EVICT_FORCED = sa.update(services).where(*_OF_HOST, services.c.forced_down.is_(sa.true())).ordered_values(*_NEXT_EPOCH)
#: Writes nothing new: a transaction that declares it dead at the same time has to wait, or fails at its commit.
_HOLD_UP = (
    sa.update(services)
    .where(*_OF_HOST, services.c.forced_down.is_(sa.false()))
    .values(disabled_reason=services.c.disabled_reason)
)
_FENCED = (services.c.forced_down.is_(sa.true()), services.c.fenced_epoch == services.c.epoch)
_SILENT = sa.or_(services.c.beat == 0, services.c.beat_at <= now() - sa.bindparam("down_micros", type_=sa.BigInteger))
_FENCE = (
    sa.update(services)
    .where(
        services.c.uuid == sa.bindparam("of_uuid"),
        services.c.forced_down.is_(sa.true()),
        sa.or_(services.c.fenced_epoch.is_(None), services.c.fenced_epoch != services.c.epoch),
        _SILENT,
    )
    .ordered_values(
        (services.c.fenced_epoch, services.c.epoch + 1),
        (services.c.fence_reason, sa.bindparam("of_reason", type_=sa.String)),
        (services.c.evacuated, 0),
        (services.c.epoch, services.c.epoch + 1),
    )
)
_SINCE_BEAT = now() - services.c.beat_at
#: Microseconds after the last heartbeat from which on nothing runs on a host that fences itself. In integers on every database.
_SELF_FENCED_AFTER = services.c.self_fence + services.c.self_fence // int(1 / SELF_FENCE_MARGIN)
#: An agent of an earlier release leaves the promise of the agent before it as it is, but not the moment of its start.
_PROMISED = sa.and_(services.c.self_fence.is_not(None), services.c.self_fence_start == services.c.started_at)
#: The row says that nothing runs on the host any more, because it fenced itself.
SELF_FENCED = sa.and_(_PROMISED, _SINCE_BEAT > _SELF_FENCED_AFTER)
_FENCE_ITSELF = (
    sa.update(services)
    .where(
        services.c.uuid == sa.bindparam("of_uuid"),
        services.c.binary == AGENT,
        sa.or_(sa.not_(sa.and_(*_FENCED)), services.c.fenced_epoch.is_(None)),
        SELF_FENCED,
    )
    .ordered_values(
        (services.c.fenced_epoch, services.c.epoch + 1),
        (services.c.fence_reason, sa.bindparam("of_reason", type_=sa.String)),
        (services.c.forced_down, sa.true()),
        (services.c.evacuated, 0),
        (services.c.epoch, services.c.epoch + 1),
    )
)
_SELF_FENCE_OF = sa.select(
    _SINCE_BEAT.label("since"), _SELF_FENCED_AFTER.label("after"), (services.c.beat_at + _SELF_FENCED_AFTER).label("at")
).where(services.c.uuid == sa.bindparam("of_uuid"))
_BY_ITSELF = "The host fenced itself: its agent did not renew the lease."
_GIVE_REASON = (
    sa.update(services)
    .where(
        services.c.uuid == sa.bindparam("of_uuid"),
        *_FENCED,
        services.c.fence_reason != sa.bindparam("of_reason", type_=sa.String),
    )
    .values(fence_reason=sa.bindparam("of_reason", type_=sa.String))
)
_AT_EPOCH = services.c.epoch == sa.bindparam("of_epoch", type_=sa.BigInteger)
_FENCE_AT, _GIVE_REASON_AT = _FENCE.where(_AT_EPOCH), _GIVE_REASON.where(_AT_EPOCH)
_FENCE_ITSELF_AT = _FENCE_ITSELF.where(_AT_EPOCH, services.c.beat == sa.bindparam("of_beat", type_=sa.BigInteger))
_BEAT_SINCE = sa.select((now() - services.c.beat_at).label("since")).where(
    services.c.uuid == sa.bindparam("of_uuid"), sa.not_(_SILENT)
)
#: Changes the row: on Galera two transactions that write the same values of a row do not conflict.
_HOLD_FENCE = (
    sa.update(services)
    .where(*_OF_HOST, *_FENCED)
    .values(evacuated=services.c.evacuated + sa.bindparam("of_number", type_=sa.Integer))
)
_COLUMNS = (
    services.c.uuid, services.c.host, services.c.binary, services.c.cluster, services.c.epoch, services.c.beat,
    services.c.beat_at, services.c.rpc_version, services.c.disabled, services.c.disabled_reason, services.c.forced_down,
    services.c.id, services.c.offers, services.c.shard, services.c.fenced_epoch, services.c.fence_reason, services.c.evacuated,
    sa.case((_PROMISED, services.c.self_fence)).label("self_fence"), sa.case((SELF_FENCED, 1), else_=0).label("self_fenced"),
)  # fmt: skip
_EPOCHS = sa.select(services.c.uuid, services.c.epoch)
_EPOCH_OF = _EPOCHS.where(*_OF_HOST)
_GET = sa.select(*_COLUMNS).where(services.c.uuid == sa.bindparam("of_uuid"))


@functools.cache
def _list(names: tuple[str, ...]) -> sa.Select[Any]:
    """Services whose columns of these names have given values; built once."""
    equal = (services.c[name] == sa.bindparam(f"of_{name}", type_=sa.String) for name in names)
    return sa.select(*_COLUMNS).where(*equal).order_by(services.c.binary, services.c.host)


class ServiceRegistry:
    """Reads and writes the table of services. Safe for use by several threads."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def enlist(
        self,
        binary: str,
        host: str,
        *,
        cluster: str | None = None,
        rpc_version: str,
        offers: Iterable[str] | None = None,
        shard: str | None = None,
    ) -> ServiceIdentity:
        """Registers a new incarnation of the service (binary, host).

        An earlier incarnation that still runs loses its rights: its next heartbeat changes no row. ``disabled`` and
        ``forced_down`` are an operator's settings and stay. A fence ends, and what an earlier incarnation promised of its host.

        :param offers: the names of the agent services that an agent runs.
        :param shard: the shard whose nodes an agent serves.
        :raises StoreBusy: other processes keep starting the same service.
        """
        declared = {"cluster": cluster, "rpc_version": rpc_version, "offers": _joined(offers), "shard": shard}
        for _ in range(20):
            try:
                identity = self._database.run(lambda tx: self._begin(tx, binary, host, declared))
            except Duplicate:
                continue
            if identity is not None:
                return identity
        raise errors.StoreBusy(
            f"Other processes keep starting {binary} on host {host}; two must not share a host name. Give one another --name."
        )

    def _begin(
        self, tx: sa.Connection, binary: str, host: str, declared: Mapping[str, str | None]
    ) -> ServiceIdentity | None:
        cluster = declared["cluster"]
        row = tx.execute(
            sa.select(services.c.uuid, services.c.epoch).where(services.c.binary == binary, services.c.host == host)
        ).first()
        if row is None:
            uuid = randomness.new_uuid()
            tx.execute(
                sa.insert(services).values(
                    uuid=uuid, host=host, binary=binary, epoch=1, beat=1, beat_at=now(), started_at=now(), disabled=False,
                    disabled_reason="", forced_down=False, **declared,
                )
            )  # fmt: skip
            _record(tx, "start", uuid)
            return ServiceIdentity(uuid, host, binary, cluster, 1)
        begun = tx.execute(
            sa.update(services)
            .where(services.c.uuid == row.uuid, services.c.epoch == row.epoch)
            .values(
                epoch=row.epoch + 1, beat=services.c.beat + 1, beat_at=now(), started_at=now(), fenced_epoch=None,
                fence_reason="", self_fence=None, self_fence_start=None, **declared,
            )
        )  # fmt: skip
        if begun.rowcount != 1:
            return None
        _record(tx, "start", row.uuid)
        return ServiceIdentity(row.uuid, host, binary, cluster, row.epoch + 1)

    def beat(self, identity: ServiceIdentity) -> bool:
        """One heartbeat; False when this incarnation has been evicted or replaced and must stop at once."""
        return self._conditional(_BEAT, of_uuid=identity.uuid, of_epoch=identity.epoch)

    def beat_promising(self, identity: ServiceIdentity, self_fence: float | None) -> bool:
        """One heartbeat of an agent whose host fences itself, as :meth:`beat`.

        :param self_fence: seconds after a moment before this heartbeat in which all workloads of the host will have ended, with a
            margin (:data:`SELF_FENCE_MARGIN`), unless a later heartbeat is confirmed. None: some would not end.
        """
        micros = None if self_fence is None else int(self_fence * MICROSECONDS)
        given = {"of_uuid": identity.uuid, "of_epoch": identity.epoch, "of_self_fence": micros}
        return self._conditional(_BEAT_PROMISING, **given)

    def retire(self, identity: ServiceIdentity) -> bool:
        """Records that this incarnation stopped normally, so that no service waits for its heartbeats."""

        def work(tx: sa.Connection) -> bool:
            retired = tx.execute(_RETIRE, {"of_uuid": identity.uuid, "of_epoch": identity.epoch}).rowcount == 1
            if retired:
                _record(tx, "stop", identity.uuid)
            return retired

        return self._database.run(work)

    def record_reload(self, identity: ServiceIdentity) -> None:
        """Record that an incarnation has taken a new configuration, unless it was evicted or replaced meanwhile."""

        def work(tx: sa.Connection) -> None:
            if tx.execute(_BEAT, {"of_uuid": identity.uuid, "of_epoch": identity.epoch}).rowcount == 1:
                _record(tx, "reload", identity.uuid)

        self._database.run(work)

    def evict(self, uuid: str, epoch: int, beat: int) -> bool:
        """Declare an incarnation dead; the only thing that authorises others to finish its work.

        False when it has beaten, ended or started again since (epoch, beat) was seen, or another service evicted it.
        """
        return self._database.run(lambda tx: self.evict_in(tx, uuid, epoch, beat))

    def evict_in(self, tx: sa.Connection, uuid: str, epoch: int, beat: int) -> bool:
        """:meth:`evict` in the caller's transaction, which then also records what shall be done about it."""
        dead = tx.execute(_EVICT, {"of_uuid": uuid, "of_epoch": epoch, "of_beat": beat}).rowcount == 1
        if dead:
            _record(tx, "dead", uuid)
        return dead

    def evict_forced(self, tx: sa.Connection, binary: str, host: str) -> bool:
        """Ends the incarnation of a service that an operator declared dead; False if no operator has."""
        key = {"of_binary": binary, "of_host": host}
        if tx.execute(_EVICT_FORCED, key).rowcount != 1:
            return False
        _record(tx, "dead", tx.execute(_EPOCH_OF, key).one().uuid)
        return True

    def hold_up(self, tx: sa.Connection, binary: str, host: str) -> bool:
        """Keep a service from being declared dead until the transaction ends; False when it is."""
        return bool(tx.execute(_HOLD_UP, {"of_binary": binary, "of_host": host}).rowcount == 1)

    def fence(self, uuid: str, reason: str, *, down_time: float, epoch: int | None = None) -> Service:
        """Record that nothing runs on the host of an agent any more: its power is off, or its network is.

        Ends the incarnation of the agent. The fence holds until the agent starts again, or is no longer declared dead; a cleanup
        of its operations does not end it. Repeated it changes nothing but the reason.

        :param down_time: ``[services] service_down_time`` in seconds. An agent that beat within that time lives.
        :param epoch: what it was before the host was seen to be off; an agent that has another one by now has started since.
        :raises NotFound: there is no such service.
        :raises Conflict: it is no agent, is not declared dead, lives, or has started since.
        """
        self._require_agent(uuid)
        given = {"of_uuid": uuid, "of_reason": reason, "down_micros": int(down_time * MICROSECONDS)}
        if epoch is not None:
            given["of_epoch"] = epoch
        self._database.run(lambda tx: self._fence(tx, given))
        found = self.get(uuid)
        if not found.fenced and found.forced_down and epoch is not None:
            raise errors.Conflict(
                f"Host {found.host} is not fenced: while it was being turned off, its agent started again or a cleaner took its "
                "work. Look at the host, and run the command again.",
                host=found.host,
            )
        if not found.fenced:
            raise _not_dead(found)
        return found

    def dead_agent(self, uuid: str) -> Service:
        """One agent that is declared dead, so that its host may be fenced.

        :raises NotFound: there is no such service.
        :raises Conflict: it is no agent, or is not declared dead.
        """
        self._require_agent(uuid)
        found = self.get(uuid)
        if not found.forced_down:
            raise _not_dead(found)
        return found

    def _require_agent(self, uuid: str) -> None:
        seen = self.get(uuid)
        if seen.binary != AGENT:
            raise errors.Conflict(f"Service {uuid} is no agent but {seen.binary}; the host of an agent is fenced.")

    def fence_itself(self, uuid: str) -> Service:
        """Record that nothing runs on a host that fences itself: its agent was silent for longer than its lease and a margin.

        Also declares the agent dead. Time is the database's; the condition and the write are one statement. Repeated it changes
        nothing. This relies on the database: its clock has not jumped forward, and it has lost no heartbeat that it confirmed.

        :raises NotFound: there is no such service.
        :raises Conflict: it is no agent; or its host does not fence itself, or may not have done so yet.
        """
        self._require_agent(uuid)
        self._database.run(lambda tx: self.fence_itself_in(tx, uuid))
        return self.get(uuid)

    def fence_itself_in(self, tx: sa.Connection, uuid: str, seen: Service | None = None) -> bool:
        """:meth:`fence_itself` of an agent, in the caller's transaction; False when the host is fenced already.

        :param seen: the row as the caller has seen it unchanged for long enough; with another epoch or beat, nothing is fenced.
        """
        given: dict[str, Any] = {"of_uuid": uuid, "of_reason": _BY_ITSELF}
        if seen is not None:
            given |= {"of_epoch": seen.epoch, "of_beat": seen.beat}
        if tx.execute(_FENCE_ITSELF if seen is None else _FENCE_ITSELF_AT, given).rowcount == 1:
            _record(tx, "fence", uuid)
            return True
        found = _service(tx.execute(_GET, {"of_uuid": uuid}).one())
        if found.fenced:
            return False
        if seen is not None and (found.epoch, found.beat) != (seen.epoch, seen.beat):
            raise errors.Conflict(
                f"Host {found.host} is not fenced: its agent has sent a heartbeat, or its epoch has ended."
            )
        by_hand = (
            f"make sure that it is off, declare its agent dead (moorage service set agent:{found.host} --forced-down), and run "
            f"moorage host evacuate {found.host} --fenced --reason TEXT."
        )
        if found.self_fence is None:
            raise errors.Conflict(
                f"Host {found.host} is not fenced and does not fence itself, so instances may run there. To evacuate them, "
                f"{by_hand}",
                host=found.host,
            )
        lease = tx.execute(_SELF_FENCE_OF, {"of_uuid": uuid}).one()
        # MariaDB divides into decimals.
        since, after, moment = (float(each) / MICROSECONDS for each in (lease.since, lease.after, lease.at))
        at = datetime.datetime.fromtimestamp(moment, datetime.UTC)
        raise errors.Conflict(
            f"Host {found.host} is not fenced. It fences itself {after:g} seconds after the last heartbeat of its agent, which "
            f"came {since:.1f} seconds ago. Try again in {max(0.0, after - since):.1f} seconds, at {at:%Y-%m-%dT%H:%M:%SZ}. If "
            f"you cannot wait, {by_hand}",
            host=found.host,
        )

    def record_hold_back(self, uuid: str, reason: str) -> None:
        """Has the journal say why a host that fenced itself is not fenced automatically yet. Changes nothing else.

        :param uuid: of the agent.
        """
        self._database.run(lambda tx: _record(tx, "hold_back", uuid, held_back=reason))

    def _fence(self, tx: sa.Connection, given: Mapping[str, Any]) -> None:
        uuid = given["of_uuid"]
        statements = (_FENCE_AT, _GIVE_REASON_AT) if "of_epoch" in given else (_FENCE, _GIVE_REASON)
        if any(tx.execute(statement, given).rowcount == 1 for statement in statements):
            _record(tx, "fence", uuid)
            return
        found = _service(tx.execute(_GET, {"of_uuid": uuid}).one())
        since = tx.execute(_BEAT_SINCE, given).scalar()
        if found.forced_down and not found.fenced and since is not None:
            down_time, seconds = given["down_micros"] / MICROSECONDS, since / MICROSECONDS
            raise errors.Conflict(
                f"Host {found.host} is not fenced: its agent beat {seconds:.1f} seconds ago, so its host is not off. If it has "
                f"just been turned off, try again in {down_time - seconds:.1f} seconds.",
                host=found.host,
            )

    def hold_fence(self, tx: sa.Connection, host: str, *, evacuation: bool = True) -> bool:
        """Keep the fence of a host until the transaction ends; False when the host is not fenced.

        :param evacuation: count it as an evacuation.
        """
        key = {"of_binary": AGENT, "of_host": host}
        held = bool(tx.execute(_HOLD_FENCE, {**key, "of_number": 1}).rowcount == 1)
        if held and not evacuation:
            # The row must be changed all the same.
            tx.execute(_HOLD_FENCE, {**key, "of_number": -1})
        return held

    def list(
        self,
        *,
        binary: str | None = None,
        host: str | None = None,
        cluster: str | None = None,
        transaction: Any = None,
    ) -> Sequence[Service]:
        """Services by binary and host.

        :param transaction: to read in, where the caller has one.
        """
        if transaction is None:
            with self._database.read() as transaction:
                return self.list(binary=binary, host=host, cluster=cluster, transaction=transaction)
        given = {"binary": binary, "host": host, "cluster": cluster}
        equal = {name: value for name, value in given.items() if value is not None}
        rows = transaction.execute(_list(tuple(equal)), {f"of_{name}": value for name, value in equal.items()})
        return [_service(row) for row in rows]

    def epochs(self) -> dict[str, int]:
        """Returns the epoch of every service by its uuid."""
        with self._database.read() as tx:
            return {row.uuid: row.epoch for row in tx.execute(_EPOCHS)}

    def get(self, uuid: str) -> Service:
        """One service.

        :raises NotFound: there is none of that uuid.
        """
        with self._database.read() as tx:
            row = tx.execute(_GET, {"of_uuid": uuid}).first()
        if row is None:
            raise errors.NotFound(f"There is no service {uuid}; moorage service list shows all.")
        return _service(row)

    def set(
        self,
        uuid: str,
        *,
        disabled: bool | None = None,
        disabled_reason: str | None = None,
        forced_down: bool | None = None,
    ) -> Service:
        """An operator's words; None leaves a field as it is. Enabling clears the reason.

        :raises NotFound: there is no such service.
        """
        changes: dict[str, Any] = {}
        if disabled is not None:
            changes["disabled"] = disabled
            if not disabled:
                changes["disabled_reason"] = ""
        if disabled_reason is not None:
            changes["disabled_reason"] = disabled_reason
        if forced_down is not None:
            changes["forced_down"] = forced_down
            if not forced_down:
                changes |= {"fenced_epoch": None, "fence_reason": ""}
        if changes:
            self._database.run(lambda tx: self._set(tx, uuid, changes))
        return self.get(uuid)

    def _set(self, tx: sa.Connection, uuid: str, changes: Mapping[str, Any]) -> None:
        if tx.execute(sa.update(services).where(services.c.uuid == uuid).values(**changes)).rowcount:
            _record(tx, "set", uuid)

    def _conditional(self, statement: sa.Update, **values: Any) -> bool:
        return self._database.run(lambda tx: tx.execute(statement, values).rowcount == 1)


def _record(tx: sa.Connection, what: str, uuid: str, **more: str) -> None:
    """Records a service as it is now, whole, so that the journal shows what each event has changed.

    :param more: what the event says beside it.
    """
    row = tx.execute(_GET, {"of_uuid": uuid}).one()
    names = ("binary", "host", "epoch", "disabled", "disabled_reason", "forced_down", "fence_reason")
    state = {name: getattr(row, name) for name in names}
    state |= {"fenced": _service(row).fenced, **more}
    record(tx, JournalEvent(f"service.{what}", f"service/{uuid}", row.epoch, state))


def _not_dead(agent: Service) -> errors.Conflict:
    return errors.Conflict(
        f"Host {agent.host} is not fenced, because its agent is not declared dead. Make sure that the host is off, run moorage "
        f"service set agent:{agent.host} --forced-down, and try again.",
        host=agent.host,
    )


def _joined(offers: Iterable[str] | None) -> str | None:
    """Returns the names as one text, each between spaces, so that SQL can look for one."""
    return None if offers is None else f" {' '.join(sorted(set(offers)))} "


def _service(row: Any) -> Service:
    values = dict(row._mapping)
    offers = values.pop("offers")
    values["self_fenced"] = bool(values["self_fenced"])
    return Service(**values, offers=None if offers is None else frozenset(offers.split()))
