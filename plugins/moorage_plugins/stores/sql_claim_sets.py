# SPDX-License-Identifier: Apache-2.0
"""Makes claims of several requests in one transaction of the sql store.

The :class:`~moorage_plugins.stores.combiner.Combiner` decides which claims share a transaction. The transaction locks and writes in
the order of a single claim (:mod:`moorage_plugins.stores.sql_claims`), by statements for sets, which tell only how many rows they
have changed. If these are too few, the transaction is rolled back, a read finds the claims that did not fit, and the others are
made together again; the conditions of that transaction decide, not the read. A claim that did not fit is made alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import (
    BatchCompanion,
    ClaimOutcome,
    GenerationConflict,
    RefusedTogether,
)
from moorage.context import acting_for
from moorage.db import Duplicate, execute_set
from moorage_plugins.stores import capacity_statements, statements
from moorage_plugins.stores.checks import refusals
from moorage_plugins.stores.combiner import Member
from moorage_plugins.stores.sql_claims import (
    AtProvider,
    RefusedError,
    SqlAllocationLedger,
    StaleError,
    new_consumer,
    record_claim,
)
from moorage_plugins.stores.sql_holdings import microseconds, parameters

__all__ = ["SqlClaimSets"]

LOG = logging.getLogger(__name__)
#: How often a combined transaction is done again without the claims that it cannot make.
_ROUNDS = 4
#: How often claims are looked up after a commit of unknown outcome. The claims that wait for the next transaction wait meanwhile.
_LOOKS = 2


class _LeftOutError(Exception):
    """Raised in a combined transaction, which must be undone and done again without these claims."""

    def __init__(self, members: Collection[Member]) -> None:
        super().__init__(f"{len(members)} claims")
        self.members = members


class SqlClaimSets(SqlAllocationLedger):
    """Makes claims of new consumers, several in one transaction."""

    def _alone(self, member: Member) -> ClaimOutcome:
        """Makes one claim, perhaps for another thread, which waits for it."""

        def note(outcomes: Sequence[ClaimOutcome]) -> None:
            member.written = outcomes[0]

        with acting_for(member.context):
            tries = None if member.alone else 1
            return self._persistently([member.change], (), member.companion, note, tries)[0]

    def _together(self, members: Sequence[Member]) -> None:
        """Makes claims of new consumers in one transaction; see :class:`moorage_plugins.stores.combiner.Combiner`."""
        left = _without_rivals(members)
        for _ in range(_ROUNDS):
            if len(left) < 2:
                break
            try:
                outcomes = self._database.run(
                    lambda tx, left=left: self._claim_together(tx, left),  # type: ignore[misc]
                    attempts=1,
                )
            except _LeftOutError as error:
                out = set(error.members)
            except errors.QuotaExceeded as error:
                out = {each for each in left if each.change.project == error.details["project"]}
            except (RefusedError, StaleError, errors.NotFound, Duplicate) as error:
                out = self._misfits(left)
                if not out:
                    raise
                LOG.debug("%d of %d claims cannot be made together (%r).", len(out), len(left), error)
            else:
                for each, outcome in zip(left, outcomes, strict=True):
                    each.outcome = outcome
                break
            left = [each for each in left if each not in out]
        for each in members:
            each.alone = each.outcome is None

    def _claim_together(self, tx: sa.Connection, members: Sequence[Member]) -> Sequence[ClaimOutcome]:
        """Locks and writes in the order of :meth:`_change`: consumers, providers, what the companions write; quotas are last."""
        changes = sorted((each.change for each in members), key=lambda each: each.consumer)
        leased = [new_consumer(each) | {"new_lifetime": microseconds(each.lifetime)} for each in changes]
        tx.execute(statements.ADD_LEASED_CONSUMER, leased)
        plans, rows = self._plans(tx, changes, (), ())
        unlimited, limited = self._limits(tx, changes)
        if unlimited:
            limited |= self._quotas.look(tx, [unlimited])
        turns = [
            {"of_provider": number, "of_uuid": plan.uuid, "of_residents": plan.seen}
            for number, plan in sorted(plans.items())
        ]
        if tx.dialect.name != "sqlite" and len(plans) > 1:
            # A set statement locks in no order.
            tx.execute(statements.LOCK_PROVIDERS, {"numbers": sorted(plans)})
        if execute_set(tx, statements.BUMP_GENERATIONS, turns) != len(turns):
            raise RefusedError
        self._take_together(tx, plans)
        tx.execute(statements.ADD_ALLOCATIONS, rows)
        self._quotas.note(tx, changes, {}, limited)
        _accompany(tx, members)
        outcomes = self._outcomes(tx, [each.change for each in members], (), len(members))
        for each, outcome in zip(members, outcomes, strict=True):
            with acting_for(each.context):
                record_claim(tx, each.change, outcome)
            each.written = outcome
        return outcomes

    def _take_together(self, tx: sa.Connection, plans: Mapping[int, AtProvider]) -> None:
        """Takes the resources of claims from their providers. One statement, if no two claims want different amounts of the same.

        :raises RefusedError: the count of rows says that not everything was taken.
        """
        rounds: list[list[Mapping[str, int]]] = []
        for number, plan in sorted(plans.items()):
            # Plain dictionaries: counters take a twentieth of the scheduler's time for a claim.
            amounts: dict[tuple[int, int], int] = {}
            for each in plan.takes:
                for pair in each.items():
                    amounts[pair] = amounts.get(pair, 0) + 1
            seen: dict[int, int] = {}
            for (of_class, amount), times in sorted(amounts.items()):
                place = seen.get(of_class, 0)
                if place == len(rounds):
                    rounds.append([])
                rounds[place].append({**parameters(number, {of_class: amount}), "times": times})
                seen[of_class] = place + 1
        statement = capacity_statements.take(1, self._step_rule, False, True)
        for rows in rounds:
            if execute_set(tx, statement, rows) != len(rows):
                raise RefusedError

    def _misfits(self, members: Sequence[Member]) -> set[Member]:
        """Returns the claims for which a combined transaction was refused, by a read: a hint, the next transaction decides.

        The claims are looked at in their order; each takes the room that is left by those before it.
        """
        out: set[Member] = set()
        uuids = sorted({uuid for each in members for uuid in (*each.change.resources, *each.change.residents)})
        with self._database.read() as tx:
            consumers = {"consumers": [each.change.consumer for each in members]}
            known = {row.consumer_uuid for row in tx.execute(statements.CONSUMERS, consumers)}
            rows = {row.uuid: row for row in tx.execute(statements.VERSIONS, {"uuids": uuids})}
            found = self._inventory_rows(tx, [row.id for row in rows.values()])
        self._forget(uuid for uuid in uuids if uuid not in rows or self._ids.get(uuid) != rows[uuid].id)
        present = {
            (uuid, item.resource_class): (item, used)
            for uuid, row in rows.items()
            for item, used in found.get(row.id, ())
        }
        for each in members:
            change = each.change
            outdated = any(
                version is not None and (uuid not in rows or rows[uuid].residents != version)
                for uuid, version in change.residents.items()
            )
            if outdated or change.consumer in known or any(refusals([change], present, {}, self._step_rule)):
                out.add(each)
                continue
            for uuid, amounts in change.resources.items():
                for name, amount in amounts.items():
                    item, used = present[uuid, name]
                    present[uuid, name] = (item, used + amount)
        return out

    def _look_up(self, members: Sequence[Member]) -> None:
        """Sets the outcomes of the claims that a transaction of unknown outcome has committed."""

        def work(tx: sa.Connection) -> list[ClaimOutcome | None]:
            return [self._committed(tx, each) for each in members]

        found = self._database.read_run(work, attempts=_LOOKS, deadline=self._database.lock_timeout)
        for each, outcome in zip(members, found, strict=True):
            each.outcome = outcome

    def _committed(self, tx: sa.Connection, member: Member) -> ClaimOutcome | None:
        """Returns the outcome of a claim if it is committed.

        None without a request key: such a claim cannot be distinguished from one of another request. The claim is a repetition only
        if the transaction of unknown outcome has not made it.
        """
        try:
            found = self._repeated(tx, [member.change]) if member.change.request_id is not None else None
        except GenerationConflict:
            return None
        if not found:
            return None
        written = member.written
        is_new = written is not None and not written.repeated and set(written.allocations) == set(found[0].allocations)
        return replace(found[0], repeated=not is_new)


def _without_rivals(members: Sequence[Member]) -> list[Member]:
    """Returns the claims without those that expect a version of a node's residents which an earlier claim changes.

    A claim raises the version of each node that it names, whether it expects a version or not.
    """
    left, raised = [], set[str]()
    for each in members:
        expected = {uuid for uuid, version in each.change.residents.items() if version is not None}
        if not expected & raised:
            left.append(each)
            raised |= {*each.change.resources, *each.change.residents}
    return left


def _accompany(tx: sa.Connection, members: Sequence[Member]) -> None:
    """Calls the companions of claims that share a transaction, all of one class at once.

    :raises _LeftOutError: a companion refuses claims.
    """
    sets: dict[type[BatchCompanion], list[Member]] = {}
    for each in members:
        if isinstance(each.companion, BatchCompanion):
            sets.setdefault(type(each.companion), []).append(each)
    for kind, alike in sets.items():
        try:
            kind.together(tx, [each.companion for each in alike])
        except RefusedTogether as error:
            out = [each for each in alike if each.companion in error.companions]
            raise _LeftOutError(out or members) from error
