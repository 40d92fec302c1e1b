# SPDX-License-Identifier: Apache-2.0
"""Combines the claims of several threads into few transactions: the claims that wait while a transaction runs share the next one.

A claim that meets no other is made at once. A limited number of transactions run at a time. The threads share them as
:mod:`moorage.gathering` says.

A combined transaction is all or nothing, yet each claim has its own outcome. Claims that cannot share the transaction are left out,
and their own threads make them one by one. A transaction that fails for an unknown reason is halved until the claim that causes it
is alone. After a commit of unknown outcome every claim is looked up before any of their threads is answered.

A thread leads one try of a transaction. After a lost race each claim is made alone by its own thread, which waits between its tries
and holds up no other claim; the next transactions are half as large.

No thread waits without limit. A claim that waits too long for its transaction to begin is made alone by its own thread. A claim
whose transaction does not end in time has an unknown outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import AllocationChange, BatchCompanion, ClaimOutcome, Companion, Expect
from moorage.gathering import Gathered, Gathering, own_error

__all__ = ["Combiner", "Member", "is_combinable"]

LOG = logging.getLogger(__name__)
#: For how many times the patience of the combiner a claim waits for the end of its transaction.
_UNTIL_END = 5


@dataclass(slots=True, eq=False)
class Member(Gathered[ClaimOutcome]):
    """Holds a claim that waits for its transaction, or is in it."""

    change: AllocationChange
    companion: Companion | None
    #: The request of the claim; the thread of another request may make the claim.
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)
    #: What its last transaction was about to commit.
    written: ClaimOutcome | None = None


def is_combinable(change: AllocationChange, companion: Companion | None) -> bool:
    """Returns whether a claim may share a transaction.

    Claims of existing consumers may not: they have resources to give back. Nor may claims with a companion that is written alone:
    it would lock its rows before those of other companions, whatever their order.
    """
    is_new = change.expected is Expect.NOTHING and bool(change.resources)
    return is_new and (companion is None or isinstance(companion, BatchCompanion))


class Combiner:
    """The claims of one store in one process. Safe for use by several threads.

    :param alone: makes one claim in a transaction of its own. It tries once unless :attr:`Member.alone` is set: others wait
        meanwhile.
    :param together: makes claims of different consumers in one transaction. After the commit it sets the outcome of each claim that
        was made, and :attr:`Member.alone` of the others. An error means that it has made none of the others. It tries once.
    :param look_up: sets the outcomes of those claims that an earlier transaction has committed.
    :param largest: how many claims one transaction makes.
    :param patience: seconds that a claim waits for its transaction to begin before it is made alone. It waits five times as long
        for the transaction to end.
    :param lanes: how many transactions run at a time.
    """

    def __init__(
        self,
        alone: Callable[[Member], ClaimOutcome],
        together: Callable[[Sequence[Member]], None],
        look_up: Callable[[Sequence[Member]], None],
        largest: int,
        patience: float,
        lanes: int = 1,
    ) -> None:
        self._alone = alone
        self._together = together
        self._look_up = look_up
        self._largest = largest
        #: How many claims the next transaction makes: halved by each conflict, doubled by each success.
        self._size = largest
        self._until_unknown = (1 + _UNTIL_END) * patience
        self._gathering = Gathering[Member](
            self._make,
            lambda member: (member.change.consumer,),
            lambda: self._size,
            patience,
            _UNTIL_END * patience,
            lanes,
        )

    def claim(self, change: AllocationChange, companion: Companion | None) -> ClaimOutcome:
        """Make a claim, perhaps together with others; raises what it would raise alone.

        :raises StoreUnavailable: also if the transaction of the claim does not end in time; ``details['outcome']`` is ``unknown``.
        """
        member = Member(change, companion)
        if not self._gathering.join(member):
            raise errors.StoreUnavailable(
                f"The transaction with the claim of {change.consumer} has not ended for {self._until_unknown:g} seconds; whether "
                "the claim is made is unknown. Try again.",
                outcome="unknown",
            )
        if member.alone:
            self._make([member])
        if member.outcome is None:
            raise member.error or AssertionError("a claim that was not decided")
        return member.outcome

    def claim_many(self, members: Sequence[Member]) -> list[ClaimOutcome | BaseException]:
        """Make claims of different consumers that came together; of each the outcome, or what :meth:`claim` would raise.

        They share transactions with each other and with nobody else.
        """
        for first in range(0, len(members), self._largest):
            self._make(members[first : first + self._largest])
        for each in members:
            if each.alone:
                self._make([each])
        return [each.outcome or each.error or AssertionError("a claim that was not decided") for each in members]

    def _make(self, batch: Sequence[Member]) -> None:
        """Makes the claims of a batch; a batch that fails for an unknown reason is made in halves."""
        if len(batch) == 1:
            self._make_one(batch[0])
            return
        try:
            self._together(batch)
        except errors.StoreUnavailable as error:
            self._settle(batch, error)
        except errors.StoreBusy:
            # Others write the same rows. The threads try again, and the next transactions touch fewer.
            self._size = max(1, min(self._size, len(batch)) // 2)
            for each in batch:
                each.alone = not each.decided
        except Exception as error:  # noqa: BLE001  (alone, each learns what is wrong with it, and only with it)
            LOG.debug("%d claims cannot be made together (%r).", len(batch), error)
            left = [each for each in batch if not each.done]
            for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                if len(half) > 1:
                    self._make(half)
                else:
                    for each in half:
                        each.alone = True
        else:
            self._grow(len(batch))

    def _make_one(self, member: Member) -> None:
        try:
            member.outcome = self._alone(member)
        except errors.StoreUnavailable as error:
            self._settle([member], error)
        except errors.StoreBusy as error:
            # Alone it is tried again, and the others need not wait for that.
            member.error, member.alone = (error if member.alone else None), True
        except Exception as error:  # noqa: BLE001  (it is raised in the thread that asked)
            member.error = error
        else:
            self._grow(1)

    def _grow(self, made: int) -> None:
        if made >= self._size:
            self._size = min(self._largest, 2 * self._size)

    def _settle(self, batch: Sequence[Member], error: errors.StoreUnavailable) -> None:
        """Decide claims whose transaction failed with the store. If the outcome of the commit is unknown, they are looked up."""
        left = [each for each in batch if not each.decided]
        if error.is_outcome_unknown:
            try:
                self._look_up(left)
            except Exception as failure:  # noqa: BLE001  (the outcome stays unknown, and the callers' error says so)
                LOG.warning(
                    "%d claims could not be looked up after a commit of unknown outcome: %s", len(left), failure
                )
        for each in left:
            each.error = None if each.decided else own_error(error)
