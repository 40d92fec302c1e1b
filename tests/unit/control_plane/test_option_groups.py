# SPDX-License-Identifier: Apache-2.0
"""Configurations of one process do not share values."""

from __future__ import annotations

import importlib
import pkgutil
import unittest
from types import ModuleType

from oslo_config import cfg

import moorage
import moorage_plugins


def _modules() -> list[ModuleType]:
    """All modules of options that can be registered by themselves."""
    found = [
        importlib.import_module(each.name)
        for package in (moorage, moorage_plugins)
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if each.name.endswith(".options")
    ]
    return [each for each in found if hasattr(each, "register_opts")]


class OptionGroupTests(unittest.TestCase):
    def test_what_is_set_in_one_configuration_is_not_set_in_another_one(self) -> None:
        # oslo.config copies a group that is registered, and its copies share the values.
        modules = _modules()
        self.assertGreater(len(modules), 10)
        for module in modules:
            first, second = cfg.ConfigOpts(), cfg.ConfigOpts()
            for conf in (first, second):
                module.register_opts(conf)
                conf([])
            for name in first:
                found = first[name]
                for dest in found if isinstance(found, cfg.ConfigOpts.GroupAttr) else ():
                    with self.subTest(option=f"[{name}] {dest}"):
                        before = second[name][dest]
                        first.set_override(dest, None, group=name)
                        self.addCleanup(first.clear_override, dest, group=name)
                        self.assertEqual(before, second[name][dest])
                        self.assertNotIn("override", second._get_opt_info(dest, name))
