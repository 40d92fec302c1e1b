# SPDX-License-Identifier: Apache-2.0
"""Runs sushy-tools' Redfish emulator over machines of the tests: ``python -m tests.servers.redfish_emulator --config FILE``.

Protocol, authentication and state are the emulator's. Its own fake machines take up to 11 seconds to change their power, and say
nothing of their processors; its boot devices are for good. These take ``delay`` seconds, have boot devices for one boot, count how
often they were turned on (``boots``), keep what each boot was from (``booted``), and break when a test says so:

* ``deaf``: requests to change the power are accepted, and nothing happens.
* ``refuses``: requests to change the power are answered with an error.
* ``mute``: it does not say whether it is on.
* ``refusals``: so many requests to turn it on are answered with an error.
* ``blinks``: so many times it says Off whatever it is.
* ``sticks``: a boot device for one boot cannot be taken back.

``GET /machines`` shows all of them, ``PATCH /machines/UUID`` changes members of one as a person in front of it could.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import MutableMapping
from typing import Any

import flask
from sushy_tools import error
from sushy_tools.emulator import main
from sushy_tools.emulator.resources.systems import fakedriver
from typing_extensions import override


class _Written(dict[str, dict[str, Any]]):
    """A store that is read from memory: the emulator's own opens a file for each look at a machine. Each write goes to it first."""

    def __init__(self, store: MutableMapping[str, dict[str, Any]]) -> None:
        super().__init__(store)
        self._store = store

    @override
    def __getitem__(self, key: str) -> dict[str, Any]:
        return dict(super().__getitem__(key))

    @override
    def __setitem__(self, key: str, value: dict[str, Any]) -> None:
        self._store[key] = value
        super().__setitem__(key, dict(value))


class Machines(fakedriver.FakeDriver):
    """Machines whose power changes after a delay, in the order in which it was asked for."""

    _systems: MutableMapping[str, dict[str, Any]]

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        super().__init__()
        self._systems = _Written(self._systems)

    @override
    def _update_if_needed(self, system: dict[str, Any]) -> dict[str, Any]:
        pending = system.get("pending_power")
        if pending and time.time() >= pending["apply_time"]:
            self._turn(system, pending["power_state"])
        return system

    @override
    def _get(self, identity: str) -> Any:
        with self._mutex:
            return super()._get(identity)

    @override
    def get_power_state(self, identity: str) -> Any:
        with self._mutex:
            system = self._get(identity)
            blinks = system.get("blinks", 0)
            if blinks:
                self._update(system, blinks=blinks - 1)
                return "Off"
            return None if system.get("mute") else system["power_state"]

    @override
    def set_power_state(self, identity: str, state: str) -> None:
        with self._mutex:
            system = self._get(identity)
            if system.get("refuses"):
                raise error.FishyError("The machine refuses.")
            if system.get("deaf"):
                return
            # The last request counts, as for a machine that does one after the other.
            wanted = "Off" if state in ("ForceOff", "GracefulShutdown") else "On"
            refusals = system.get("refusals", 0)
            if wanted == "On" and refusals:
                self._update(system, refusals=refusals - 1)
                raise error.FishyError("The machine refuses once.")
            apply_time = time.time() + system.get("delay", 0.0)
            self._update(system, pending_power={"power_state": wanted, "apply_time": apply_time})

    @override
    def get_total_cpus(self, identity: str) -> int:
        return int(self._get(identity).get("cpus", 16))

    @override
    def get_total_memory(self, identity: str) -> int:
        return int(self._get(identity).get("memory_gib", 64))

    def boot_once(self, identity: str, device: str | None) -> None:
        """Sets what the next boot alone is from; None: what all others are from."""
        with self._mutex:
            system = self._get(identity)
            if device is None and system.get("sticks"):
                raise error.FishyError("The boot device sticks.")
            self._update(system, boots_once_from=device)

    def change(self, identity: str, changes: dict[str, Any]) -> None:
        """What a test does to a machine."""
        with self._mutex:
            system = self._get(identity)
            if "power_state" in changes:
                self._turn(system, changes["power_state"])
            self._update(system, **changes)

    def _turn(self, system: dict[str, Any], state: str) -> None:
        if state == "On" and system["power_state"] == "Off":
            device = system.get("boots_once_from") or system.get("boot_device", "Hdd")
            booted = [*system.get("booted", ()), device]
            self._update(system, boots=system.get("boots", 0) + 1, booted=booted, boots_once_from=None)
        self._update(system, power_state=state, pending_power=None)


def _identity() -> str:
    return str((flask.request.view_args or {})["identity"])


@main.app.before_request
def _boot_once() -> Any:
    """Does what the emulator does not: it takes each boot device for good, and none back."""
    if flask.request.method != "PATCH":
        return None
    boot = (flask.request.get_json(silent=True) or {}).get("Boot") or {}
    enabled = boot.get("BootSourceOverrideEnabled")
    if enabled not in ("Once", "Disabled"):
        return None
    main.app.systems.boot_once(_identity(), boot["BootSourceOverrideTarget"] if enabled == "Once" else None)
    return "", 204


@main.app.after_request
def _show_boot_once(response: Any) -> Any:
    if flask.request.endpoint == "system_resource" and flask.request.method == "GET" and response.status_code == 200:
        shown = flask.json.loads(response.get_data())
        device = main.app.systems._get(_identity()).get("boots_once_from")
        enabled = {"BootSourceOverrideEnabled": "Once" if device else "Disabled"}
        shown["Boot"].update({**enabled, "BootSourceOverrideTarget": device or "None"})
        response.set_data(flask.json.dumps(shown))
    return response


@main.app.route("/machines")
def _machines() -> Any:
    machines = main.app.systems
    return flask.jsonify({uuid: machines._get(uuid) for uuid in machines.systems})


@main.app.route("/machines/<identity>", methods=["PATCH"])
def _change(identity: str) -> Any:
    main.app.systems.change(identity, flask.request.json)
    return "", 204


if __name__ == "__main__":
    fakedriver.FakeDriver = Machines
    sys.exit(main.main())
