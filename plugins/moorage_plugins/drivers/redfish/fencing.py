# SPDX-License-Identifier: Apache-2.0
"""The fencing driver ``redfish``: cuts the power of a host's machines through their BMCs."""

from __future__ import annotations

from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage.drivers.interface import FencingDriver, Machine
from moorage_plugins.drivers.redfish.bmc import Bmc, BmcError

__all__ = ["RedfishFencing"]

LOG = logging.getLogger(__name__)


class RedfishFencing(FencingDriver):
    """Cuts the power of machines whose BMCs speak Redfish."""

    api_version: ClassVar[tuple[int, int]] = (1, 2)

    @override
    def turn_off(self, machine: Machine) -> None:
        try:
            Bmc(machine, self.conf.driver_redfish, self.clock).turn_off()
        except BmcError as error:
            LOG.warning("%s", error.detail)
            raise
