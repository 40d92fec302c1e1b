# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: those that Moorage formats itself are oslo.log's, character by character; threads share their writes."""

from __future__ import annotations

import copy
import io
import itertools
import logging as stdlib_logging
import logging.handlers as stdlib_handlers
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

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


class _Gate(io.StringIO):
    """A stream on which writing ends when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.opened = threading.Event(), threading.Event()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        self.writing.set()
        if not self.opened.wait(30):
            raise TimeoutError
        return super().write(text)


def _record(text: str) -> stdlib_logging.LogRecord:
    return stdlib_logging.LogRecord("a", stdlib_logging.INFO, "f", 1, text, None, None)


class JointWriteTests(unittest.TestCase):
    def test_lines_of_many_threads_are_whole_and_each_is_there_once(self) -> None:
        stream = io.StringIO()
        handler = logs._JointWrites(stdlib_logging.StreamHandler(stream))
        begin = threading.Barrier(16)

        def log(number: int) -> None:
            begin.wait()
            for line in range(200):
                handler.handle(_record(f"{number} {line}"))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.addCleanup(sys.setswitchinterval, before)
        threads = [threading.Thread(target=log, args=(number,)) for number in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        lines = stream.getvalue().splitlines()
        self.assertEqual(sorted(f"{number} {line}" for number in range(16) for line in range(200)), sorted(lines))
        for number in range(16):
            mine = [int(line.split()[1]) for line in lines if line.startswith(f"{number} ")]
            self.assertEqual(sorted(mine), mine)

    def test_a_thread_does_not_wait_for_one_that_writes(self) -> None:
        stream = _Gate()
        handler = logs._JointWrites(stdlib_logging.StreamHandler(stream))
        writer = threading.Thread(target=handler.handle, args=(_record("slow"),))
        writer.start()
        self.assertTrue(stream.writing.wait(30))
        for text in ("a", "b"):
            handler.handle(_record(text))
        self.assertEqual("", stream.getvalue())
        stream.opened.set()
        writer.join()
        self.assertEqual("slow\na\nb\n", stream.getvalue())
        self.assertEqual(["slow\n", "a\nb\n"], stream.writes)

    def test_if_too_many_lines_wait_their_threads_do(self) -> None:
        stream = _Gate()
        handler = logs._JointWrites(stdlib_logging.StreamHandler(stream))
        handler.most = 2
        threads = [threading.Thread(target=handler.handle, args=(_record("slow"),))]
        threads[0].start()
        self.assertTrue(stream.writing.wait(30))
        for text in ("a", "b"):
            handler.handle(_record(text))
        threads.append(threading.Thread(target=handler.handle, args=(_record("c"),)))
        threads[1].start()
        threads[1].join(0.2)
        self.assertTrue(threads[1].is_alive())
        stream.opened.set()
        for each in threads:
            each.join()
        self.assertEqual("slow\na\nb\nc\n", stream.getvalue())

    def test_a_file_that_was_moved_away_is_opened_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "log")
            handler = logs._JointWrites(stdlib_handlers.WatchedFileHandler(path))
            self.addCleanup(handler.close)
            handler.handle(_record("before"))
            path.rename(Path(folder, "old"))
            handler.handle(_record("after"))
            self.assertEqual(("before\n", "after\n"), (Path(folder, "old").read_text(), path.read_text()))

    def test_a_line_that_cannot_be_written_raises_nothing_and_holds_up_no_later_one(self) -> None:
        stream = io.StringIO()
        handler = logs._JointWrites(stdlib_logging.StreamHandler(stream))
        with (
            mock.patch.object(stream, "write", side_effect=OSError("full")),
            mock.patch.object(sys, "stderr", io.StringIO()),
        ):
            handler.handle(_record("lost"))
        handler.handle(_record("kept"))
        self.assertEqual("kept\n", stream.getvalue())

    def kept_root(self) -> stdlib_logging.Logger:
        """The root logger, which gets back at the end what :func:`logs.setup` changes."""
        root = stdlib_logging.getLogger()
        self.addCleanup(root.setLevel, root.level)
        self.addCleanup(setattr, root, "handlers", list(root.handlers))
        for name in ("_srcfile", "logThreads", "logMultiprocessing"):
            self.addCleanup(setattr, stdlib_logging, name, getattr(stdlib_logging, name))
        return root

    def test_handlers_that_only_write_are_wrapped(self) -> None:
        root = self.kept_root()
        with tempfile.TemporaryDirectory() as folder:
            conf = cfg.ConfigOpts()
            logging.register_options(conf)
            conf(["--log-file", str(Path(folder, "log"))])
            logs.setup(conf, "moorage-test")
            # Another test of this thread may have left its request.
            context.anonymous().update_store()
            self.assertEqual([logs._JointWrites], [type(each) for each in root.handlers])
            logging.getLogger("moorage.somewhere").info("one line")
            self.assertIn(" INFO moorage.somewhere [-] one line\n", Path(folder, "log").read_text())
            self.assertIsNone(stdlib_logging._srcfile)
            for each in list(root.handlers):
                root.removeHandler(each)
                each.close()

    def test_callers_are_collected_for_formats_that_may_name_them(self) -> None:
        root = self.kept_root()
        for options in (["--debug"], ["--log-date-format", "%H"], ["--use-json"]):
            conf = cfg.ConfigOpts()
            logging.register_options(conf)
            conf(options)
            if "--log-date-format" in options:
                conf.set_override("logging_default_format_string", "%(lineno)d %(message)s")
            with self.subTest(options), mock.patch.object(sys, "stdout", io.StringIO()) as written:
                logs.setup(conf, "moorage-test")
                stdlib_logging.getLogger("moorage.somewhere").debug("a line")
                stdlib_logging.getLogger("moorage.somewhere").warning("another")
                self.assertIsNotNone(stdlib_logging._srcfile)
                self.assertIn("another", written.getvalue())
            for each in list(root.handlers):
                root.removeHandler(each)
