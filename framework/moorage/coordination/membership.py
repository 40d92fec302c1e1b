# SPDX-License-Identifier: Apache-2.0
"""Keeps one membership: renews it, knows until when it is valid, joins again, and replaces a lost client.

All of it happens in :meth:`Membership.step`, which a thread calls again and again, and a simulator instead of the thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.clock import Clock
from moorage.coordination.interface import MEMBER_PREFIX, CoordinationBackend, NotMember, View

__all__ = ["MemberId", "Membership", "MembershipState", "Timing"]

LOG = logging.getLogger(__name__)

#: Two machines' clocks run at rates that differ by less than this share.
DRIFT = 0.02
#: Seconds between two tries to join, at most; it doubles from the heartbeat's interval.
_PAUSE_LONGEST = 5.0


class MembershipState(enum.Enum):
    """What a member knows of itself."""

    #: It has not joined yet.
    STARTING = "starting"
    CONNECTED = "connected"
    #: The backend does not answer; the membership may still stand. No new work.
    SUSPENDED = "suspended"
    #: The membership is over, or its time has run out.
    LOST = "lost"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class MemberId:
    """The parts of a member id. No id is used twice: an incarnation of a service has its epoch, and its n-th stay the number n.

    The weight is part of the id, so that the ring is a function of the ids alone, and no backend has to keep more than those.

    :param service: uuid of the service. :param worker: number of the thread.
    """

    service: str
    epoch: int
    worker: int = 0
    stay: int = 1
    weight: float = 1.0

    def __bytes__(self) -> bytes:
        text = f"{self.service}.{self.epoch}.{self.worker}.{self.stay}.{round(self.weight * 1000)}"
        return MEMBER_PREFIX + text.encode("ascii")

    @classmethod
    def parse(cls, member: bytes) -> MemberId:
        """Returns the parts of an id.

        :raises InvalidInput: it is none of ours.
        """
        parts = member.removeprefix(MEMBER_PREFIX).split(b".")
        try:
            service, epoch, worker, stay, weight = parts
            numbers = int(epoch), int(worker), int(stay), int(weight) / 1000
        except ValueError as error:
            raise errors.InvalidInput(f"{member!r} is no member id of Moorage.", path="member") from error
        if not numbers[-1] > 0:
            raise errors.InvalidInput(f"{member!r} has no weight.", path="member")
        return cls(service.decode("ascii", "replace"), *numbers)

    @classmethod
    def known(cls, member: bytes) -> bool:
        """Returns whether it is an id of this form."""
        try:
            cls.parse(member)
        except errors.InvalidInput:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds; see the options of the same names."""

    interval: float = 1.0
    margin: float = 1.0
    reset_after: float = 10.0


