# SPDX-License-Identifier: Apache-2.0
"""The conformance kit of compute drivers.

Mix it into a ``unittest.TestCase`` and say how the driver is made, and how a test sees from outside what really runs::

    class MyDriverTests(ComputeDriverTests, unittest.TestCase):
        def make_driver(self, tools):
            return MyDriver(tools)

        def list_opts(self):
            return my_package.options.list_opts()

        def copies(self, host, uuid):                 # asks the hypervisor, not the driver
            return [each.id for each in my_hypervisor.domains(host) if each.name == uuid]

Tests kill the driver at its steps: a forked process does the call, and ends without any cleaning up before one of the lines of the
driver's package. Then a new driver goes on.
"""

from __future__ import annotations

from moorage.testing.drivers.fencing import SelfFencingTests
from moorage.testing.drivers.lifecycle import LifecycleTests
from moorage.testing.drivers.moves import MoveTests

__all__ = ["ComputeDriverTests"]


class ComputeDriverTests(LifecycleTests, MoveTests, SelfFencingTests):
    """What every compute driver must hold to."""
