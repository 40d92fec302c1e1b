# SPDX-License-Identifier: Apache-2.0
"""The policy of cleaners, as the configuration gives it."""

from __future__ import annotations

import unittest

from oslo_config import cfg

from moorage import errors
from moorage.cleanup import options
from moorage.cleanup.cleaner import Policy
from moorage.cleanup.dry_run import blocked_reason


class PolicyTests(unittest.TestCase):
    def policy(self, **changes: object) -> Policy:
        conf = cfg.ConfigOpts()
        options.register_opts(conf)
        conf([], project="moorage", default_config_files=[])
        for name, value in changes.items():
            conf.set_override(name, value, group="cleanup")
        return Policy.from_config(conf.cleanup)

    def test_the_defaults_of_both_are_the_same(self) -> None:
        self.assertEqual(self.policy(), Policy(limits={}))

    def test_limits_are_positive_numbers(self) -> None:
        self.assertEqual(self.policy(limits={"volume": "2"}).limits, {"volume": 2})
        for wrong in ("0", "many", "-1"):
            with self.assertRaisesRegex(errors.ConfigError, r"\[cleanup\] limits gives volume"):
                self.policy(limits={"volume": wrong})

    def test_a_star_pauses_every_type(self) -> None:
        self.assertIn("paused", blocked_reason("volume", self.policy(paused=["*"]).paused, ["volume"]))
        self.assertIn("paused", blocked_reason("volume", self.policy(paused=["volume"]).paused, ["volume"]))
        self.assertEqual(blocked_reason("backup", self.policy(paused=["volume"]).paused, ["backup"]), "")
        self.assertIn("no enabled handler", blocked_reason("backup", self.policy().paused, ["volume"]))
