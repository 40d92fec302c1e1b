# SPDX-License-Identifier: Apache-2.0
"""Transport oslo on the conformance kit, with a real RabbitMQ."""

from __future__ import annotations

import unittest

from moorage.testing.transport import TransportTests
from moorage_plugins.transports.oslo import OsloTransport
from tests import servers


class RabbitmqTransportTests(TransportTests, unittest.TestCase):
    transport_class = OsloTransport

    def setUp(self) -> None:
        self.url = servers.shared("rabbitmq").url
