# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: those that Moorage formats itself are oslo.log's, character by character."""

from __future__ import annotations

import copy
import itertools
import logging as stdlib_logging
import unittest
from typing import Any

from oslo_config import cfg
from oslo_log import formatters
from oslo_log import log as logging

from moorage import context
from moorage.control_plane import logs

_FULL = {
    "user": "u1", "project_id": "p1", "domain": "d1", "system_scope": "all", "user_domain": "ud", "project_domain": "pd",
    "request_id": "req-1", "global_request_id": "req-0",
}  # fmt: skip


class LineTests(unittest.TestCase):
    def setUp(self) -> None:
        conf = cfg.ConfigOpts()
        logging.register_options(conf)
        conf([])
        self.theirs = formatters.ContextFormatter(datefmt=conf.log_date_format, config=conf)
        self.ours = logs._InfoLines(self.theirs)
        self.addCleanup(context.anonymous().update_store)

    def records(self) -> list[stdlib_logging.LogRecord]:
        """Records of several levels, with and without arguments, exceptions and what a caller adds."""
        found: list[stdlib_logging.LogRecord] = []

        class Collector(stdlib_logging.Handler):
            def emit(self, record: stdlib_logging.LogRecord) -> None:
                found.append(record)

        log = logging.getLogger("moorage.somewhere")
        root, collector = stdlib_logging.getLogger("moorage.somewhere"), Collector()
        root.addHandler(collector)
        self.addCleanup(root.removeHandler, collector)
        level, root.propagate = root.level, False
        root.setLevel(stdlib_logging.DEBUG)
        self.addCleanup(root.setLevel, level)
        self.addCleanup(setattr, root, "propagate", True)
        log.info("plain")
        log.info("%s of %d", "one", 2)
        log.info("100 %")
        log.info("of an instance", instance_uuid="i1")
        log.info("of another request", context=context.from_dict({"request_id": "req-9"}))
        log.debug("details")
        log.warning("careful")
        root.info("of a library")
        try:
            raise ValueError("a mistake")
        except ValueError:
            log.info("with a stack", exc_info=True)
            log.error("in an error")
        found[0].created, found[0].msecs = 1.0, 7.999
        return found

    def test_lines_are_as_oslo_log_writes_them(self) -> None:
        contexts: list[dict[str, Any]] = [
            {},
            {"request_id": "req-1"},
            _FULL,
            {**_FULL, "resource_uuid": "r1"},
            {**_FULL, "user": None},
        ]
        for values, record in itertools.product(contexts, self.records()):
            context.from_dict(values).update_store()
            with self.subTest(record.msg, **values):
                self.assertEqual(self.theirs.format(copy.copy(record)), self.ours.format(copy.copy(record)))

    def test_the_formats_are_the_defaults_of_oslo_log(self) -> None:
        conf = cfg.ConfigOpts()
        logging.register_options(conf)
        conf([])
        self.assertEqual(logs._FORMATS, {name: conf[name] for name in logs._FORMATS})
