# SPDX-License-Identifier: Apache-2.0
"""Transport local on the conformance kit."""

from __future__ import annotations

import shutil
import tempfile
import unittest

from moorage.testing.transport import TransportTests
from moorage_plugins.transports.local import LocalTransport


class LocalTransportTests(TransportTests, unittest.TestCase):
    transport_class = LocalTransport

    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.url = f"local://{folder}"


class LocalTransportInADeepFolderTests(LocalTransportTests):
    """Paths that do not fit into a socket's address."""

    def setUp(self) -> None:
        super().setUp()
        self.url = "/".join([self.url, *["a-long-name-of-a-folder"] * 6])