class Membership:
    """One member of one group. Safe for use by several threads; :meth:`step` by one at a time.

    :param factory: makes a client, given what it shall call when something may have changed.
    :param base: service, epoch, worker and weight of the ids that are used.
    """

    def __init__(
        self,
        factory: Callable[[Callable[[], None]], CoordinationBackend],
        group: str,
        base: MemberId,
        clock: Clock,
        timing: Timing,
    ) -> None:
        self._factory = factory
        self._group = group
        self._base = base
        self._clock = clock
        self._timing = timing
        self._client: CoordinationBackend | None = None
        self._certain_until = float("-inf")
        self._answered_at = clock.monotonic()
        self._stays = 0
        self._strange: set[bytes] = set()
        self._failures = 0
        self._in_trouble = False
        self._next_join = float("-inf")
        self._wake = threads.event()
        self._stop = threads.event()
        self._stepping = threads.lock()
        self._thread: threads.Thread | None = None
        #: The id of the present stay; None while there is none.
        self.member_id: bytes | None = None
        self.state = MembershipState.STARTING
        #: The last thing that went wrong, for people.
        self.problem = ""

    # -- what others ask ------------------------------------------------------------------------------------------

    @property
    def valid_until(self) -> float:
        """Until when, on the monotonic scale, this certainly is a member, if nothing is heard any more."""
        return self._certain_until

    def holds(self, member_id: bytes | None) -> bool:
        """Returns whether this is connected, certainly a member now, and still in the stay of that id. Costs nothing."""
        return (
            self.state is MembershipState.CONNECTED
            and self.member_id == member_id
            and self._clock.monotonic() < self._certain_until
        )

    def view(self) -> View:
        """Who is in the group.

        :raises Unavailable: it is not known now.
        """
        client = self._client
        if client is None or self.member_id is None:
            raise errors.Unavailable(f"This member is not in the group {self._group}: {self.problem or 'it starts'}")
        try:
            found = client.members()
        except NotMember as error:
            # The heartbeat finds out in its own way, and joins again; it need not wait for its time.
            self._wake.set()
            raise errors.Unavailable(f"This member is in the group {self._group} no more: {error.message}") from error
        strange = {member for member in found.members if not MemberId.known(member)}
        for member in strange - self._strange:
            LOG.warning(
                "%r in the group %s is no member that this release knows; it gets no work.", member, self._group
            )
        self._strange = strange
        return replace(found, members=found.members - strange) if strange else found

    # -- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Join now.

        :raises ConfigError: it can never work. :raises Unavailable: it does not work now; ``step`` would try again.
        """
        with self._stepping:
            self._join()

    def start(self) -> None:
        """Keep the membership in a thread of its own."""
        self._thread = threads.thread(self._run, name=f"member-{self._base.worker}")
        self._thread.start()

    def stop(self) -> None:
        """Leave the group; the work must have ended before."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * _PAUSE_LONGEST)
        with self._stepping:
            self._end_client(leave=True)
            self.state = MembershipState.STOPPED

    def step(self) -> None:
        """One heartbeat, or one try to join; never raises."""
        with self._stepping:
            if self.state is MembershipState.STOPPED:
                return
            if self._client is None:
                self._try_join()
            else:
                self._renew(self._client)

    def _run(self) -> None:
        while not self._stop.is_set():
            # Woken by the backend too. A connection that comes and goes must not make this a busy loop.
            self._clock.wait(self._wake, self._timing.interval)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                with plugin_isolation.isolate_plugin_call():
                    self.step()
            except Exception:
                LOG.exception("The membership in %s is in doubt; the heartbeat goes on.", self._group)
                self._doubt("an internal error")

    def _renew(self, client: CoordinationBackend) -> None:
        began = self._clock.monotonic()
        try:
            with plugin_isolation.isolate_plugin_call(self._group):
                deadline = client.renew()
        except NotMember as error:
            self._lose(f"{error.message}")
            self._end_client(leave=False)
            self._try_join()
        except Exception as error:  # noqa: BLE001  (a mistake of a backend is no more than an answer that did not come)
            said = _said(error)
            self._doubt(said)
            if self._clock.monotonic() - self._answered_at >= self._timing.reset_after:
                self._lose(f"no answer for {self._timing.reset_after:g} seconds: {said}")
                self._end_client(leave=True)
        else:
            self._renewed(began, deadline)

    def _renewed(self, began: float, deadline: float) -> None:
        certain = deadline - (deadline - began) * DRIFT - self._timing.margin
        self._certain_until = max(certain, self._certain_until)
        self._answered_at = self._clock.monotonic()
        if self.state is not MembershipState.CONNECTED:
            LOG.info("Member of %s as %s.", self._group, (self.member_id or b"").decode())
        self._in_trouble = False
        self.state, self.problem = MembershipState.CONNECTED, ""

    def _doubt(self, problem: str) -> None:
        self.problem = problem
        over = self._clock.monotonic() >= self._certain_until
        state = MembershipState.LOST if over else MembershipState.SUSPENDED
        if self.state is not state:
            self._log_trouble(f"is {state.value}: {problem}")
            self.state = state

    def _lose(self, problem: str) -> None:
        self.problem, self.state = problem, MembershipState.LOST
        self._certain_until = float("-inf")
        self._log_trouble(f"is over: {problem}")

    def _log_trouble(self, what: str) -> None:
        """Warn once for each outage; what follows until the member is back is for debugging."""
        if self._in_trouble:
            LOG.debug("Membership in %s %s", self._group, what)
            return
        self._in_trouble = True
        LOG.warning(
            "Membership in %s %s. This member works on for as long as its session certainly stands. The next message comes when it "
            "is a member again.",
            self._group,
            what.rstrip("."),
        )

    # -- joining --------------------------------------------------------------------------------------------------

    def _try_join(self) -> None:
        if self._clock.monotonic() < self._next_join:
            return
        try:
            with plugin_isolation.isolate_plugin_call(self._group):
                self._join()
        except Exception as error:  # noqa: BLE001  (as above)
            said = _said(error)
            self._failures += 1
            pause = min(_PAUSE_LONGEST, self._timing.interval * 2 ** min(self._failures, 10))
            self._next_join = self._clock.monotonic() + pause
            self._log_trouble(f"cannot begin: {said}")
            self.problem = said

    def _join(self) -> None:
        """Enter the group under an id that was never used."""
        client = self._factory(self._wake.set)
        self._stays += 1
        parts = self._base
        member_id = bytes(MemberId(parts.service, parts.epoch, parts.worker, self._stays, parts.weight))
        try:
            client.start()
            began = self._clock.monotonic()
            deadline = client.join(self._group, member_id)
        except BaseException:
            client.close()
            raise
        self._client, self.member_id = client, member_id
        self._failures, self._next_join = 0, float("-inf")
        self._certain_until = float("-inf")
        self._renewed(began, deadline)

    def _end_client(self, *, leave: bool) -> None:
        client, self._client = self._client, None
        self.member_id = None
        self._certain_until = float("-inf")
        if client is None:
            return
        try:
            with plugin_isolation.isolate_plugin_call(self._group):
                if leave:
                    client.leave()
        except Exception as error:  # noqa: BLE001  (as above)
            LOG.debug("%s was not left in good order (%s); the session ends by itself.", self._group, _said(error))
        try:
            with plugin_isolation.isolate_plugin_call(self._group):
                client.close()
        except Exception:
            LOG.exception("The client of %s could not be closed.", self._group)


def _said(error: Exception) -> str:
    return error.message if isinstance(error, errors.MoorageError) else plugin_isolation.format_exception(error)
