# SPDX-License-Identifier: Apache-2.0
"""The lease, model-checked: every interleaving of the statements, made from the declarations that production runs.

A resource has a worker row for a build, from the start. An *owner* (service A, epoch 1, of which a write has said that it is
over, though it goes on) starts it, or begins it with the token that a message said; two *cleaners* take it over: service B what A
left, and the next incarnation of A its own. The message may come to that incarnation too.
Each writes the resource while it works, and finishes, or gives it back. A *forcer* makes another operation of it, a deletion,
takes that and finishes it; once it has ended, somebody may make the resource anew under the same uuid. A *purger* removes the
counter when no row is there, at any moment, and raises the floor. All of them may be killed (which is more than the two kills
that are asked for, and fewer states), and a lease may expire at any moment; a process that pauses and goes on later is one that
is not chosen for a while. A transaction's writes lock their rows until it ends, others wait; a killed one is rolled back. (One
that is killed between transactions is one that is not chosen any more: all that follows without it is explored anyway.)
"""

from __future__ import annotations

import time
import unittest
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moorage.work import lease

NOW, LEASE = 10, 5
LIVE = NOW + LEASE
BUSY, FINAL = "busy", "final"


class Row(NamedTuple):
    """A worker row. ``unit`` is the piece of work that it stands for (known to the model alone)."""

    token: int
    owner: str | None
    epoch: int
    expires_at: int
    operation: str
    unit: int
    attempts: int = 0


class Resource(NamedTuple):
    status: str
    fence: int


class Store(NamedTuple):
    """What is committed. ``counter`` is None when it was purged; a new one starts above ``floor``."""

    counter: int | None
    row: Row | None
    resource: Resource | None
    floor: int = 0


#: Tables of the store, and what an open transaction says of those that it has not written.
COUNTER, ROW, RESOURCE, FLOOR = range(4)
KEPT = "kept"
NOTHING: tuple[Any, Any, Any, Any] = (KEPT, KEPT, KEPT, KEPT)


class Process(NamedTuple):
    """``writes`` are those of its open transaction, by table; a table that it has written is locked."""

    at: str
    token: int = 0
    unit: int = 0
    operation: str = ""
    found: bool = True
    writes: tuple[Any, Any, Any, Any] = NOTHING


class State(NamedTuple):
    store: Store
    processes: tuple[Process, ...]
    finished: frozenset[int]


class Violation(Exception):
    pass


@dataclass(frozen=True)
class Rules:
    """What is checked: the protocol, or a mutation of it.

    :param without: a statement and its guard that is left out.
    :param adopts: a transfer writes the new token into the resource.
    :param writes_early: the work writes its resource before it finishes.
    :param counter: tokens come from the counter that survives the row; otherwise from the row.
    :param one_transaction: the row's end and the last write are one transaction.
    :param floor: a purge raises the floor.
    :param floor_last: a new counter reads the floor after it was inserted, and not before.
    :param purges_seen: a purge removes the counter only with the value that it had when no row was there.
    """

    without: tuple[lease.Statement, lease.LeaseGuard] | None = None
    adopts: bool = True
    writes_early: bool = True
    counter: bool = True
    one_transaction: bool = True
    floor: bool = True
    floor_last: bool = True
    purges_seen: bool = True

    def applies(self, statement: lease.Statement, row: Any, parameters: dict[str, Any]) -> bool:
        left_out = self.without[1].name if self.without is not None and self.without[0] is statement else None
        return row is not None and statement.applies(row._asdict(), parameters, left_out)


#: Service and epoch of each process; the forcer works as a service of its own.
WHO = (("a", 1), ("b", 1), ("a", 2), ("c", 1))
#: How each becomes the owner, and what all know of the dead.
HOW = (lease.START, lease.TAKE_OVER, lease.TAKE, lease.TAKE)
DEAD = {"dead": "a", "dead_epoch": 2}
FORCER = 3
#: Who may get the message of the first operation, and the token that it says: the message may be doubled, or late.
TOLD, TOLD_TOKEN = (0, 2), 1
#: Nothing is left of one that has ended, or was killed.
ENDED = Process("end")
#: The units of work: the first, the forced one, the one of the resource made anew.
FIRST, FORCED, ANEW = 1, 2, 3


