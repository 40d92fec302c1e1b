# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: those that Moorage formats itself are oslo.log's, character by character; threads share their writes."""

from __future__ import annotations

import functools
import io
import logging as stdlib_logging
import logging.handlers as stdlib_handlers
import re
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from oslo_config import cfg
from oslo_log import log as logging

from moorage import context
from moorage.control_plane import logs

_FULL = {
    "user": "u1", "project_id": "p1", "domain": "d1", "system_scope": "all", "user_domain": "ud", "project_domain": "pd",
    "request_id": "req-1", "global_request_id": "req-0",
}  # fmt: skip


class _Root:
    """The root logger, set up by options; it gets its handlers back at the end."""

    def __init__(self, case: unittest.TestCase, *options: str, default_format: str | None = None) -> None:
        root = stdlib_logging.getLogger()
        case.addCleanup(root.setLevel, root.level)
        case.addCleanup(setattr, root, "handlers", list(root.handlers))
        case.addCleanup(setattr, logs._InfoLogger, "lines", logs._InfoLogger.lines)
        # Another test of this thread may have left its request.
        context.anonymous().update_store()
        case.addCleanup(context.anonymous().update_store)
        conf = cfg.ConfigOpts()
        logging.register_options(conf)
        conf(list(options))
        if default_format is not None:
            conf.set_override("logging_default_format_string", default_format)
        self.written = io.StringIO()
        with mock.patch.object(sys, "stdout", self.written):
            logs.setup(conf, "moorage-test")

    def take(self) -> str:
        """Returns what was written since the last call."""
        text = self.written.getvalue()
        self.written.seek(0)
        self.written.truncate()
        return text


class LineTests(unittest.TestCase):
    def log_lines(self) -> None:
        """Logs lines of several levels, with and without arguments, exceptions and what a caller adds."""
        log = logging.getLogger("moorage.somewhere")
        log.info("plain")
        log.info("%s of %d", "one", 2)
        log.info("100 %")
        log.info({"a": 1})
        log.info("%(a)s", {"a": 1})
        log.info("a lone \ud800")
        log.info("of an instance", instance_uuid="i1")
        log.info("of another request", context=context.from_dict({"request_id": "req-9"}))
        log.debug("details")
        log.warning("careful")
        stdlib_logging.getLogger("moorage.somewhere").info("of a library")
        try:
            raise ValueError("a mistake")
        except ValueError:
            log.info("with a stack", exc_info=True)
            log.error("in an error")

    def test_lines_are_as_oslo_log_writes_them(self) -> None:
        root = _Root(self)
        contexts: list[dict[str, Any]] = [
            {},
            {"request_id": "req-1"},
            _FULL,
            {**_FULL, "resource_uuid": "r1"},
            {**_FULL, "user": None},
        ]
        date = re.compile(r"^[-0-9]{10} [:0-9]{8}\.[0-9]{3} ", re.MULTILINE)
        for values in contexts:
            context.from_dict(values).update_store()
            self.log_lines()
            ours = root.take()
            with mock.patch.object(logs._InfoLogger, "lines", None):
                self.log_lines()
            theirs = root.take()
            with self.subTest(**values):
                self.assertLessEqual(12, len(date.findall(ours)))
                self.assertEqual(date.sub("", theirs), date.sub("", ours))

    def test_lines_have_the_time_as_oslo_log_writes_it(self) -> None:
        root = _Root(self)
        for moment in (1.0, 1.25, 1764366300.9996, 1764366301.001):
            with mock.patch("time.time", return_value=moment):
                logging.getLogger("moorage.somewhere").info("now")
                with mock.patch.object(logs._InfoLogger, "lines", None):
                    logging.getLogger("moorage.somewhere").info("now")
            first, second = root.take().splitlines()
            self.assertEqual(second, first)

    def test_a_line_of_level_info_needs_no_record(self) -> None:
        root = _Root(self)
        with mock.patch.object(stdlib_logging.Logger, "makeRecord") as made:
            logging.getLogger("moorage.somewhere").info("%s", "quick")
        made.assert_not_called()
        self.assertIn(" INFO moorage.somewhere [-] quick\n", root.take())

    def test_other_handlers_and_filters_get_their_records(self) -> None:
        root = _Root(self)
        log = logging.getLogger("moorage.somewhere")
        with self.assertLogs("moorage.somewhere", "INFO") as caught:
            log.info("to another handler")
        self.assertEqual((["INFO:moorage.somewhere:to another handler"], ""), (caught.output, root.take()))
        with self.assertLogs(None, "INFO") as caught:
            log.info("to another root handler")
        self.assertEqual((["INFO:moorage.somewhere:to another root handler"], ""), (caught.output, root.take()))
        log.logger.addFilter(refuse := lambda record: False)
        self.addCleanup(log.logger.removeFilter, refuse)
        log.info("filtered")
        self.assertEqual("", root.take())

    def test_a_line_that_is_wrong_is_reported_and_raises_nothing(self) -> None:
        root = _Root(self)
        with mock.patch.object(sys, "stderr", io.StringIO()) as reported:
            logging.getLogger("moorage.somewhere").info("%d", "no number")
        self.assertEqual("", root.take())
        self.assertIn("no number", reported.getvalue())

    def test_a_line_that_cannot_be_written_is_reported_once_and_raises_nothing(self) -> None:
        root = _Root(self)
        with (
            mock.patch.object(sys, "stderr", io.StringIO()) as reported,
            mock.patch.object(root.written, "write", side_effect=OSError("full")),
        ):
            logging.getLogger("moorage.somewhere").info("lost")
        self.assertEqual(1, reported.getvalue().count("OSError: full"))

    def test_records_name_their_caller(self) -> None:
        root = _Root(self, default_format="%(funcName)s %(message)s")
        logging.getLogger("moorage.somewhere").info("info")
        logging.getLogger("moorage.somewhere").warning("warning")
        stdlib_logging.getLogger("moorage.somewhere").warning("of a library")
        self.assertEqual({"test_records_name_their_caller"}, {each.split()[0] for each in root.take().splitlines()})

    def test_other_formats_are_written_as_configured(self) -> None:
        for make, expected in (
            (functools.partial(_Root, self, "--use-json"), r'^{.*"message": "a line"'),
            (functools.partial(_Root, self, default_format="mine %(message)s"), r"^mine a line$"),
            (functools.partial(_Root, self, "--log-date-format", "%H"), r"^\d\d\.\d{3} .* \[-\] a line$"),
        ):
            root = make()
            logging.getLogger("moorage.somewhere").info("a line")
            with self.subTest(expected):
                self.assertRegex(root.take(), expected)

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

    def test_handlers_that_only_write_are_wrapped(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _Root(self, "--log-file", str(Path(folder, "log")))
            root = stdlib_logging.getLogger()
            self.assertEqual([logs._JointWrites], [type(each) for each in root.handlers])
            logging.getLogger("moorage.somewhere").info("one line")
            self.assertIn(" INFO moorage.somewhere [-] one line\n", Path(folder, "log").read_text())
            for each in list(root.handlers):
                root.removeHandler(each)
                each.close()
