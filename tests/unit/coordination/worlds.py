# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until it is told to go, and members in memory on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from typing_extensions import override

from moorage import errors, threads
from moorage.coordination.interface import BackendTools
from moorage.coordination.membership import MemberId, Membership, Timing
from moorage.coordination.ring_ledger import Ledger, RingRow
from moorage.coordination.ring_manager import RingManager, RingSettings
from moorage.coordination.tick_leases import (
    CLAIM,
    END,
    TickLease,
    TickLeaseStore,
)
from moorage_plugins.coordination.memory import MemoryBackend, MemoryServer

__all__ = ["GROUP", "FakeClock", "Member", "MemoryClaims", "MemoryLedger", "World"]

GROUP = "group"
T = TypeVar("T")


class FakeClock:
    """Seconds that pass when ``advance`` says so; ``rate`` makes a machine's clock run fast or slow."""

    def __init__(self, source: FakeClock | None = None, rate: float = 1.0, offset: float = 0.0) -> None:
        self._source = source
        self._rate = rate
        self.now = offset

    def monotonic(self) -> float:
        return self.now if self._source is None else self.now + self._source.now * self._rate

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        raise AssertionError("nothing waits here")

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class MemoryLedger(Ledger):
    """The ring's row and the adoptions, in memory; each call is one transaction."""

    def __init__(self) -> None:
        self.row: RingRow | None = None
        self.adoptions: dict[bytes, int] = {}
        self.history: dict[int, tuple[bytes, ...]] = {}

    @override
    def read(self, group: str) -> tuple[RingRow | None, Mapping[bytes, int]]:
        return self.row, dict(self.adoptions)

    @override
    def propose(self, group: str, seen: RingRow | None, proposed: RingRow) -> bool:
        if (self.row is None) != (seen is None) or (self.row and seen and self.row.token != seen.token):
            return False
        token = 1 if self.row is None else self.row.token + 1
        self.row = RingRow(token, tuple(sorted(proposed.members)), proposed.replicas, proposed.hash_function)
        self.history[token] = self.row.members
        return True

    @override
    def adopt(self, group: str, member: bytes, token: int) -> None:
        self.adoptions[member] = max(token, self.adoptions.get(member, 0))

    @override
    def forget(self, group: str, members: Collection[bytes]) -> None:
        for member in members:
            self.adoptions.pop(member, None)


class _Transaction:
    """Keeps what is to be done at the commit."""

    def __init__(self) -> None:
        self.effects: list[Callable[[], None]] = []

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for effect in self.effects:
                effect()


class MemoryClaims(TickLeaseStore):
    """The rows of claims in memory, changed by the very statements of production.

    :param moment: the store's clock, in microseconds. :param without: names of guards that are left out, for mutants.
    """

    def __init__(self, moment: Callable[[], int], without: Collection[str] = ()) -> None:
        self._moment = moment
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self._without = without

    @override
    def claim(self, claim: TickLease, object_ids: Sequence[str]) -> list[str]:
        return [each for each in object_ids if self.claim_one(claim, each)]

    def claim_one(self, claim: TickLease, object_id: str) -> bool:
        """One row of the statement; whether it was changed."""
        key = claim.task, object_id
        new = {
            "tick": claim.tick, "token": claim.token, "owner": claim.owner, "sweep": claim.sweep, "unfinished": False,
            "now": self._moment(), "ahead": claim.ahead,
        }  # fmt: skip
        row = self.rows.get(key)
        if row is None:
            # Of the guards one says nothing of the row.
            begun = CLAIM.guards[-1]
            if begun.name not in self._without and not begun.holds({}, new):
                return False
            self.rows[key] = {**{name: new[name] for name in ("tick", "token", "owner", "sweep")}, "finished": False}
            return True
        guards = [guard for guard in CLAIM.guards if guard.name not in self._without]
        if not all(guard.holds(row, new) for guard in guards):
            return False
        self.rows[key] = {**row, **{column: new[str(name)] for column, name in CLAIM.effects.items()}}
        return True

    @override
    def end(self, transaction: Any, claim: TickLease, object_id: str) -> None:
        key = claim.task, object_id
        parameters = {"sweep": claim.sweep, "unfinished": False, "done": True}
        row = self.rows.get(key)
        guards = [guard for guard in END.guards if guard.name not in self._without]
        if row is None or not all(guard.holds(row, parameters) for guard in guards):
            raise errors.Fenced(f"{object_id} was claimed by another member.")
        transaction.effects.append(lambda: row.update(finished=True))

    @override
    def write(self) -> Any:
        return _Transaction()

    @override
    def run(self, work: Callable[[Any], T]) -> T:
        with self.write() as tx:
            return work(tx)

    @override
    def prune(self, task: str, before: int) -> int:
        old = [key for key, row in self.rows.items() if key[0] == task and row["tick"] < before]
        for key in old:
            del self.rows[key]
        return len(old)


class Member:
    """One member: production's membership and keeper over a server in memory, with faults.

    :ivar cut: calls that fail: ``renew``, ``members``, ... before the server is reached; ``renewed``, ``joined``: after it.
    """

    def __init__(
        self,
        world: World,
        number: int,
        settings: RingSettings,
        *,
        rate: float = 1.0,
        epoch: int = 1,
        weight: float = 1.0,
        timing: Timing | None = None,
    ) -> None:
        self.clock = FakeClock(world.clock, rate, offset=1000.0 * number)
        self.cut: set[str] = set()
        self.clients = 0
        self._world = world

        def factory(changed: Callable[[], None]) -> MemoryBackend:
            self.clients += 1
            tools = BackendTools(
                conf=None, url="", clock=self.clock, session_timeout=world.session, connect_timeout=1, call_timeout=1
            )
            return self.make_client(tools)

        timing = timing or Timing(interval=1.0, margin=1.0, reset_after=world.session)
        base = MemberId(f"service-{number}", epoch, 0, weight=weight)
        self.membership = Membership(factory, GROUP, base, self.clock, timing)
        self.keeper = RingManager(self.membership, world.ledger, GROUP, self.clock, settings)

    def make_client(self, tools: BackendTools) -> MemoryBackend:
        return MemoryBackend(tools, self._world.server, self._fault_now)

    def _fault_now(self, call: str) -> None:
        """Through the attribute, which a simulator replaces."""
        self._fault(call)

    def _fault(self, call: str) -> None:
        if call in self.cut or "all" in self.cut:
            raise errors.Unavailable(f"the fault {call}")

    def look(self) -> None:
        """The keeper's step, with what its thread does about errors."""
        try:
            self.keeper.step()
        except errors.Unavailable:
            return

    def beat(self) -> None:
        self.membership.step()


class World:
    """A server, a ledger, claims and a clock."""

    def __init__(self, session: float = 10.0) -> None:
        self.clock = FakeClock()
        self.session = session
        self.server = MemoryServer(self.clock.monotonic)
        self.ledger = MemoryLedger()
        #: Seconds that the store's clock is ahead of the true one.
        self.stepped = 1e6
        self.claims = MemoryClaims(self.moment)

    def moment(self) -> int:
        """The store's time in microseconds."""
        return int((self.clock.now + self.stepped) * 1_000_000)

    def pass_time(self, seconds: float, members: Collection[Member] = (), step: float = 0.5) -> None:
        """Let time pass; the members beat and look at every step."""
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.clock.advance(min(step, end - self.clock.now))
            for member in members:
                member.beat()
                member.look()
