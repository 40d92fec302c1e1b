# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the power of one machine through its BMC, with the library sushy.

``driver_info`` of the node says where the BMC is, with the names that Ironic has: ``redfish_address``, ``redfish_system_id``
(needed where a BMC has several systems), ``redfish_username``, ``redfish_password`` and ``redfish_verify_ca``. User name and
password that are not there are those of ``[driver_redfish]``.

Errors name the node and neither address nor password: members of projects read them. Callers log the address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import sushy
from sushy import auth as sushy_auth
from sushy import exceptions as sushy_errors

from moorage.clock import Clock
from moorage.drivers.interface import DriverError, Machine

__all__ = ["BOOT_DEVICES", "DRIVER", "Bmc", "BmcError"]

#: What nodes with a BMC of this kind have as their driver.
DRIVER = "redfish"
#: Seconds between two looks at a machine whose power changes: the first pause, and the longest.
_FIRST, _LONGEST = 0.05, 2.0
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

#: What a machine can boot from first, by the names that Ironic has; None: it stays as it is.
BOOT_DEVICES = {
    "pxe": sushy.BootSource.PXE,
    "disk": sushy.BootSource.HDD,
    "cdrom": sushy.BootSource.CD,
    "usb": sushy.BootSource.USB,
    "uefi_http": sushy.BootSource.UEFI_HTTP,
    "none": None,
}


