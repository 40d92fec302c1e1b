# SPDX-License-Identifier: Apache-2.0
"""Transport memory on the conformance kit."""

from __future__ import annotations

import unittest
import uuid

from moorage.testing.transport import TransportTests
from moorage_plugins.transports.memory import MemoryTransport


class MemoryTransportTests(TransportTests, unittest.TestCase):
    transport_class = MemoryTransport

    def setUp(self) -> None:
        self.url = f"memory://{uuid.uuid4()}"
