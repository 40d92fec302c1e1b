# SPDX-License-Identifier: Apache-2.0
"""Claims that come at once from several threads and ask the same providers, made in one transaction.

Nobody waits for company: a claim that finds nobody before it is made at once, and those that come meanwhile are made together
afterwards. So a hot provider costs one commit and four statements for all that wait, and a claim alone costs what it always did.
When the transaction of all is refused (one consumer is known, the room is not there for all), each is made by itself, by the thread
that wants it: what each is told does not depend on the others, and a provider that is full refuses as quickly as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from oslo_context import context as oslo_context

from moorage import threads
from moorage.allocation.interface import AllocationChange, ClaimOutcome, Companion, Expect

__all__ = ["Group", "Member", "groupable"]


@dataclass(slots=True, eq=False)
class Member:
    """A claim in the line."""

    change: AllocationChange
    companion: Companion | None
    #: The request of the claim; another request's thread may make the claim.
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)
    outcome: ClaimOutcome | None = None
    error: BaseException | None = None
    #: The transaction of all was refused.
    refused: bool = False
    #: Set when the claim is made or refused, and when it is this thread's turn to lead.
    woken: threads.Event = field(default_factory=threads.event)

    @property
    def done(self) -> bool:
        """Nobody else does anything for it any more."""
        return self.outcome is not None or self.error is not None or self.refused


def groupable(change: AllocationChange) -> bool:
    """Whether a claim may share a transaction with others.

    New consumers may; others have resources to give back. A claim that expects a version of a node's residents may not: the
    claims before it in the same transaction raise that version.
    """
    expects = any(version is not None for version in change.residents.values())
    return change.expected is Expect.NOTHING and bool(change.resources) and not expects


class Group:
    """The lines of claims, one for each set of providers that is asked.

    :param alone: makes one claim.
    :param together: makes claims of the same providers in one transaction; None: refused, nothing is written.
    :param largest: how many claims one transaction makes.
    """

    def __init__(
        self,
        alone: Callable[[Member], ClaimOutcome],
        together: Callable[[Sequence[Member]], Sequence[ClaimOutcome] | None],
        largest: int,
    ) -> None:
        self._alone = alone
        self._together = together
        self._largest = largest
        self._lock = threads.lock()
        #: There is a line where somebody leads; it holds those who wait.
        self._lines: dict[Hashable, list[Member]] = {}

    def claim(self, change: AllocationChange, companion: Companion | None) -> ClaimOutcome:
        """Make a claim, perhaps together with others; raises what it would raise alone."""
        member = Member(change, companion)
        key = frozenset(change.resources)
        with self._lock:
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = []
            else:
                line.append(member)
        if line is None:
            self._lead(key, member)
        else:
            member.woken.wait()
            if not member.done:
                self._lead(key, member)
        if member.error is not None:
            raise member.error
        if member.refused:
            return self._alone(member)
        if member.outcome is None:
            raise AssertionError("a claim that was neither made nor refused")
        return member.outcome

    def _lead(self, key: Hashable, member: Member) -> None:
        """Make this claim and those that wait, then let the next one lead."""
        with self._lock:
            line = self._lines[key]
            batch = [member, *line[: self._largest - 1]]
            del line[: self._largest - 1]
        try:
            self._make(batch)
        finally:
            with self._lock:
                line = self._lines[key]
                following = line.pop(0) if line else None
                if following is None:
                    del self._lines[key]
            if following is not None:
                following.woken.set()
            for each in batch:
                each.woken.set()

    def _make(self, batch: Sequence[Member]) -> None:
        try:
            outcomes = self._together(batch) if len(batch) > 1 else None
        except BaseException as error:  # noqa: BLE001  (whoever waits must hear of it, whatever it is)
            for each in batch:
                each.error = error
            return
        if outcomes is not None:
            for each, outcome in zip(batch, outcomes, strict=True):
                each.outcome = outcome
            return
        if len(batch) > 1:
            for each in batch:
                each.refused = True
            return
        try:
            batch[0].outcome = self._alone(batch[0])
        except BaseException as error:  # noqa: BLE001  (it is raised in the thread that asked: the caller)
            batch[0].error = error
