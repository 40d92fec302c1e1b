# SPDX-License-Identifier: Apache-2.0
"""Creates, deletes and moves of instances by clients that repeat or give up; two schedulers, three agents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import load_store, open_instances, open_workers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.db import Database
from moorage.drivers.interface import WorkloadState
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.delete import Deleter
from moorage.instances.in_place import InPlace
from moorage.instances.interface import departed_consumer, move_consumer
from moorage.instances.resizes import Resizes
from moorage.scheduling.constraints import requested_rows, scarce_resources
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import InstanceRecord, RequestSpec
from moorage.scheduling.placement import Selection
from moorage.scheduling.ranker import PATIENCE
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.snapshot import Snapshot
from moorage.services.registry import ServiceRegistry
from moorage_plugins.stores.classes import STANDARD_CLASSES
from tests import hypervisors
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import Workload, open_deleter
from tests.simulation.world import World

__all__ = ["Placement"]

HOSTS = ("agent-1", "agent-2", "agent-3")
SCHEDULERS = ("scheduler-1", "scheduler-2")
#: Units of VCPU of each node.
SIZE = 4
#: (Node, resource class) -> units that are free.
_Free = dict[tuple[str, int], float]
_Moment = tuple[float, _Free, frozenset[tuple[str, str]]]


@dataclass
class _History:
    """What clients know of one instance."""

    uuid: str
    vcpus: int
    asked: bool = False
    created: bool = False
    delete_asked: bool = False
    deleted: bool = False
    log: list[str] = field(default_factory=list)


def enrol(database: Database, conf: Any, hosts: tuple[str, ...], size: int) -> None:
    """A node for each host."""
    clock = SystemClock()
    nodes = [
        NodeSpec(
            uuid_of_name(f"node-{host}"), f"node-{host}", host,
            inventories=(InventoryItem("VCPU", size), InventoryItem("MEMORY_MB", 65536)),
        )
        for host in hosts
    ]  # fmt: skip
    store = load_store(conf, database, clock)
    Enrolment(database, NodeStore(database), store, ServiceRegistry(database, clock), lambda: None).enrol(nodes)


class Placement(Workload):
    """Two schedulers, three agents, three clients."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        ("services", "report_interval"): 5.0,
        ("services", "service_down_time"): 20.0,
        ("agent", "sweep_interval"): 8.0,
        ("agent", "services"): ["compute"],
        ("cleanup", "enabled_handlers"): ["instance"],
        ("scheduling", "refresh_interval"): 10.0,
        ("scheduling", "enabled_filters"): [],
        ("cleanup", "interval"): 30.0,
        ("cleanup", "lease_seconds"): 6.0,
        ("compute", "operations"): 2,
        ("rpc", "call_timeout"): 10.0,
    }
    reloaded: ClassVar[dict[tuple[str, str], Any]] = {
        ("scheduling", "enabled_filters"): ["compute", "capacity"],
        ("scheduling", "alternates"): 0,
        ("cleanup", "interval"): 10.0,
    }
    points: ClassVar[int] = 300
    steps: ClassVar[int] = 800
    seconds: ClassVar[float] = 20.0
    #: What clients do, and how often an operator asks for one evacuation at most.
    asks: ClassVar[Sequence[str]] = ("create", "create", "delete", "move", "rebuild")
    patience: ClassVar[int] = 3
    #: What clients ask for that moves instances.
    operations: ClassVar[tuple[str, ...]] = ("live_migrate", "migrate", "resize")
    #: Whether nodes refuse requests for lack of room only, and for the states of their agents.
    room_decides: ClassVar[bool] = True
    hosts: Sequence[str] = HOSTS
    schedulers: Sequence[str] = SCHEDULERS

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: What was free by node and class, which consumer held some of which node, and from when on.
        self._free: list[_Moment] = []
        #: Seconds that the longest reading of a scheduler for a refusal took.
        self._longest: dict[int, float] = {}
        #: When a scheduler learned that its claim for an instance holds.
        self._claimed: dict[tuple[int, str], float] = {}
        world.at_refusal = self.check_refusal
        world.at_claim = self.check_claimed

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, SIZE)

    @override
    def begin(self) -> None:
        self.histories: list[_History] = []
        for host in HOSTS:
            self.start_role(host, Agent)
        for name in SCHEDULERS:
            self.start_role(name, SchedulerRole)

    @override
    def begin_clients(self) -> None:
        for number in range(1, 4):
            self.client(f"client-{number}", self._client)

    # -- clients --------------------------------------------------------------------------------------------------

    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        instances, workers = open_instances(platform, conf), open_workers(platform, conf)
        cast = cast_to_agent(platform.sender)
        deleter = open_deleter(platform, conf)
        in_place = InPlace(platform.database, instances, workers, cast)
        mine: list[_History] = []
        for _ in range(self.random.randint(2, 5)):
            # Clients also act on what others have asked for.
            known = mine if self.random.random() < 0.5 else self.histories
            living = [each for each in known if each.asked and not each.delete_asked]
            what = self.random.choice(self.asks) if living else "create"
            if what == "create":
                mine.append(self._create(platform))
            elif what == "delete":
                self._delete(deleter, self.random.choice(living))
            elif what == "move":
                self._move(platform, self.random.choice(living))
            else:
                self._attempt(self.random.choice(living), "rebuild", lambda uuid: in_place.begin(uuid, "rebuild", {}))
            if self.random.random() < 0.5:
                platform.clock.sleep(self.random.uniform(0, 4))

    def _create(self, platform: Any) -> _History:
        uuid = f"{self.random.getrandbits(32):08x}-0000-4000-8000-000000000000"
        made = _History(uuid, self.random.choice((1, 1, 2, 3)), asked=True)
        self.histories.append(made)
        extra = {"sim:delay_ms": str(self.random.choice((100, 1000, 3000)))}
        flavor = {"flavorid": f"f{made.vcpus}", "resources": {"VCPU": made.vcpus}, "extra_specs": extra}
        args = {"request": {"uuid": uuid, "flavor": flavor}, "request_id": f"req-{uuid}"}

        def call(_uuid: str) -> None:
            platform.sender.call("scheduler", "create_instance", args)
            made.created = True

        for _ in range(self.random.randint(1, 4)):
            there = self._has_place(uuid)
            if self._attempt(made, "create", call):
                found = made.created or made.delete_asked or not there or not self._has_place(uuid)
                self.require(found, f"a repetition of the create of {uuid} did not find it ({'; '.join(made.log)})")
                break
        missed = any(" create: " in each and "Conflict" in each for each in made.log)
        self.require(
            made.delete_asked or not missed,
            f"a repetition of the create of {uuid} did not find it ({'; '.join(made.log)})",
        )
        return made

    def _has_place(self, uuid: str) -> bool:
        """Whether an instance is there and is not in error."""
        return bool(self.rows("SELECT uuid FROM instances WHERE uuid = ? AND status <> 'error'", uuid))

    def _delete(self, deleter: Deleter, of: _History) -> None:
        of.delete_asked = True
        force = self.random.random() < 0.5

        def call(uuid: str) -> None:
            deleter.delete(uuid, force=force)
            of.deleted = True

        for _ in range(self.random.randint(1, 4)):
            if self._attempt(of, "delete", call):
                break

    def _move(self, platform: Any, of: _History) -> None:
        operation = self.random.choice(self.operations)
        vcpus = self.random.choice((1, 2))
        flavor = {"flavorid": f"f{vcpus}", "resources": {"VCPU": vcpus}}
        args = {
            "instance_uuid": of.uuid, "operation": operation, "request_id": f"move-{self.random.getrandbits(32):08x}",
            "wanted": {"flavor": flavor} if operation == "resize" else {},
        }  # fmt: skip
        for _ in range(self.random.randint(1, 3)):
            if self._attempt(of, operation, lambda uuid: platform.sender.call("scheduler", "move_instance", args)):
                break

    def _owner(self, process: Process) -> None:
        """Decides on the resizes that do not confirm themselves, because their instance does not run or has a fault.

        Reverts them; confirms those of which the old copy is gone.
        """
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        resizes = Resizes(
            platform.database, open_instances(platform, conf), open_workers(platform, conf),
            load_store(conf, platform.database, platform.clock), cast_to_agent(platform.sender),
        )  # fmt: skip
        while self._running - {process.name} or self.rows(
            "SELECT uuid FROM instances WHERE status IN ('resized', 'resizing')"
        ):
            platform.clock.sleep(5.0)
            for uuid, fault in self.rows(
                "SELECT uuid, fault FROM instances WHERE status = 'resized'"
                " AND (fault <> '' OR actual_state NOT IN ('running', 'unknown')) ORDER BY uuid"
            ):
                with contextlib.suppress(errors.MoorageError):
                    if "confirm the resize" in fault:
                        resizes.confirm(uuid, f"owner-{self.random.getrandbits(32):08x}")
                    else:
                        resizes.revert(uuid, f"owner-{self.random.getrandbits(32):08x}")
                    self.facts["owner"] = self.facts.get("owner", 0) + 1

    def _evacuate(self, platform: Any, uuid: str) -> None:
        """As an operator does for each instance of a fenced host."""
        request = f"evacuate-{self.random.getrandbits(32):08x}"
        args = {"instance_uuid": uuid, "operation": "evacuate", "wanted": {}, "request_id": request}
        for _ in range(self.random.randint(1, self.patience)):
            try:
                platform.sender.call("scheduler", "move_instance", args)
            except errors.MoorageError as error:
                if isinstance(error, errors.NotFound | errors.Conflict | errors.NoValidHost):
                    break
            else:
                self.kernel.note("acknowledged", f"evacuate {uuid}")
                self.facts["evacuations"] = self.facts.get("evacuations", 0) + 1
                break

    @staticmethod
    def _until(platform: Any, call: Callable[[], Any]) -> Any:
        """What the call returns when the store answers at last."""
        while True:
            try:
                return call()
            except errors.Unavailable:
                platform.clock.sleep(0.5)

    def _attempt(self, of: _History, what: str, call: Any) -> bool:
        """Whether it was acknowledged, or refused for good."""
        try:
            call(of.uuid)
        except errors.MoorageError as error:
            of.log.append(f"{self.kernel.now:.2f} {what}: {type(error).__name__}: {error.message}")
            self.require(type(error) is not errors.MoorageError, f"a handler failed unexpectedly: {of.log[-1]}")
            return isinstance(error, errors.NotFound | errors.Conflict | errors.NoValidHost)
        of.log.append(f"{self.kernel.now:.2f} {what}: acknowledged")
        self.kernel.note("acknowledged", f"{what} {of.uuid}")
        return True

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        self.check_room()
        self.check_numbers()
        self.check_tokens("instances")

    def check_numbers(self) -> None:
        """Events are numbered without a gap."""
        ((count, highest, last),) = self.rows(
            "SELECT COUNT(number), COALESCE(MAX(number), 0), COALESCE((SELECT last FROM event_sequence), 0) FROM events"
        )
        self.require(count == highest == last, f"{count} events have numbers up to {highest}, the last given is {last}")

    def check_room(self) -> None:
        """Never over any limit."""
        free: _Free = {
            (node, number): room - used
            for node, number, used, room in self.rows(
                "SELECT p.uuid, i.resource_class_id, i.used, (i.total - i.reserved) * i.allocation_ratio FROM inventories i"
                " JOIN resource_providers p ON p.id = i.resource_provider_id"
            )
        }
        over = {key: amount for key, amount in free.items() if amount < 0}
        self.require(not over, f"over the limit: (provider, class) and what is free = {over}")
        if not self._free or self._free[-1][1] != free:
            held = self.rows(
                "SELECT a.consumer_id, p.uuid FROM allocations a JOIN resource_providers p ON p.id = a.resource_provider_id"
            )
            self._free.append((self.kernel.now, free, frozenset(map(tuple, held))))

    def check_refusal(self, scheduler: Scheduler, fleet: Snapshot, work: Any, began: float) -> None:
        """Each node that might be chosen had no room at some moment of the request, beside what it knows to be claimed since.

        A scheduler spends a tenth of its time on readings for refusals at most, so what it goes by may be ten readings old; to that
        it adds what it has claimed itself or was told of. Nodes are claimed one after another, so there need not be one moment at
        which all are full.
        """
        spec: RequestSpec = work.spec
        refusals: Sequence[Mapping[str, Any]] = work.decision.refusals
        if spec.rebuild or not (self.room_decides or scarce_resources(fleet, spec, ())):
            return
        longest = max(self._longest.get(id(scheduler), 0.0), scheduler._freshness._reading_took)
        self._longest[id(scheduler)] = longest
        # By the slowest clock of a process.
        since = began - 10 * longest / self.world.rates[0]
        seen = self._free[max(0, sum(at <= since for at, *_ in self._free) - 1) :]
        other = {each.get("provider") for each in refusals if "state" in each or "filter" in each}
        wanted = spec.flavor.resources
        # What it has learned of its own claims meanwhile, and the claims of other requests that it has awaited in vain.
        claiming = {uuid for (name, uuid), at in self._claimed.items() if name == id(scheduler) and at > since}
        if self.kernel.now - began >= PATIENCE / self.world.rates[1]:
            claiming |= scheduler._reservations.instances()
        for row in requested_rows(fleet, spec):
            node = fleet.nodes[row].uuid
            if fleet.available[row] and node not in other:
                known = fleet.instances_on(row).values()
                had_room = all(
                    free[node, STANDARD_CLASSES[name]] - self._claimed_after(seen[place:], node, known, claiming, name)
                    >= amount
                    for place, (_, free, _) in enumerate(seen)
                    for name, amount in wanted.items()
                )
                self.require(
                    not had_room,
                    f"instance {spec.instance_uuid} was refused, and {fleet.nodes[row].name} had room for it all the time "
                    f"(from {since:.3f}, claims refused: {refusals})",
                )
        self.facts["refusals"] = self.facts.get("refusals", 0) + 1

    @staticmethod
    def _claimed_after(
        seen: Sequence[_Moment], node: str, known: Iterable[InstanceRecord], claiming: Collection[str], name: str
    ) -> float:
        """What those of the known instances have of a node that held nothing of it at the first moment, and did at a later one.

        :param claiming: instances that count although they never held anything.
        """
        now, later = seen[0][2], frozenset[tuple[str, str]]().union(*(held for _, _, held in seen[1:]))
        return sum(
            each.resources.get(name, 0)
            for each in known
            if (each.uuid, node) not in now and ((each.uuid, node) in later or each.uuid in claiming)
        )

    def check_claimed(self, scheduler: Scheduler, work: Any, made: Selection) -> None:
        """What a scheduler has just claimed is in its view, unless an agent has spoken of it or it is gone."""
        uuid, tracker = made.record.uuid, scheduler._reserver
        self._claimed[id(scheduler), uuid] = self.kernel.now
        if work.held is not None or made.repeated or not isinstance(tracker, InstanceTracker):
            return
        known = scheduler.view.get(uuid) is not None or tracker._last_word(uuid)
        there = self.rows("SELECT uuid FROM instances WHERE uuid = ? AND node_uuid = ?", uuid, made.node_uuid)
        self.require(known or not there, f"instance {uuid} was claimed and is not in the view of its scheduler")

    def may_be_gone(self, uuid: str) -> bool:
        """Whether nothing may be left of an instance that has a host, when all is at rest."""
        return False

    @override
    def quiet(self) -> str:
        left = self.rows("SELECT resource_id, operation, phase FROM workers")
        if left:
            return f"operations are left: {left}"
        waiting = self.rows("SELECT uuid FROM instances WHERE status = 'resized'")
        if waiting:
            if "owner" in self.started and "owner" not in self._running:
                # A scheduler that stood still for long has begun a resize after the owner had gone.
                self.client("owner", self._owner)
            return f"resizes have not confirmed themselves: {waiting}"
        stored = self.stored()
        for name in self.schedulers:
            seen = self.seen(name)
            if seen != stored:
                return f"{name} believes {seen}, the store has {stored}"
        running = self._effects()
        for uuid, host, _ in stored:
            if sorted(running.get(uuid, {})) != [host] and (running.get(uuid) or not self.may_be_gone(uuid)):
                return f"instance {uuid} of {host} runs on {running.get(uuid)}"
        executing, active = self.executing(), self.rows("SELECT uuid, host FROM instances WHERE status = 'active'")
        for uuid, host in active:
            if executing.get(uuid) != [host]:
                return f"instance {uuid} of {host} is active and executes on {executing.get(uuid)}"
        strangers = running.keys() - {row[0] for row in stored}
        return f"instances run that do not exist: {sorted(strangers)}" if strangers else ""

    def stored(self) -> list[Any]:
        """Uuid, host and flavor of the instances that occupy a host."""
        return sorted(
            self.rows("SELECT uuid, host, flavorid FROM instances WHERE status NOT IN ('error', 'shelved_offloaded')")
        )

    def seen(self, scheduler: str) -> list[Any]:
        """The same, as a scheduler believes."""
        fleet = self.roles[scheduler]._scheduler.view.snapshot()
        return sorted(
            (uuid, each.host, each.flavorid)
            for row in range(fleet.size)
            for uuid, each in fleet.instances_on(row).items()
        )

    def executing(self) -> dict[str, list[str]]:
        """Uuid -> hosts whose hypervisors execute it, each as often as it does."""
        found: dict[str, list[str]] = {}
        for each in hypervisors.found(self.world.folder):
            if each.state is WorkloadState.RUNNING:
                found.setdefault(each.uuid, []).append(each.host)
        return found

    def _effects(self) -> dict[str, dict[str, list[int]]]:
        """Uuid -> host -> tokens of what the hypervisors run."""
        found: dict[str, dict[str, list[int]]] = {}
        for each in hypervisors.found(self.world.folder):
            found.setdefault(each.uuid, {})[each.host] = [each.token]
        return found

    @override
    def check(self) -> None:
        self.check_room()
        rows = {
            row[0]: row for row in self.rows("SELECT uuid, status, host, node_uuid, fence, resources FROM instances")
        }
        for each in self.histories:
            said = "; ".join(each.log)
            if each.created and not each.delete_asked:
                self.require(each.uuid in rows, f"acknowledged instance {each.uuid} is gone ({said})")
            if each.deleted:
                self.require(
                    each.uuid not in rows, f"deleted instance {each.uuid} exists: {rows.get(each.uuid)} ({said})"
                )
        for uuid, tokens in self._effects().items():
            for host, found in tokens.items():
                self.require(len(found) == 1, f"instance {uuid} has effects of several tries on {host}: {found}")
        self._check_journal(rows)
        self._check_allocations(rows)

    def _check_journal(self, rows: dict[str, Any]) -> None:
        """The journal alone reproduces instances and claims."""
        found = self.rows("SELECT kind, subject, state FROM events ORDER BY number IS NULL, number, id")
        state: dict[str, Any] = {}
        for kind, subject, text in found:
            if kind.endswith(".delete"):
                self.require(state.pop(subject, None) is not None, f"{subject} was deleted and is not in the journal")
            elif kind.startswith(("instance.", "claim.")):
                state[subject] = json.loads(text)
        told = {
            subject.removeprefix("instance/"): (each["status"], each["host"], each["node_uuid"])
            for subject, each in state.items()
            if subject.startswith("instance/")
        }
        stored = {uuid: (status, host, node) for uuid, (_, status, host, node, *_) in rows.items()}
        self.require(told == stored, f"the journal says {told}, the table {stored}")
        holds = {
            (subject.removeprefix("claim/"), provider, STANDARD_CLASSES[name], used)
            for subject, each in state.items()
            if subject.startswith("claim/")
            for provider, amounts in each["holds"].items()
            for name, used in amounts.items()
        }
        held = self.rows(
            "SELECT a.consumer_id, p.uuid, a.resource_class_id, a.used FROM allocations a JOIN resource_providers p"
            " ON p.id = a.resource_provider_id"
        )
        self.require(
            holds == {tuple(row) for row in held}, f"the journal says {sorted(holds)}, the table {sorted(held)}"
        )

    def _check_allocations(self, rows: dict[str, Any]) -> None:
        held: dict[str, dict[str, int]] = {}
        for consumer, provider, name, used in self.rows(
            "SELECT a.consumer_id, p.uuid, a.resource_class_id, a.used FROM allocations a JOIN resource_providers p"
            " ON p.id = a.resource_provider_id"
        ):
            held.setdefault(consumer, {})[f"{provider}/{name}"] = used
        for uuid, (_, status, _, node, _, resources) in rows.items():
            wanted = {f"{node}/{STANDARD_CLASSES[name]}": used for name, used in json.loads(resources).items()}
            wanted = {} if status in ("error", "shelved_offloaded") else wanted
            holds = held.pop(uuid, {})
            self.require(holds == wanted, f"instance {uuid} ({status}) holds {holds} instead of {wanted}")
            self.require(move_consumer(uuid) not in held, f"instance {uuid} still holds the room of a move")
        for (uuid,) in self.rows("SELECT resource_id FROM workers WHERE operation = 'let_go'"):
            held.pop(departed_consumer(uuid), None)
        self.require(not held, f"claims of nobody: {held}")
        sums = self.rows(
            "SELECT i.resource_provider_id, i.resource_class_id, i.used, COALESCE(SUM(a.used), 0) FROM inventories i"
            " LEFT JOIN allocations a ON a.resource_provider_id = i.resource_provider_id"
            " AND a.resource_class_id = i.resource_class_id GROUP BY 1, 2, 3 HAVING i.used <> COALESCE(SUM(a.used), 0)"
        )
        self.require(not sums, f"used differs from the sum of allocations: {sums}")
