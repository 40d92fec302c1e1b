# SPDX-License-Identifier: Apache-2.0
"""Drive a running control plane with a recorded workload and say what came of it.

What is over-allocated is computed from the allocations that are stored, read back through the API at the end, against the
capacities of the providers: no counter is believed.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, field
from typing import Any

from moorage import errors, randomness, threads
from moorage.client.client import Client
from moorage.client.workload import WorkloadRequest
from moorage.clock import Clock

__all__ = ["ReplayReport", "over_allocation", "replay"]

#: Seconds for which a request without an answer is asked again, with the same uuid; and for which builds and deletions may go on
#: after the last one.
_PATIENCE = 120.0
#: Seconds between looks at builds and deletions that go on.
_LOOK = 0.25


@dataclass(slots=True)
class ReplayReport:
    """What came of a replay. Times are of the create requests as a client sees them.

    :ivar failed: requests that were answered with an error, and deletions that were not done.
    :ivar broken: instances that were placed and could not be built; nothing is stored for them, as it should be.
    :ivar unsettled: builds and deletions that were not over within two minutes of the last request.
    :ivar lost: instances that were acknowledged and not deleted, and for which nothing is stored.
    :ivar left_over: consumers with stored allocations whose instance was deleted, refused, or never acknowledged.
    """

    hosts: int = 0
    requests: int = 0
    placed: int = 0
    refused: int = 0
    released: int = 0
    failed: int = 0
    unanswered: int = 0
    repeated: int = 0
    over_allocated: int = 0
    stored_consumers: int = 0
    lost: int = 0
    left_over: int = 0
    broken: int = 0
    unsettled: int = 0
    seconds: float = 0.0
    claims_per_s: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    killed: str = ""
    refused_because: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    fill: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return asdict(self)

    @property
    def good(self) -> bool:
        """Whether everything was answered and everything that is stored is as it was answered."""
        wrong = (self.over_allocated, self.lost, self.left_over, self.unsettled, self.unanswered, self.failed)
        return not any(wrong)


class _Tally:
    """Results of the threads of a replay, under one lock."""

    def __init__(self) -> None:
        self.lock = threads.lock()
        self.report = ReplayReport()
        self.seconds: list[float] = []
        #: Acknowledged and not deleted; and all that was ever asked for.
        self.held: set[str] = set()
        self.asked: set[str] = set()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()


def replay(
    clients: Sequence[Client],
    requests: Sequence[WorkloadRequest],
    clock: Clock,
    *,
    release: bool,
    kill: Callable[[], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Send the requests in order of arrival, as fast as the clients (a thread each) are answered.

    :param release: delete an instance when its lifetime, in the record's time, is over; otherwise all stay (saturation).
    :param kill: called once, after half of the requests; ends something and says what.
    """
    tally = _Tally()
    began = clock.monotonic()
    local: list[Client] = list(clients)
    pool = futures.ThreadPoolExecutor(len(local), thread_name_prefix="replay")
    running: set[futures.Future[None]] = set()
    ends: list[tuple[float, str]] = []
    for number, request in enumerate(requests, start=1):
        if kill is not None and number == len(requests) // 2:
            tally.report.killed = kill()
        while len(running) >= len(local):
            done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
            _raise(done)
        if release:
            _release_due(ends, request.arrival, pool, running, local, tally, clock)
        instance = randomness.new_uuid()
        tally.asked.add(instance)
        client = local[number % len(local)]
        running.add(pool.submit(_place, client, request, instance, tally, clock))
        heapq.heappush(ends, (request.arrival + request.lifetime, instance))
        if progress is not None:
            progress(number, len(requests))
    _raise(futures.wait(running).done)
    if release:
        last: set[futures.Future[None]] = set()
        _release_due(ends, float("inf"), pool, last, local, tally, clock)
        _raise(futures.wait(last).done)
    pool.shutdown()
    report = tally.report
    report.seconds = round(clock.monotonic() - began, 3)
    report.requests = len(requests)
    _finish(report, tally)
    _settle(local[0], tally, clock)
    _audit(local[0], tally)
    return report


def _release_due(
    ends: list[tuple[float, str]],
    now: float,
    pool: futures.ThreadPoolExecutor,
    running: set[futures.Future[None]],
    clients: Sequence[Client],
    tally: _Tally,
    clock: Clock,
) -> None:
    due = []
    while ends and ends[0][0] <= now:
        due.append(heapq.heappop(ends)[1])
    if not due:
        return
    if running:
        _raise(futures.wait(running).done)
        running.clear()
    for number, instance in enumerate(due):
        running.add(pool.submit(_release, clients[number % len(clients)], instance, tally, clock))


