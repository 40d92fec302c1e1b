# SPDX-License-Identifier: Apache-2.0
"""A whole site under faults of everything that it consists of, by ``make soak``; the seed is printed.

Clients create and delete instances and volumes, repeat what was not answered, and note what they were told. Roles are killed,
paused, reloaded and drained, and their clocks are set; servers are killed and paused. After each round everything is mended, and
what there is must come to rest as the laws of :func:`broken` say.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import unittest
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

import tests
from moorage import errors
from moorage.client.client import Client
from tests import SOAK, hypervisors
from tests.functional.deployment.sites import HOSTS, ROLES, SOON, Site
from tests.servers import wait_until

ROUNDS = int(os.environ.get("MOORAGE_SITE_ROUNDS", "8"))
SECONDS = 45.0
CLIENTS = 8
#: Instances and volumes that a client keeps at most. Together they ask for more than there is room for.
KEPT, VOLUMES = 12, 6
#: Seconds that everything has to come to rest after a round.
REST = 300.0
PRESENT, ABSENT, UNKNOWN = "present", "absent", "unknown"


@dataclass
class Ledger:
    """What one client was told.

    :ivar instances: by uuid: present, absent or unknown, as the answers leave it.
    :ivar volumes: the same for volumes whose creation was answered. :ivar unanswered: creations of volumes that were not.
    :ivar wrong: answers that no order of events explains.
    """

    instances: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    unanswered: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Customer:
    """A client in a thread; it uses what is in its ledger, and asks all APIs."""

    def __init__(self, site: Site, number: int, seed: int, ledger: Ledger) -> None:
        self.ledger = ledger
        self._random = random.Random(f"{seed}-{number}")
        self._apis = [site.client(each) for each in range(len(site.urls))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"customer-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask for nothing more; returns when the last request was answered or given up."""
        self._stop.set()
        self._thread.join(SOON)
        if self._thread.is_alive():
            self.ledger.wrong.append(f"{self._thread.name} waits for an answer for ever")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._act()
            except Exception as error:
                self.ledger.wrong.append(f"{self._thread.name}: {error!r}")
            self._stop.wait(self._random.uniform(0, 0.2))

    def _act(self) -> None:
        instances = [each for each, state in self.ledger.instances.items() if state == PRESENT]
        volumes = [each for each, state in self.ledger.volumes.items() if state == PRESENT]
        if self._random.random() < 0.7:
            if len(instances) < KEPT and self._random.random() < 0.6 or not instances:
                self._create_instance()
            else:
                self._delete_instance(self._random.choice(instances))
        elif len(volumes) < VOLUMES and self._random.random() < 0.6 or not volumes:
            self._create_volume()
        else:
            self._delete_volume(self._random.choice(volumes))

    def _tries(self, call: Callable[[Client], object]) -> Iterator[errors.MoorageError | None]:
        """What each try comes to, None for an answer. The caller asks for the next one."""
        for _ in range(4):
            try:
                call(self._random.choice(self._apis))
            except errors.MoorageError as error:
                yield error
            else:
                yield None
            self._stop.wait(0.5)

    def _create_instance(self) -> None:
        wanted = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        flavor = {"flavorid": "small", "resources": {"VCPU": self._random.choice((1, 1, 2, 4))}}
        open_end = False
        for error in self._tries(lambda api: api.create_instance({"uuid": wanted, "name": "one", "flavor": flavor})):
            self.ledger.counts[f"create: {'answered' if error is None else error.code}"] += 1
            if error is None:
                self.ledger.instances[wanted] = PRESENT
                return
            if isinstance(error, errors.Conflict):
                # An earlier try that was not answered may still be on its way.
                self.ledger.instances[wanted] = UNKNOWN if open_end else ABSENT
                return
            if not isinstance(error, errors.Unavailable):
                self.ledger.wrong.append(f"create of {wanted}: {error.code}: {error.message}")
            open_end = True
        self.ledger.instances[wanted] = UNKNOWN

    def _delete_instance(self, wanted: str) -> None:
        open_end = False
        for error in self._tries(lambda api: api.delete_instance(wanted)):
            self.ledger.counts[f"delete: {'answered' if error is None else error.code}"] += 1
            if error is None:
                self.ledger.instances[wanted] = ABSENT
                return
            if isinstance(error, errors.NotFound):
                if not open_end:
                    self.ledger.wrong.append(f"instance {wanted} was acknowledged, and is not found: {error.message}")
                self.ledger.instances[wanted] = ABSENT
                return
            if isinstance(error, errors.Conflict):
                self.ledger.instances[wanted] = UNKNOWN if open_end else PRESENT
                return
            if not isinstance(error, errors.Unavailable):
                self.ledger.wrong.append(f"delete of {wanted}: {error.code}: {error.message}")
            open_end = True
        self.ledger.instances[wanted] = UNKNOWN

    def _create_volume(self) -> None:
        # Who makes the request names no uuid: a repetition would be another volume.
        made = []

        def create(api: Client) -> None:
            answer = api.request("POST", "/volumes", body={"volume": {"size": 1}}, prefix="/volume/v3")
            made.append(answer["volume"]["id"])

        error = next(self._tries(create))
        self.ledger.counts[f"create volume: {'answered' if error is None else error.code}"] += 1
        if error is None:
            self.ledger.volumes[made[0]] = PRESENT
        elif isinstance(error, errors.Unavailable):
            self.ledger.unanswered += 1
        elif not isinstance(error, errors.Conflict):
            self.ledger.wrong.append(f"create of a volume: {error.code}: {error.message}")

    def _delete_volume(self, wanted: str) -> None:
        open_end = False
        for error in self._tries(lambda api: api.request("DELETE", f"/volumes/{wanted}", prefix="/volume/v3")):
            self.ledger.counts[f"delete volume: {'answered' if error is None else error.code}"] += 1
            if isinstance(error, errors.NotFound) and not open_end:
                self.ledger.wrong.append(f"volume {wanted} was acknowledged, and is not found: {error.message}")
            if error is None or isinstance(error, errors.NotFound):
                self.ledger.volumes[wanted] = ABSENT
                return
            if not isinstance(error, errors.Unavailable):
                # It is being made, or being deleted by a try that was not answered.
                self.ledger.volumes[wanted] = UNKNOWN if open_end else PRESENT
                return
            open_end = True
        self.ledger.volumes[wanted] = UNKNOWN