class BmcError(DriverError):
    """A BMC does not answer, or refuses.

    :param detail: what the log shall say of it: the address of the BMC, and its own words.
    """

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class Bmc:
    """The BMC of one machine. Keeps no connection: each call logs in, so that a BMC that was restarted is no special case.

    :param section: ``[driver_redfish]`` of the configuration.
    :raises DriverError: ``driver_info`` of the node does not say where the BMC is, or how.
    """

    def __init__(self, machine: Machine, section: Any, clock: Clock) -> None:
        self._name = machine.name
        self._clock = clock
        self._timeout = float(section.timeout)
        self._power_timeout = float(section.power_timeout)
        info = machine.driver_info
        self._address = self._checked_address(info.get("redfish_address"))
        self._system_id = info.get("redfish_system_id") or None
        self._user = info.get("redfish_username") or section.username
        self._password = info.get("redfish_password") or section.password
        self._verify = _verify(info.get("redfish_verify_ca", True))

    def is_on(self) -> bool:
        """Returns whether the machine has power. A machine that is being turned off still has.

        :raises DriverError: the BMC does not answer, or does not say.
        """
        with self._system() as system:
            if system.power_state is None:
                raise DriverError(f"the BMC of node {self._name} does not say whether the machine is on")
            return bool(system.power_state is not sushy.PowerState.OFF)

    def check(self, boot_device: str) -> None:
        """Changes nothing.

        :raises DriverError: the BMC does not answer, or the machine cannot boot from the device.
        """
        source = BOOT_DEVICES[boot_device]
        with self._system() as system:
            allowed = system.get_allowed_system_boot_source_values() if source is not None else {source}
        if source not in allowed:
            known = sorted(name for name, each in BOOT_DEVICES.items() if each in allowed)
            raise DriverError(
                f"node {self._name} cannot boot from {boot_device}; its BMC knows {', '.join(known) or 'no boot devices'}. Say "
                "another one with the extra spec redfish:boot_device of the flavor"
            )

    def boot_once_from(self, boot_device: str) -> None:
        """Has the machine boot from a device the next time that it is turned on, and as it is set up after that.

        :raises DriverError: the BMC does not answer, or refuses it.
        """
        source = BOOT_DEVICES[boot_device]
        if source is not None:
            with self._system() as system:
                system.set_system_boot_options(source, enabled=sushy.BootSourceOverrideEnabled.ONCE)

    def is_to_boot_once(self) -> bool:
        """Returns whether the BMC shows a boot device that is set for the next boot alone.

        :raises DriverError: the BMC does not answer.
        """
        with self._system() as system:
            return system.boot is not None and system.boot.enabled is sushy.BootSourceOverrideEnabled.ONCE

    def end_boot_once(self) -> None:
        """Has the machine boot as it is set up the next time too: takes :meth:`boot_once_from` back.

        :raises DriverError: the BMC does not answer, or refuses it.
        """
        with self._system() as system:
            system.set_system_boot_options(enabled=sushy.BootSourceOverrideEnabled.DISABLED)

    def turn_on(self) -> None:
        """Turns the machine on; returns when it is seen to be on.

        :raises DriverError: it was not seen to be on in time.
        """
        with self._system() as system:
            if system.power_state is sushy.PowerState.ON:
                return
            allowed = system.get_allowed_reset_system_values()
            on, force_on = sushy.ResetType.ON, sushy.ResetType.FORCE_ON
            system.reset_system(force_on if on not in allowed and force_on in allowed else on)
            self._wait(system, sushy.PowerState.ON, self._power_timeout)

    def turn_off(self, *, shutdown: float = 0.0) -> None:
        """Turns the machine off; returns when it is seen to be off.

        The power is cut in each case. A machine that seems to be off may be about to be on, and some BMCs say Off for a moment of
        a machine that runs.

        :param shutdown: seconds that its operating system gets to end before its power is cut.
        :raises DriverError: it was not seen to be off in time.
        """
        with self._system() as system:
            off = system.power_state is sushy.PowerState.OFF
            graceful = sushy.ResetType.GRACEFUL_SHUTDOWN
            if shutdown > 0 and not off and graceful in system.get_allowed_reset_system_values():
                system.reset_system(graceful)
                with contextlib.suppress(DriverError):
                    self._wait(system, sushy.PowerState.OFF, shutdown)
            try:
                system.reset_system(sushy.ResetType.FORCE_OFF)
            except (sushy_errors.HTTPError, sushy_errors.InvalidParameterValueError):
                # Some BMCs refuse to turn off what is off, or do not offer it then.
                system.refresh(force=True)
                if system.power_state is not sushy.PowerState.OFF:
                    raise
            self._wait(system, sushy.PowerState.OFF, self._power_timeout)

    def _wait(self, system: Any, wanted: Any, seconds: float) -> None:
        end = self._clock.monotonic() + seconds
        pause = _FIRST
        while True:
            system.refresh(force=True)
            if system.power_state is wanted:
                return
            if self._clock.monotonic() >= end:
                raise DriverError(
                    f"node {self._name} was to be turned {wanted.value.lower()}, and its BMC has not said so within {seconds:g} "
                    "seconds"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    @contextlib.contextmanager
    def _system(self) -> Iterator[Any]:
        """The machine as the BMC describes it now."""
        try:
            root = sushy.Sushy(
                self._address,
                auth=sushy_auth.BasicAuth(self._user, self._password),
                verify=self._verify,
                # The next look comes soon enough.
                server_side_retries=1,
                server_side_retries_delay=1,
                connect_timeout=self._timeout,
                read_timeout=self._timeout,
            )
            yield root.get_system(self._system_id)
        except sushy_errors.SushyError as error:
            raise BmcError(
                self._sentence(error), f"The BMC of node {self._name} ({self._address}) failed: {error}"
            ) from error

    def _sentence(self, error: sushy_errors.SushyError) -> str:
        name = self._name
        kinds: tuple[tuple[type[Exception], str], ...] = (
            (
                sushy_errors.AccessError,
                f"the BMC of node {name} does not accept the user name and password of the node",
            ),
            (sushy_errors.ConnectionError, f"the BMC of node {name} does not answer"),
            (
                sushy_errors.UnknownDefaultError,
                f"the BMC of node {name} has not exactly one system, and driver_info of the node has no redfish_system_id",
            ),
            (
                sushy_errors.ResourceNotFoundError,
                f"the BMC of node {name} knows no such system as driver_info of the node names",
            ),
        )
        said = next(
            (text for kind, text in kinds if isinstance(error, kind)), f"the BMC of node {name} refused or failed"
        )
        return f"{said}; the log of the service says more"

    def _checked_address(self, address: Any) -> str:
        text = str(address or "")
        text = text if "://" in text or not text else f"https://{text}"
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise DriverError(
                f"driver_info of node {self._name} has no redfish_address, or one that is no URL like https://bmc-1.example.com; "
                "user name and password belong in redfish_username and redfish_password"
            )
        return text


def _verify(given: Any) -> bool | str:
    """Returns whether certificates are checked, or the file of certificates that are trusted."""
    if isinstance(given, bool):
        return given
    return _FLAGS.get(str(given).lower(), str(given))
