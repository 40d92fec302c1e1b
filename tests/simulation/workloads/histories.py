# SPDX-License-Identifier: Apache-2.0
"""Short histories of one consumer, and of one instance, by clients with unknown outcomes: they must be linearizable.

What an operation may answer in which state is said here and nowhere else, so that an answer that no order of the operations
explains breaks the law, from any process: a stale read, an effect that came twice, a refusal before its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationChange, ClaimRequest, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane.factories import load_store, open_instances
from moorage.db import Database
from tests.simulation.kernel import Process
from tests.simulation.linearizability import History, Operation, UndecidedError, is_linearizable
from tests.simulation.workloads.base import Workload, open_deleter
from tests.simulation.workloads.placement import Placement

__all__ = ["ConsumerHistories", "InstanceHistories"]

PROVIDER, CONSUMER = "10000000-0000-4000-8000-000000000000", "c0000000-0000-4000-8000-000000000000"
INSTANCE = "20000000-0000-4000-8000-000000000000"
CONFLICT = "conflict"
#: Operations of each client at most. Histories of four clients are decided with about a hundred configurations.
MOST = 7

#: What there is of a consumer: its generation, its units, the request that created or changed it last. None: no row.
Consumer = tuple[int, int, str | None] | None


def decided(workload: Workload, history: History, first: Any, step: Callable[[Any, Operation], Iterable[Any]]) -> None:
    """Require that a history is linearizable, and that this can be decided."""
    try:
        holds = is_linearizable(history.operations, first, step)
    except UndecidedError as error:
        workload.kernel.violated(f"the history is too long to be decided: {error}")
    else:
        workload.require(holds, f"no order of the operations explains their answers: {history}")


def of_consumer(state: Consumer, operation: Operation) -> Iterable[Consumer]:
    """What an operation on a consumer leaves."""
    kind, *rest = operation.what
    unknown, outcome = operation.answered is None, operation.outcome
    then: Consumer
    answer: Any
    if kind == "show":
        answer, then = (None if state is None else state[:2]), state
    elif kind == "release":
        # It says whether there was one.
        answer, then = state is not None, None
    elif kind == "claim":
        units, request = rest
        then = (1, units, request) if state is None else state
        # A request that was done before is answered with the claim.
        answer = then[:2] if state is None or state[2] == request else CONFLICT
    else:
        generation, units = rest
        fits = state is not None and state[0] == generation
        then = (generation + 1, units, None) if fits else state
        answer = (generation + 1, units) if fits else CONFLICT
    return (then,) if unknown or answer == outcome else ()


class ConsumerHistories(Workload):
    """Four writers, which may be killed, and one consumer."""

    points: ClassVar[int] = 40
    steps: ClassVar[int] = 250
    seconds: ClassVar[float] = 5.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        store = load_store(conf, database, SystemClock())
        store.ensure_providers([ResourceProvider(PROVIDER, "p", inventories=(InventoryItem("VCPU", 1000),))])

    @override
    def begin(self) -> None:
        self.history = History()

    @override
    def begin_clients(self) -> None:
        for number in range(1, 5):
            self.client(f"writer-{number}", self._writer, victim=True)

    def _writer(self, process: Process) -> None:
        platform = self.world.platform(process, "writer", beats=False)
        store: Any = load_store(self.world.conf, platform.database, platform.clock)
        generation, request = 1, ""
        for number in range(self.random.randint(3, MOST)):
            what = self.random.choice(("claim", "claim", "replace", "replace", "release", "show", "show"))
            units = self.random.randint(1, 9)
            if what == "claim":
                if not request or self.random.random() < 0.5:
                    request = f"{process.name}/{number}/{units}"
                units = int(request.rpartition("/")[2])
                claim = ClaimRequest(CONSUMER, {PROVIDER: {"VCPU": units}}, request_id=request)
                self._do(process, (what, units, request), lambda of=claim: seen(store.claim(of)))  # type: ignore[misc]
            elif what == "replace":
                change = AllocationChange(CONSUMER, {PROVIDER: {"VCPU": units}}, generation)
                self._do(process, (what, generation, units), lambda of=change: seen(store.replace([of])[0]))  # type: ignore[misc]
            elif what == "release":
                self._do(process, (what,), lambda: store.release(CONSUMER))
            else:
                found = self._do(process, (what,), lambda: shown(store.consumer(CONSUMER)))
                generation = found[0] if found else generation
            platform.clock.sleep(self.random.choice((0.0, 0.0, 0.1)))

    def _do(self, process: Process, what: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        operation = self.history.call(process.name, *what)
        try:
            outcome = call()
        except errors.Unavailable as error:
            if error.details.get("outcome") == "unknown" or what[0] == "show":
                return None
            # Nothing was done: it is no part of the history.
            self.history.operations.remove(operation)
            return None
        except errors.Conflict:
            outcome = CONFLICT
        self.history.answer(operation, outcome)
        return outcome

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        decided(self, self.history, None, of_consumer)


def seen(outcome: Any) -> tuple[int, int]:
    """Generation and units, as a claim answers them."""
    return outcome.consumer_generation, sum(each.used for each in outcome.allocations)


def shown(found: Any) -> tuple[int, int] | None:
    """Generation and units, as a reader sees them."""
    return None if found is None else (found.consumer.generation, sum(each.used for each in found.allocations))


def of_instance(state: str, operation: Operation) -> Iterable[str]:
    """What an operation on an instance leaves: it is "new", "there", "leaving" or "gone".

    What is leaving may be gone at any time.
    """
    (kind,), outcome = operation.what, operation.outcome
    for now in ("leaving", "gone") if state == "leaving" else (state,):
        there = now in ("there", "leaving")
        if kind == "create":
            answer, then = ("done", "there" if now == "new" else now) if now != "gone" else (CONFLICT, now)
        elif kind == "delete":
            answer, then = ("done", "leaving") if there else ("missing", now)
        else:
            answer, then = ("done" if there else "missing"), now
        if operation.answered is None or answer == outcome:
            yield then


class InstanceHistories(Placement):
    """As :class:`Placement`, with three clients that create, delete and look at one instance."""

    @override
    def begin(self) -> None:
        self.history = History()
        super().begin()

    @override
    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        instances = open_instances(platform, conf)
        deleter = open_deleter(platform, conf)
        flavor = {"flavorid": "f1", "resources": {"VCPU": 1}, "extra_specs": {"sim:delay_ms": "100"}}
        args = {"request": {"uuid": INSTANCE, "flavor": flavor}, "request_id": "create"}
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: platform.sender.call("scheduler", "create_instance", args),
            "delete": lambda: deleter.delete(INSTANCE, force=True),
            "show": lambda: instances.get(INSTANCE),
        }
        for _ in range(self.random.randint(3, MOST)):
            what = self.random.choice(("create", "create", "delete", "show", "show"))
            operation = self.history.call(process.name, what)
            try:
                calls[what]()
            except errors.NotFound:
                self.history.answer(operation, "missing")
            except errors.Conflict as error:
                if what == "create" and type(error) is errors.Conflict:
                    self.history.answer(operation, CONFLICT)
                self.kernel.note("refused", error.message)
            except errors.MoorageError as error:
                self.kernel.note("unknown", error.message)
            else:
                self.history.answer(operation, "done")
            platform.clock.sleep(self.random.choice((0.0, 0.2, self.random.uniform(0, 4))))

    @override
    def check(self) -> None:
        super().check()
        decided(self, self.history, "new", of_instance)
