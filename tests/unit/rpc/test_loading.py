# SPDX-License-Identifier: Apache-2.0
"""From [rpc] transport_url to a transport."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.rpc import options
from moorage.rpc.loading import open_transport, plugin_name
from moorage_plugins.transports.local import LocalTransport
from moorage_plugins.transports.memory import MemoryTransport


class LoadingTests(unittest.TestCase):
    def conf(self, **values: object) -> cfg.ConfigOpts:
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        options.register_opts(conf)
        for name, value in values.items():
            conf.set_override(name, value, group="rpc")
        return conf

    def test_the_scheme_chooses(self) -> None:
        urls = {
            "local://": "local",
            "local:///run/x": "local",
            "memory://": "memory",
            "rabbit://user:s3cret@host:5672/": "oslo",
            "kombu+memory://": "oslo",
            "fake://": "oslo",
        }
        self.assertEqual(urls, {url: plugin_name(url) for url in urls})

    def test_an_unknown_scheme_names_the_known_ones_and_not_the_password(self) -> None:
        for url in ("rabit://user:s3cret@host/", "local", ""):
            with self.assertRaisesRegex(errors.ConfigError, "local.*rabbit") as caught:
                plugin_name(url)
            self.assertNotIn("s3cret", str(caught.exception))

    def test_the_chosen_transport_is_made(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for values, expected in (
                ({"run_dir": folder}, LocalTransport),
                ({"transport_url": f"local://{folder}"}, LocalTransport),
                ({"transport_url": "memory://x"}, MemoryTransport),
            ):
                transport = open_transport(self.conf(**values), SystemClock())
                self.addCleanup(transport.close)
                self.assertIs(expected, type(transport))

    def test_a_local_url_that_cannot_work_is_refused(self) -> None:
        for values in ({}, {"transport_url": "local://run/moorage"}):
            with self.assertRaises(errors.ConfigError):
                open_transport(self.conf(**values), SystemClock())

    def test_an_url_that_oslo_messaging_does_not_take_is_refused_without_its_password(self) -> None:
        with self.assertRaises(errors.ConfigError) as caught:
            open_transport(self.conf(transport_url="rabbit://user:s3cret@host:port/"), SystemClock())
        self.assertNotIsInstance(caught.exception, errors.PluginLoadError)
        self.assertNotIn("s3cret", str(caught.exception))

    def test_a_thread_that_loads_oslo_messaging_can_be_joined(self) -> None:
        # In a process of its own, because it is the first import that does the harm.
        program = (
            "import threading\n"
            "def load(): import moorage_plugins.transports.oslo\n"
            "thread = threading.Thread(target=load, daemon=True); thread.start(); thread.join(60)\n"
            "raise SystemExit(thread.is_alive())\n"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=_environment())

    def test_overrides_stay_in_their_configuration(self) -> None:
        self.conf(threads=77).set_default("run_dir", "/elsewhere", group="rpc")
        self.assertEqual((16, None), (self.conf().rpc.threads, self.conf().rpc.run_dir))

    def test_a_transport_of_somebody_else_is_found_by_its_scheme(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            info = Path(folder, "probe-1.0.dist-info")
            info.mkdir()
            info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
            info.joinpath("entry_points.txt").write_text(
                "[moorage.transports]\nprobe = moorage_plugins.transports.memory:MemoryTransport\n"
            )
            with mock.patch("sys.path", [folder, *sys.path]):
                self.assertEqual("probe", plugin_name("probe://x"))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
