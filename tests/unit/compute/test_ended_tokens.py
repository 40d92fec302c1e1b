# SPDX-License-Identifier: Apache-2.0
"""What drivers remember of the workloads that they have destroyed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import unittest
from unittest import mock

from oslo_config import cfg

from moorage.drivers.ended_tokens import EndedTokens
from moorage.drivers.interface import DriverTools
from moorage.testing.clock import ManualClock

DAY = 86_400.0


class EndedTokensTests(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        conf = cfg.ConfigOpts()
        conf.register_opts([cfg.StrOpt("state_dir", default=holder.name)], group="control_plane")
        conf([], project="moorage", default_config_files=[])
        self.folder = f"{holder.name}/ended/mine/h"
        self.clock = ManualClock()
        self.tools = DriverTools(conf, self.clock, "h")

    def ended(self) -> EndedTokens:
        return EndedTokens("mine", self.tools)

    def test_the_highest_token_counts_in_each_process(self) -> None:
        one, other = (self.ended() for _ in range(2))
        self.assertEqual(0, one("i"))
        one.note("i", 3)
        other.note("i", 7)
        one.note("i", 5)
        other.note("j", 1)
        other.note("k", 0)
        for each in (one, other, self.ended()):
            self.assertEqual((7, 1, 0), (each("i"), each("j"), each("k")))

    def test_a_token_is_kept_for_a_day_at_least_and_not_for_ever(self) -> None:
        ended = self.ended()
        for number in range(8):
            ended.note(f"i{number}", 3)
            self.clock.advance(DAY / 4)
        self.assertEqual([3] * 4, [ended(f"i{number}") for number in range(4, 8)])
        self.clock.advance(DAY)
        ended.note("later", 1)
        self.assertEqual([0] * 4, [ended(f"i{number}") for number in range(4)])
        self.assertLessEqual(len(os.listdir(self.folder)), 2)

    def test_of_tokens_that_are_noted_at_once_the_highest_stays(self) -> None:
        tokens = range(1, 33)
        threads = [threading.Thread(target=self.ended().note, args=("i", token)) for token in tokens]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual(max(tokens), self.ended()("i"))

    def test_a_writer_that_was_killed_does_not_stop_the_next_one(self) -> None:
        ended = self.ended()
        ended.note("i", 1)
        (day,) = os.listdir(self.folder)
        os.symlink("2", f"{self.folder}/{day}/i.new")
        ended.note("i", 3)
        self.assertEqual(3, ended("i"))

    def test_a_folder_that_somebody_has_removed_is_made_again(self) -> None:
        ended = self.ended()
        ended.note("i", 3)
        shutil.rmtree(self.folder)
        ended.note("i", 2)
        self.assertEqual(2, ended("i"))

    def test_a_full_disk_does_not_stop_a_destruction(self) -> None:
        ended = self.ended()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(os, "symlink", side_effect=full), self.assertLogs(level="WARNING") as logged:
            ended.note("i", 3)
        self.assertIn("No space left on device", logged.output[0])
        self.assertEqual(0, ended("i"))
