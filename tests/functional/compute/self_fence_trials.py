# SPDX-License-Identifier: Apache-2.0
"""Trials of hosts that fence themselves: agents and guardians that are paused, and a witness outside of Moorage.

The witness is a lock (flock) of a file that all hosts of a trial share, as the sandboxes' read-only path. Each copy of the workload
takes it, and the kernel frees it when the last process of that copy has ended. A copy that finds it taken ends with exit code 99.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage import errors
from moorage.client.client import Client
from moorage.services.interface import SELF_FENCE_MARGIN
from moorage_plugins.drivers.guarded.files import read_json
from moorage_plugins.drivers.guarded.lease import lease_until
from tests.functional.compute.sandboxes import guardians_of, pids_of
from tests.functional.control_plane.test_slice import Plane, flavor
from tests.pausing import pause
from tests.servers import wait_until

__all__ = ["MODES", "TWO_COPIES", "Trial", "run_round", "witnessed"]

SOON = 120.0
MODES = ("agent", "guardian", "both", "returning")
#: The exit code of a copy that found another one.
TWO_COPIES = 99


def witnessed(lock: Path) -> list[str]:
    """A command that runs while no other copy of it does."""
    return ["sh", "-c", f"exec 9<{lock}; flock -n 9 || exit {TWO_COPIES}; exec sleep 100000"]


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Trial:
    """One instance on one host, with what happens to the host.

    :param mode: ``agent``: the agent stands still for a while. ``guardian``: so does the guardian, and the agent goes on. ``both``:
        the agent stands still, and the guardian while it should act, within the margin. ``returning``: the agent goes on about
        when the host may be fenced.
    """

    plane: Plane
    api: Client
    url: str
    shared: Path
    host: str
    mode: str
    lease: float
    random: random.Random
    uuid: str = ""
    notes: list[str] = field(default_factory=list)
    _resumed: threading.Event = field(default_factory=threading.Event)

    def run(self) -> str:
        """What became of the instance: evacuated, fenced (it ended and stayed), or ran on.

        :raises AssertionError: two copies ran, or the trial did not come to its end.
        """
        self.uuid = self._create()
        agent = self.api.services(binary="agent", host=self.host)[0]["uuid"]
        time.sleep(self.random.uniform(0, 0.5))
        with futures.ThreadPoolExecutor(1) as pool:
            evacuation = pool.submit(self._evacuate, agent)
            try:
                getattr(self, f"_{self.mode}")()
            finally:
                self._resumed.set()
            evacuated = evacuation.result(SOON)
        self._settle(agent)
        outcome = self._outcome(evacuated)
        self._delete()
        return outcome

    # -- what happens to the host ---------------------------------------------------------------------------------

    def _agent(self) -> None:
        with self._paused_agent():
            time.sleep(self.lease * self.random.uniform(0.5, 2.0))

    def _guardian(self) -> None:
        with self._paused_guardian():
            time.sleep(self.lease * self.random.uniform(0.5, 2.0))

    def _both(self) -> None:
        with self._paused_agent():
            margin = SELF_FENCE_MARGIN * self.lease
            until = lease_until(self.plane.state / "processes" / self.host)
            assert until is not None
            time.sleep(max(0.0, until - self.random.uniform(0.0, margin) - _boottime()))
            with self._paused_guardian():
                time.sleep(max(0.0, until + self.random.uniform(0.0, 0.8 * margin) - _boottime()))
            time.sleep(self.lease * self.random.uniform(0.2, 0.8))

    def _returning(self) -> None:
        with self._paused_agent():
            time.sleep(self.lease * self.random.uniform(0.9, 1.3))

    @contextlib.contextmanager
    def _paused_agent(self) -> Iterator[None]:
        pid = self._pause_agent()
        self.notes.append(f"{_boottime():.3f} the agent stands still")
        try:
            yield
        finally:
            self.notes.append(f"{_boottime():.3f} the agent goes on")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pause_agent(self) -> int:
        """Pauses the agent; its process id. On a machine with much else to do, an agent may just have given up its service."""
        while True:
            pid = self.plane.processes()[self.host]["pid"]
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    pause(pid, self.url)
                    return int(pid)
            wait_until(lambda: self.plane.processes()[self.host]["pid"] not in (None, pid), "another agent", SOON)  # noqa: B023

    @contextlib.contextmanager
    def _paused_guardian(self) -> Iterator[None]:
        pids = guardians_of(self.uuid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self.notes.append(f"{_boottime():.3f} the guardian stands still")
        try:
            yield
        finally:
            self.notes.append(f"{_boottime():.3f} the guardian goes on")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # -- the operator ---------------------------------------------------------------------------------------------

    def _evacuate(self, agent: str) -> bool:
        """Fences the host as soon as the store allows it, and evacuates the instance; False when the host came back before."""
        while True:
            last = self._resumed.is_set()
            try:
                self.api.fence_service_by_itself(agent)
                self.notes.append(f"{_boottime():.3f} the host is fenced")
                self.api.act_on_instance(self.uuid, "evacuate")
            except (errors.Conflict, errors.NoValidHost, errors.Unavailable) as error:
                if last and not isinstance(error, errors.Unavailable):
                    return False
                time.sleep(0.03)
            else:
                self.notes.append(f"{_boottime():.3f} the instance is evacuated")
                return True

    # -- before and after -----------------------------------------------------------------------------------------

    def _create(self) -> str:
        lock = self.shared / f"lock-{self.host}"
        lock.touch(mode=0o644)
        body: dict[str, Any] = {**flavor(VCPU=1), "command": witnessed(lock), "force_hosts": [self.host]}
        uuid: str = self.api.create_instance(body)["uuid"]
        wait_until(lambda: self._runs(uuid), f"instance {uuid} to run", SOON)
        wait_until(lambda: self._shown(uuid)["actual_state"] == "running", "the agent to see it", SOON)
        # The witness sees.
        with lock.open() as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise AssertionError(f"instance {uuid} runs without the lock")
        return uuid

    def _runs(self, uuid: str) -> bool:
        """Whether a copy has the lock."""
        for pid in pids_of(uuid, self.plane.state):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
                    return True
        return False

    def _shown(self, uuid: str) -> dict[str, Any]:
        with contextlib.suppress(errors.Unavailable):
            return self.api.instance(uuid)
        return {"status": "", "actual_state": "", "pending": True}

    def _settle(self, agent: str) -> None:
        """Waits until the host is up again and the instance is in no operation."""
        wait_until(lambda: self._believed(agent), f"{self.host} to be up", SOON)
        wait_until(
            lambda: self._shown(self.uuid)["status"] in ("active", "stopped", "error"), "the end of operations", SOON
        )

    def _believed(self, agent: str) -> bool:
        with contextlib.suppress(errors.MoorageError):
            found = self.api.service(agent)
            if found["forced_down"] and not found["fenced"]:
                found = self.api.set_service(agent, forced_down=False)
            # Its start has ended the fence, and it promises again.
            return bool(found["state"] == "up" and not found["fenced"] and found["self_fence_s"])
        return False

    def _outcome(self, evacuated: bool) -> str:
        ended = f"exit code {TWO_COPIES}"
        # A moment for a copy that is just beginning, and for the sweep that sees it.
        wait_until(self._is_seen, "the agent to see what runs", SOON)
        wait_until(lambda: len(self._states()) == 1, "the end of what was left", SOON)
        found = self._shown(self.uuid)
        said = [state["detail"] for state in self._states()]
        if ended in found["fault"] or any(ended in each for each in said):
            raise AssertionError(f"{self.mode}: two copies of {self.uuid} ran at once: {self.notes}, {found}, {said}")
        copies = pids_of(self.uuid, self.plane.state)
        if found["actual_state"] == "running":
            assert len(copies) == 1, (copies, found, self.notes)
            if evacuated:
                assert found["host"] != self.host, (found, self.notes)
                return "evacuated"
            return "ran on"
        assert not evacuated, (found, self.notes)
        assert not copies, (copies, found, self.notes)
        assert "the host fenced itself" in found["fault"], (found, self.notes)
        return "fenced"

    def _is_seen(self) -> bool:
        """Whether the store says of the instance what is true."""
        state, copies = self._shown(self.uuid)["actual_state"], len(pids_of(self.uuid, self.plane.state))
        return (state, copies) in (("running", 1), ("failed", 0))

    def _states(self) -> list[dict[str, Any]]:
        """What guardians say of the instance on all hosts."""
        folders = (self.plane.state / "processes").glob(f"*/{self.uuid}/[0-9]*")
        return [state for each in folders if (state := read_json(each / "state.json")) is not None]

    def _delete(self) -> None:
        def gone() -> bool:
            try:
                self.api.instance(self.uuid)
            except errors.NotFound:
                return True
            except errors.Unavailable:
                return False
            return False

        self.api.delete_instance(self.uuid)
        wait_until(gone, "the deletion", SOON)


def run_round(
    plane: Plane, api: Client, url: str, shared: Path, lease: float, seed: random.Random, outcomes: Counter[str]
) -> None:
    """A trial of each mode at once, on hosts of their own; adds to ``outcomes``.

    :raises AssertionError: one of them failed.
    """
    modes = list(MODES)
    seed.shuffle(modes)
    trials = [
        Trial(plane, api, url, shared, f"agent-{number}", mode, lease, random.Random(seed.getrandbits(64)))
        for number, mode in enumerate(modes, 1)
    ]
    with futures.ThreadPoolExecutor(len(trials)) as pool:
        running = [pool.submit(each.run) for each in trials]
        for trial, done in zip(trials, running, strict=True):
            outcomes[f"{trial.mode}: {done.result()}"] += 1