class Faults:
    """Draws a fault now and then: one of a server at a time, and of any number of roles."""

    def __init__(self, site: Site, chance: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._site = site
        self._random = chance
        self._paused: dict[str, float] = {}
        self._server: threading.Thread | None = None
        self._stop = threading.Event()
        #: What mending a server raised.
        self.failed: list[str] = []

    def draw(self) -> None:
        """One step of the round: what is due goes on, what has ended starts again, and perhaps there is another fault."""
        now = time.monotonic()
        for name, until in list(self._paused.items()):
            if now > until:
                self._site.roles[name].signal(signal.SIGCONT)
                del self._paused[name]
        self.counts["started"] += self._site.watch()
        chance = self._random.random()
        if chance < 0.12:
            self._of_role(self._random.choice(list(self._site.roles)))
        elif chance < 0.14 and (self._server is None or not self._server.is_alive()):
            name = self._random.choice(list(self._site.servers))
            kills, seconds = self._random.random() < 0.5, self._random.uniform(0.5, 6)
            self.counts[f"{name} {'killed' if kills else 'paused'}"] += 1
            self._server = threading.Thread(target=self._of_server, args=(name, kills, seconds), daemon=True)
            self._server.start()

    def mend(self) -> None:
        """Everything runs again, with true clocks."""
        for name in self._paused:
            self._site.roles[name].signal(signal.SIGCONT)
        self._paused.clear()
        if self._server is not None:
            self._server.join(SOON)
        for role in self._site.roles.values():
            role.set_clock(0)
        self._site.watch()

    def _of_role(self, name: str) -> None:
        role = self._site.roles[name]
        what = self._random.choice(("kill", "kill", "pause", "pause", "clock", "drain", "reload"))
        seconds, jump = self._random.uniform(0.5, 12), self._random.choice((-3600, -30, 30, 3600))
        if name in self._paused:
            return
        self.counts[f"{what} of {name.partition('-')[0]}"] += 1
        if what == "pause":
            role.signal(signal.SIGSTOP)
            self._paused[name] = time.monotonic() + seconds
        elif what == "clock":
            role.set_clock(jump)
        else:
            role.signal({"kill": signal.SIGKILL, "drain": signal.SIGTERM, "reload": signal.SIGHUP}[what])

    def _of_server(self, name: str, kills: bool, seconds: float) -> None:
        server = self._site.servers[name]
        try:
            if kills:
                server.kill()
                self._stop.wait(seconds)
                server.restart()
            else:
                server.pause()
                self._stop.wait(seconds)
                server.resume()
        except Exception as error:
            self.failed.append(f"{name}: {error!r}")


def broken(site: Site, ledgers: list[Ledger]) -> list[str]:
    """The laws that do not hold now, each with what breaks it. At rest there are none."""
    api = site.client()
    found = [each for ledger in ledgers for each in ledger.wrong]
    instances = {each["uuid"]: each for each in api.instances()}
    found += _told(
        {key: state for each in ledgers for key, state in each.instances.items()}, set(instances), "instance"
    )
    copies: dict[str, list[str]] = {}
    for workload in hypervisors.found(site.folder / "state"):
        copies.setdefault(workload.uuid, []).append(workload.host)
    for key, each in instances.items():
        if each["status"] not in ("active", "error"):
            found.append(f"instance {key} is {each['status']}")
        at = copies.get(key, [])
        if at not in ([each["host"]], [] if each["status"] == "error" else None):
            found.append(f"instance {key} of {each['host']} ({each['status']}) runs on {at}")
    found += [f"instance {key} is gone and runs on {places}" for key, places in copies.items() if key not in instances]
    found += _volumes(site, api, ledgers)
    audit = api.audit_allocations()
    found += [f"audit: {name}: {audit[name]}" for name in ("drift", "overuse", "orphans", "findings") if audit[name]]
    holders = {each["consumer"] for each in api.allocations()}
    active = {key for key, each in instances.items() if each["status"] == "active"}
    found += [f"{key} has no allocation" for key in active - holders]
    found += [f"{key} is gone and has an allocation" for key in holders - set(instances)]
    for host in HOSTS:
        # Schedulers answer in turn.
        for _ in ROLES["scheduler"]:
            seen = set(api.host(host)["instances"])
            wanted = {key for key in holders if instances.get(key, {}).get("host") == host}
            if seen != wanted:
                found.append(f"a scheduler sees of {host} {len(seen - wanted)} too many, {len(wanted - seen)} too few")
    rows = list(api.pages("/workers", "workers"))
    found += [f"{each['operation']} of {each['resource_type']} {each['resource_id']} has not ended" for each in rows]
    ends = Counter(
        (each["resource_type"], each["resource_id"], each["token"])
        for each in api.pages("/cleanup/history", "history")
        if each["outcome"] == "done"
    )
    found += [f"{key} was finished {count} times" for key, count in ends.items() if count > 1]
    members = {member["host"] for ring in api.rings() for member in ring["members"]}
    found += [f"{name} is in no ring" for name in ROLES["engine"] if name not in members]
    return found


def _told(told: dict[str, str], there: set[str], kind: str) -> list[str]:
    """Where what there is contradicts what clients were told."""
    missing = [
        f"{kind} {key} was acknowledged and is missing"
        for key, state in told.items()
        if state == PRESENT and key not in there
    ]
    back = [
        f"{kind} {key} was deleted or refused and exists"
        for key, state in told.items()
        if state == ABSENT and key in there
    ]
    return (
        missing
        + back
        + ([f"{kind} {key} was asked for by nobody" for key in there - set(told)] if kind == "instance" else [])
    )


def _volumes(site: Site, api: Client, ledgers: list[Ledger]) -> list[str]:
    listed = api.request("GET", "/volumes", prefix="/volume/v3")["volumes"]
    statuses = {each["id"]: each["status"] for each in listed}
    told = {key: state for each in ledgers for key, state in each.volumes.items()}
    found = _told(told, set(statuses), "volume")
    surplus = len(set(statuses) - set(told)) - sum(each.unanswered for each in ledgers)
    if surplus > 0:
        found.append(f"{surplus} volumes more than creations without an answer")
    files = _files(site, "block_storage/volume")
    for key, status in statuses.items():
        copies = len(files.get(key, ()))
        if (
            status not in ("available", "error")
            or copies != (status == "available")
            and not (status == "error" and copies == 1)
        ):
            found.append(f"volume {key} is {status} and has {copies} files")
    return found + [f"volume {key} is gone and has files" for key in files if key not in statuses]


def _files(site: Site, *folders: str) -> dict[str, list[tuple[str, str]]]:
    """What hypervisors and backend really have: the folder and the token of each effect, by resource."""
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in folders:
        for path in (site.folder / "state" / folder).glob("*/*"):
            if path.is_file():
                found.setdefault(path.parent.name, []).append((folder, path.name))
    return found


@unittest.skipUnless(SOAK, "takes many minutes; make soak runs it")
class WholeSystemTests(unittest.TestCase):
    def setUp(self) -> None:
        self.seed = int(os.environ.get("MOORAGE_SEED", "1"))
        print(f"MOORAGE_SEED={self.seed}")  # noqa: T201
        self.chance = tests.seeded()
        self.site = Site(self)
        #: One for each client, for all rounds.
        self.ledgers = [Ledger() for _ in range(CLIENTS)]

    def play(self, seconds: float, number: int, faults: Faults | None = None) -> None:
        """One round: clients and faults for so many seconds, then everything is mended and comes to rest."""
        customers = [Customer(self.site, each, self.seed + number, ledger) for each, ledger in enumerate(self.ledgers)]
        for each in customers:
            each.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if faults is not None:
                faults.draw()
            time.sleep(0.2)
        if faults is not None:
            faults.mend()
        for each in customers:
            each.stop()
        self.rest(faults)

    def rest(self, faults: Faults | None = None) -> None:
        """Wait until all laws hold."""
        found: list[str] = []

        def rests() -> bool:
            self.site.watch()
            try:
                found[:] = broken(self.site, self.ledgers)
            except errors.MoorageError as error:
                found[:] = [f"the API does not answer: {error.message}"]
            if found:
                time.sleep(2)
            return not found and self.site.all_up()

        try:
            wait_until(rests, "the site comes to rest", REST)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join([*found, *(faults.failed if faults else ())])) from None

    def test_whatever_fails_what_was_acknowledged_holds_and_everything_comes_to_rest(self) -> None:
        faults = Faults(self.site, self.chance)
        for number in range(ROUNDS):
            self.play(SECONDS, number, faults)
            counts: Counter[str] = Counter()
            for each in self.ledgers:
                counts.update(each.counts)
            print(f"round {number + 1}: {dict(sorted(counts.items()))}, {dict(sorted(faults.counts.items()))}")  # noqa: T201
        self.assertEqual([], faults.failed)

    def test_what_breaks_a_law_is_found(self) -> None:
        self.play(5.0, 0)
        api, ledger = self.site.client(), self.ledgers[0]
        active = sorted(each["uuid"] for each in api.instances() if each["status"] == "active")
        volume = next(key for each in self.ledgers for key, state in each.volumes.items() if state == PRESENT)
        state = self.site.folder / "state"
        host = api.instance(active[0])["host"]
        other = next(each for each in HOSTS if each != host)
        engine = sa.create_engine(self.site.database)
        self.addCleanup(engine.dispose)

        def makes(words: str, plant: Callable[[], object], mend: Callable[[], object]) -> None:
            with self.subTest(words):
                plant()
                self.assertIn(words, "\n".join(broken(self.site, self.ledgers)))
                mend()

        def change(statement: str) -> Callable[[], object]:
            def execute() -> None:
                with engine.begin() as connection:
                    self.assertGreater(connection.execute(sa.text(statement)).rowcount, 0)

            return execute

        lost, token = str(uuid.uuid4()), next(iter((state / "block_storage" / "volume" / volume).iterdir()))
        makes(
            f"instance {lost} was acknowledged and is missing",
            lambda: ledger.instances.update({lost: PRESENT}),
            lambda: ledger.instances.pop(lost),
        )
        owner = next(each for each in self.ledgers if active[0] in each.instances)
        makes(
            f"instance {active[0]} was deleted or refused and exists",
            lambda: owner.instances.update({active[0]: ABSENT}),
            lambda: owner.instances.update({active[0]: PRESENT}),
        )
        makes(
            f"instance {active[0]} was asked for by nobody",
            lambda: owner.instances.pop(active[0]),
            lambda: owner.instances.update({active[0]: PRESENT}),
        )
        makes(
            f"instance {active[0]} of {host} (active) runs on",
            lambda: hypervisors.put(state, other, active[0], 9),
            lambda: hypervisors.remove(state, other, active[0]),
        )
        makes(
            "audit: drift",
            change("UPDATE inventories SET used = used + 1"),
            change("UPDATE inventories SET used = used - 1"),
        )
        makes(
            f"volume {volume} is available and has 0 files",
            lambda: token.rename(state / "away"),
            lambda: (state / "away").rename(token),
        )
        makes("waits for", lambda: ledger.wrong.append("waits for an answer"), ledger.wrong.clear)
        self.rest()