def _place(client: Client, request: WorkloadRequest, instance: str, tally: _Tally, clock: Clock) -> None:
    body = {
        "uuid": instance,
        "name": request.name,
        "flavor": {"flavorid": request.flavorid, "resources": dict(request.resources)},
    }
    began = clock.monotonic()
    while True:
        try:
            client.create_instance(body)
        except errors.NoValidHost as error:
            reason = str(error.details.get("summary") or error.message)
            with tally.lock:
                tally.report.refused += 1
                tally.reasons[reason] += 1
                tally.seconds.append(clock.monotonic() - began)
            return
        except errors.Unavailable as error:
            # The outcome is not known or it was too busy: ask again for the same instance, which is recognised.
            with tally.lock:
                tally.report.repeated += 1
            if clock.monotonic() - began > _PATIENCE:
                with tally.lock:
                    tally.report.unanswered += 1
                    tally.failures[error.code] += 1
                return
            clock.sleep(min(error.retry_after, 2.0))
        except errors.MoorageError as error:
            with tally.lock:
                tally.report.failed += 1
                tally.failures[f"{error.code}: {error.message}"] += 1
            return
        else:
            with tally.lock:
                tally.report.placed += 1
                tally.held.add(instance)
                tally.seconds.append(clock.monotonic() - began)
            return


def _release(client: Client, instance: str, tally: _Tally, clock: Clock) -> None:
    with tally.lock:
        if instance not in tally.held:
            return
    began, asked = clock.monotonic(), False
    while True:
        try:
            client.delete_instance(instance)
        except errors.NotFound:
            if not asked:
                # It was acknowledged, and no client has requested its deletion: the audit will miss it.
                return
        except (errors.InUse, errors.Unavailable) as error:
            # It is still being built, or the outcome is not known; a user would ask again too.
            asked = asked or isinstance(error, errors.Unavailable)
            if clock.monotonic() - began < _PATIENCE:
                clock.sleep(0.05)
                continue
            _not_deleted(tally, error)
            return
        except errors.MoorageError as error:
            _not_deleted(tally, error)
            return
        with tally.lock:
            tally.report.released += 1
            tally.held.discard(instance)
        return


def _not_deleted(tally: _Tally, error: errors.MoorageError) -> None:
    with tally.lock:
        tally.report.failed += 1
        tally.failures[f"an instance could not be deleted ({error.code}: {error.message})"] += 1


def _raise(done: set[futures.Future[None]]) -> None:
    for future in done:
        future.result()


def _finish(report: ReplayReport, tally: _Tally) -> None:
    ordered = sorted(tally.seconds)
    if ordered:
        report.p50_ms = round(ordered[len(ordered) // 2] * 1000, 2)
        report.p99_ms = round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 2)
    report.claims_per_s = round(report.placed / report.seconds, 1) if report.seconds else 0.0
    report.refused_because = dict(tally.reasons.most_common())
    report.failures = dict(tally.failures.most_common())


def over_allocation(
    usages: Sequence[Mapping[str, Any]], allocations: Sequence[Mapping[str, Any]]
) -> tuple[int, dict[str, float]]:
    """How many (provider, class) pairs hold more than their capacity, and how full each class is, from stored rows alone."""
    held: collections.Counter[tuple[str, str]] = collections.Counter()
    for allocation in allocations:
        held[allocation["provider"], allocation["resource_class"]] += int(allocation["used"])
    over = 0
    total: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    for provider in usages:
        for inventory in provider["inventories"]:
            name = inventory["resource_class"]
            capacity = (inventory["total"] - inventory["reserved"]) * inventory["allocation_ratio"]
            taken = held.pop((provider["uuid"], name), 0)
            over += taken > capacity
            total[name] += capacity
            used[name] += taken
    # What is held of something that has no inventory any more is over-allocated as well.
    over += len(held)
    return over, {name: round(used[name] / total[name], 4) for name in sorted(total) if total[name]}


def _settle(client: Client, tally: _Tally, clock: Clock) -> None:
    """Wait until what was asked for is built or gone, as far as it can be; what could not be built holds nothing."""
    began = clock.monotonic()
    while True:
        going_on = _going_on(client) & tally.asked
        if not going_on or clock.monotonic() - began > _PATIENCE:
            break
        clock.sleep(_LOOK)
    broken = {each["uuid"] for each in client.instances(status="error")} & tally.held
    tally.held -= broken
    tally.report.broken = len(broken)
    tally.report.unsettled = len(going_on)


def _going_on(client: Client) -> set[str]:
    """Instances that something is being done to."""
    return {each["uuid"] for status in ("building", "deleting") for each in client.instances(status=status)}


def _audit(client: Client, tally: _Tally) -> None:
    report = tally.report
    usages = list(client.usages())
    allocations = list(client.allocations())
    report.hosts = len(usages)
    report.over_allocated, report.fill = over_allocation(usages, allocations)
    consumers = {allocation["consumer"] for allocation in allocations}
    report.stored_consumers = len(consumers)
    report.lost = len(tally.held - consumers)
    # What others had stored before is none of our business.
    report.left_over = len((consumers & tally.asked) - tally.held)