def view(store: Store, process: Process, table: int) -> Any:
    """A table as the process's statement sees it: its own writes, else what is committed."""
    written = process.writes[table]
    return store[table] if written is KEPT else written


def wrote(process: Process, table: int, value: Any) -> Process:
    writes = (*process.writes[:table], value, *process.writes[table + 1 :])
    return Process(*process[:5], writes)


def _works_under(process: Process, token: int) -> bool:
    return process.token == token and process.at in ("work", "finish", "last")


def _shown(process: Process) -> int:
    """All that a step of another process looks at."""
    locked = sum(1 << table for table, written in enumerate(process.writes) if written is not KEPT)
    return locked | _works_under(process, process.token) << len(NOTHING) + process.token


class Model:
    """Explores all states.

    What a process does next follows from the store, from what is finished, from the process, and from what the others lock (or,
    for :meth:`_begin`, work under). The same of these four comes back in hundreds of states, so each is worked out once. A state
    is a tuple of numbers meanwhile: one for each different store, set and process.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.states = 0
        self.finishes = 0
        self._numbers: dict[Any, int] = {}
        self._things: list[Any] = []
        #: Of each thing that is a process: the tables that it locks, and the token under which it works, as bits.
        self._shown: list[int] = []
        self._known: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        # Looked for by identity.
        self._number_of(ENDED)

    def explore(self) -> Violation | None:
        """Every state that can be reached; the first violation, or None."""
        store = Store(1, Row(1, None, 0, 0, "build", FIRST), Resource(BUSY, 1))
        at = ["raise", "raise", "raise", "force raise", "look"]
        start = self._coded(State(store, tuple(Process(each) for each in at), frozenset()))
        seen = {start}
        waiting = deque([start])
        try:
            while waiting:
                for following in self._following(waiting.popleft()):
                    if following not in seen:
                        seen.add(following)
                        waiting.append(following)
        except Violation as violation:
            return violation
        finally:
            self.states = len(seen)
        return None

    def _number_of(self, thing: Any) -> int:
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
            self._shown.append(_shown(thing) if isinstance(thing, Process) else 0)
        return number

    def _coded(self, state: State) -> tuple[int, ...]:
        return tuple(map(self._number_of, (state.store, state.finished, *state.processes)))

    # -- one step of anybody --------------------------------------------------------------------------------------

    def _following(self, coded: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        store, finished, *processes = coded
        row = self._things[store].row
        if row is not None and row.expires_at == LIVE:
            expired = self._things[store]._replace(row=row._replace(expires_at=0))
            yield (self._number_of(expired), *coded[1:])
        for place, process in enumerate(coded[2:], 2):
            others = 0
            for other in (*coded[2:place], *coded[place + 1 :]):
                others |= self._shown[other]
            key = (store, finished, place, process, others)
            steps = self._known.get(key)
            if steps is None:
                state = State(
                    self._things[store], tuple(self._things[each] for each in processes), self._things[finished]
                )
                steps = self._known[key] = [
                    (self._number_of(to.store), self._number_of(to.finished), self._number_of(to.processes[place - 2]))
                    for to in self._steps(state, place - 2)
                ]
            for new_store, new_finished, new in steps:
                yield (new_store, new_finished, *coded[2:place], new, *coded[place + 1 :])

    def _steps(self, state: State, number: int) -> Iterator[State]:
        process = state.processes[number]
        if process is ENDED:
            return
        if process.writes != NOTHING:
            yield self._with(state, number, ENDED)
        name, _, rest = process.at.partition(" ")
        yield from getattr(self, f"_{name}")(state, number, process, rest)

    def _with(self, state: State, number: int, process: Process) -> State:
        if process.at == "end":
            # What it knew does not matter any more.
            forced = number == FORCER and state.processes[number].unit != ANEW
            process = Process("anew raise", unit=ANEW) if forced else ENDED
        processes = state.processes
        changed = (*processes[:number], process, *processes[number + 1 :])
        return State(state.store, changed, state.finished)

    def _locked(self, state: State, number: int, table: int) -> bool:
        holder = next((other for other, each in enumerate(state.processes) if each.writes[table] is not KEPT), number)
        return holder != number

    def _rollback(self, state: State, number: int, process: Process, at: str) -> State:
        return self._with(state, number, Process(at, *process[1:5]))

    def _commit(self, state: State, number: int, process: Process, at: str, finishes: bool = False) -> State:
        """All writes at once, and what must hold of what is committed."""
        store = Store(*(view(state.store, process, table) for table in (COUNTER, ROW, RESOURCE, FLOOR)))
        finished = state.finished
        if finishes:
            if process.unit in finished:
                raise Violation("a unit of work was finished twice")
            finished |= {process.unit}
            self.finishes += 1
        if store.resource is not None and store.resource.status == BUSY and store.row is None:
            raise Violation("a resource is in transition and no row says so: it is stuck")
        if store.row is not None and store.counter is None:
            raise Violation("a row has no counter: nobody can take it")
        following = self._with(state, number, Process(at, *process[1:5]))
        return State(store, following.processes, finished)

    def _effect(self, state: State, process: Process) -> None:
        """An effect of the process on the resource is accepted."""
        row, resource = view(state.store, process._replace(writes=NOTHING), ROW), state.store.resource
        if resource is not None and process.token < resource.fence:
            raise Violation("the tokens of accepted effects fell")
        if row is None or row.token != process.token:
            raise Violation("an effect of somebody who is not the owner was accepted")

    def _applied(self, statement: lease.Statement, resource: Any, parameters: dict[str, Any]) -> Resource | None:
        changed = statement.apply(resource._asdict(), parameters)
        return None if changed is None else Resource(**changed)

    # -- taking: one transaction ----------------------------------------------------------------------------------

    def _raise(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        yield from self._raise_for(state, number, process, "take")
        if number in TOLD:
            yield from self._begin(state, number, TOLD_TOKEN)
        elif process.token:
            yield from self._begin(state, number, process.token)

    def _begin(self, state: State, number: int, token: int) -> Iterator[State]:
        """Take a new operation with the token of its creation: one statement.

        Its transaction may end other operations; the statement raises no counter, and nothing follows it.
        """
        if self._locked(state, number, ROW):
            return
        service, epoch = WHO[number]
        row = state.store.row
        parameters = {"now": NOW, "lease": LEASE, "token": token, "owner": service, "epoch": epoch, "attempts": 1}
        if not self.rules.applies(lease.BEGIN, row, parameters):
            return
        assert row is not None
        if row.token != token:
            raise Violation("a message began another operation than its own")
        if any(_works_under(each, token) for each in state.processes):
            raise Violation("two owners have one token")
        begun = Row(**lease.BEGIN.apply(row._asdict(), parameters) or {})
        process = Process("work", token=token, unit=row.unit, operation=row.operation)
        yield self._commit(state, number, wrote(process, ROW, begun), "work")

    def _take(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if self._locked(state, number, ROW):
            return
        service, epoch = WHO[number]
        row = view(state.store, process, ROW)
        token = process.token if self.rules.counter or row is None else row.token + 1
        parameters = {"now": NOW, "lease": LEASE, "token": token, "owner": service, "epoch": epoch, **DEAD}
        how = HOW[number]
        if not self.rules.applies(how, row, parameters):
            # Rolled back. It may try again (a sweep), or never.
            yield self._with(state, number, Process("raise"))
            return
        over = (row.owner == service and row.epoch < epoch) or (row.owner, row.epoch) == WHO[0]
        gone = row.owner is None or over or row.expires_at < NOW
        if not gone:
            raise Violation("a live lease was stolen")
        taken = Row(**how.apply(row._asdict(), parameters) or {})._replace(attempts=1)
        # What is to be done is read after the row was changed, in the same transaction.
        process = process._replace(token=token, unit=row.unit, operation=row.operation)
        yield self._with(state, number, wrote(process._replace(at="adopt"), ROW, taken))

    def _adopt(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if not self.rules.adopts:
            yield self._commit(state, number, process, "work")
            return
        if self._locked(state, number, RESOURCE):
            return
        resource = view(state.store, process, RESOURCE)
        if resource is None:
            yield self._commit(state, number, process, "work")
        elif self.rules.applies(lease.WRITE, resource, {"token": process.token}):
            adopted = resource._replace(fence=process.token)
            yield self._commit(state, number, wrote(process, RESOURCE, adopted), "work")
        else:
            yield self._rollback(state, number, process, "end")

    # -- working: single statements -------------------------------------------------------------------------------

    def _work(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        """Write early, renew, give back, or look whether the resource is there and then finish; in any order."""
        resource, row = state.store.resource, state.store.row
        yield self._with(state, number, process._replace(at="finish", found=resource is not None))
        mine = {"token": process.token, "now": NOW, "lease": LEASE}
        if self.rules.writes_early and not self._locked(state, number, RESOURCE):
            statement = lease.WRITE if process.operation == "build" else lease.REMOVE
            if self.rules.applies(statement, resource, mine):
                self._effect(state, process)
                changed = self._applied(statement, resource, mine)
                yield self._commit(state, number, wrote(process, RESOURCE, changed), "work")
            elif resource is not None:
                yield self._rollback(state, number, process, "end")
        if self._locked(state, number, ROW):
            return
        # Who has given it back may go on all the same: a handler that was given up, and comes back.
        for statement, at in ((lease.RENEW, "work"), (lease.RELEASE, "work")):
            if not self.rules.applies(statement, row, mine):
                yield self._rollback(state, number, process, "end")
                continue
            assert row is not None
            if row.token != process.token:
                raise Violation(f"a lease was changed ({statement.name}) by somebody who is not its owner")
            changed_row = Row(**statement.apply(row._asdict(), mine) or {})
            yield self._commit(state, number, wrote(process, ROW, changed_row), at)

    # -- finishing: one transaction -------------------------------------------------------------------------------

    def _finish(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if self._locked(state, number, ROW):
            return
        row = view(state.store, process, ROW)
        if not self.rules.applies(lease.FINISH, row, {"token": process.token}):
            yield self._rollback(state, number, process, "end")
            return
        ending = wrote(process, ROW, None)
        if not process.found:
            # There was no resource to write: only the row ends.
            yield self._commit(state, number, ending, "end", finishes=True)
        elif self.rules.one_transaction:
            yield self._with(state, number, ending._replace(at="last"))
        else:
            yield self._commit(state, number, ending, "last")

    def _last(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if self._locked(state, number, RESOURCE):
            return
        resource = view(state.store, process, RESOURCE)
        statement = lease.WRITE if process.operation == "build" else lease.REMOVE
        if not self.rules.applies(statement, resource, {"token": process.token}):
            yield self._rollback(state, number, process, "end")
            return
        self._effect(state, process)
        applied = self._applied(statement, resource, {"token": process.token})
        written = None if applied is None else applied._replace(status=FINAL)
        yield self._commit(state, number, wrote(process, RESOURCE, written), "end", finishes=True)

    # -- a new operation: one transaction -------------------------------------------------------------------------

    def _force(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        """Whatever is being done, delete it."""
        if rest == "raise":
            yield from self._raise_for(state, number, process, "force row")
        elif rest == "row" and not self._locked(state, number, ROW):
            row = view(state.store, process, ROW)
            token = process.token if self.rules.counter else (row.token if row else 0) + 1
            forced = Row(token, None, 0, 0, "delete", FORCED)
            if row is not None:
                left = lease.FORCE.apply(row._asdict(), {"token": token, "now": NOW})
                forced = Row(**left or {})._replace(operation="delete", unit=FORCED, attempts=0)
            yield self._with(state, number, wrote(process._replace(at="force resource", token=token), ROW, forced))
        elif rest == "resource" and not self._locked(state, number, RESOURCE):
            resource = view(state.store, process, RESOURCE)
            if self.rules.applies(lease.WRITE, resource, {"token": process.token}):
                yield self._commit(state, number, wrote(process, RESOURCE, Resource(BUSY, process.token)), "raise")
            else:
                yield self._rollback(state, number, process, "end")

    def _anew(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        """Once the resource is gone, and no operation on it is in progress: make it again."""
        if rest == "raise":
            if state.store.resource is None:
                yield from self._raise_for(state, number, process, "anew row")
        elif rest == "row" and not self._locked(state, number, ROW):
            token = process.token if self.rules.counter else 1
            if view(state.store, process, ROW) is None:
                made = wrote(
                    process._replace(at="anew resource", token=token), ROW, Row(token, None, 0, 0, "build", ANEW)
                )
                yield self._with(state, number, made)
            else:
                yield self._rollback(state, number, process, "end")
        elif rest == "resource" and not self._locked(state, number, RESOURCE):
            yield self._commit(state, number, wrote(process, RESOURCE, Resource(BUSY, process.token)), "end")

    def _raise_for(self, state: State, number: int, process: Process, at: str) -> Iterator[State]:
        """Raise the counter. Who requests an operation inserts a new one; who takes a row only updates."""
        inserts = at != "take"
        if inserts and not self.rules.floor_last:
            yield self._with(state, number, process._replace(at=f"insert {at}", token=state.store.floor))
            return
        if self._locked(state, number, COUNTER):
            return
        if state.store.counter is not None:
            token = state.store.counter + 1
            yield self._with(state, number, wrote(process._replace(at=at, token=token), COUNTER, token))
        elif inserts:
            yield self._with(state, number, wrote(process._replace(at=f"above {at}"), COUNTER, 1))

    def _above(self, state: State, number: int, process: Process, at: str) -> Iterator[State]:
        """The counter was inserted, so that no purge of it is going on: read what floor is committed."""
        token = state.store.floor + 1
        yield self._with(state, number, wrote(process._replace(at=at, token=token), COUNTER, token))

    def _insert(self, state: State, number: int, process: Process, at: str) -> Iterator[State]:
        """The mutation: the floor was read before."""
        if not self._locked(state, number, COUNTER):
            counter = state.store.counter
            token = process.token + 1 if counter is None else counter + 1
            yield self._with(state, number, wrote(process._replace(at=at, token=token), COUNTER, token))

    # -- a purge: a look, and one transaction ---------------------------------------------------------------------

    def _look(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if state.store.row is None and state.store.counter is not None:
            yield self._with(state, number, process._replace(at="purge", token=state.store.counter))

    def _purge(self, state: State, number: int, process: Process, rest: str) -> Iterator[State]:
        if self._locked(state, number, COUNTER):
            return
        if self.rules.purges_seen and state.store.counter != process.token:
            yield self._rollback(state, number, process, "end")
            return
        floor = max(state.store.floor, process.token) if self.rules.floor else state.store.floor
        yield self._commit(state, number, wrote(wrote(process, FLOOR, floor), COUNTER, None), "end")


class LeaseModelTests(unittest.TestCase):
    def test_every_interleaving_keeps_the_promises(self) -> None:
        began = time.monotonic()
        model = Model(Rules())
        violation = model.explore()
        print(f"lease model: {model.states} states, {time.monotonic() - began:.1f} s")  # noqa: T201
        self.assertIsNone(violation)
        self.assertGreater(model.states, 10_000)
        self.assertGreater(model.finishes, 100)

    def test_work_that_writes_only_when_it_finishes_needs_no_adoption(self) -> None:
        self.assertIsNone(Model(Rules(adopts=False, writes_early=False)).explore())

    def test_each_guard_is_needed(self) -> None:
        self.assertTrue(lease.GUARDED)
        for statement, guard in lease.GUARDED:
            with self.subTest(statement=statement.name, guard=guard.name):
                self.assertIsInstance(Model(Rules(without=(statement, guard))).explore(), Violation)

    def test_each_part_of_the_protocol_is_needed(self) -> None:
        for rules in (Rules(adopts=False), Rules(counter=False), Rules(one_transaction=False)):
            with self.subTest(rules=rules):
                self.assertIsInstance(Model(rules).explore(), Violation)

    def test_each_part_of_the_purge_is_needed(self) -> None:
        for rules, said in (
            (Rules(floor=False), "tokens of accepted effects fell|not the owner|two owners have one token"),
            (Rules(floor_last=False), "tokens of accepted effects fell|not the owner|two owners have one token"),
            (Rules(purges_seen=False), "has no counter"),
        ):
            with self.subTest(rules=rules):
                self.assertRegex(str(Model(rules).explore()), said)


if __name__ == "__main__":
    unittest.main()
