# SPDX-License-Identifier: Apache-2.0
"""Configures the log of a process by oslo.log's options."""

from __future__ import annotations

import collections
import functools
import logging as stdlib_logging
import logging.handlers as stdlib_handlers
import os
from pathlib import Path
from typing import Any

from oslo_config import cfg
from oslo_context import context as oslo_context
from oslo_log import formatters
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.context import RequestContext

__all__ = ["check", "setup"]

#: The formats that :class:`_InfoLines` writes: oslo.log's defaults.
_FORMATS = {
    "logging_context_format_string": "%(asctime)s.%(msecs)03d %(process)d %(levelname)s %(name)s "
    "[%(global_request_id)s %(request_id)s %(user_identity)s] %(instance)s%(message)s",
    "logging_default_format_string": "%(asctime)s.%(msecs)03d %(process)d %(levelname)s %(name)s [-] "
    "%(instance)s%(message)s",
    "logging_user_identity_format": "%(user)s %(project)s %(domain)s %(system_scope)s %(user_domain)s %(project_domain)s",
}
#: Handlers that do nothing but write lines: others rotate files, or color lines.
_PLAIN = (stdlib_logging.StreamHandler, stdlib_handlers.WatchedFileHandler)
#: What a record has beside its text where the caller gave no more (an instance, another context).
_NO_EXTRA = ["project", "version"]


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse a log that could not be opened; opens nothing.

    :raises ConfigError: names the option and the file or folder that is not there.
    """
    if conf.log_config_append and not Path(conf.log_config_append).is_file():
        raise errors.ConfigError(f"[DEFAULT] log_config_append = {conf.log_config_append}: there is no such file.")
    if conf.log_dir and not Path(conf.log_dir).is_dir():
        raise errors.ConfigError(f"[DEFAULT] log_dir = {conf.log_dir}: there is no such folder; make it.")
    if conf.log_file:
        folder = Path(os.path.join(conf.log_dir or "", conf.log_file)).absolute().parent
        if not folder.is_dir():
            raise errors.ConfigError(f"[DEFAULT] log_file = {conf.log_file}: there is no folder {folder}; make it.")


def setup(conf: cfg.ConfigOpts, name: str) -> None:
    """Open the log of the process.

    Text of others that UTF-8 cannot hold is written with escapes; logging would tell of its own failure instead.

    :param name: what lines are told under, and the file in ``log_dir`` is called.
    :raises ConfigError: it cannot be opened.
    """
    check(conf)
    try:
        logging.setup(conf, name)
    except (OSError, logging.LogConfigError) as error:
        raise errors.ConfigError(f"The log cannot be opened as [DEFAULT] has it: {error}") from error
    as_usual = all(conf[name] == text for name, text in _FORMATS.items())
    root = stdlib_logging.getLogger()
    # Whether all handlers write lines of the usual formats, and nothing else of a record.
    plain = not conf.debug
    for handler in list(root.handlers):
        formatter = handler.formatter
        # A formatter of a file log_config_append may be another class, or write fractions of a second in the date.
        if type(formatter) is formatters.ContextFormatter and formatter.datefmt and as_usual:
            formatter = _InfoLines(formatter)
        plain = plain and type(handler) in _PLAIN and type(formatter) is _InfoLines
        if formatter is not None:
            handler.setFormatter(_Encodable(formatter))
        if isinstance(handler, stdlib_logging.StreamHandler) and type(handler) in _PLAIN:
            root.removeHandler(handler)
            root.addHandler(_JointWrites(handler))
    if plain:
        _collect_only_what_is_written()


def _collect_only_what_is_written() -> None:
    """Stops collecting what the usual formats do not name: the caller, its thread, the name of its process.

    That is a third of the cost of a line. See "Optimization" in the HOWTO of :mod:`logging`.
    """
    stdlib_logging._srcfile = None
    stdlib_logging.logThreads = stdlib_logging.logMultiprocessing = False


class _JointWrites(stdlib_logging.Handler):
    """Writes lines to the stream of another handler; a thread does not wait while another one writes.

    Threads whose requests end together would wait for each other's writes. A thread that finds another one writing leaves its line
    to it, and is not kept; the writer takes all lines that are there at once. Each line is written before the writer returns.

    :param inner: formats the lines and has the stream. Its lock is held while lines are written.
    """

    #: So many lines wait at most: the thread that adds one more waits until they are written.
    most = 1000

    def __init__(self, inner: stdlib_logging.StreamHandler[Any]) -> None:
        super().__init__(inner.level)
        self.filters = inner.filters
        self._inner = inner
        self._lines: collections.deque[str] = collections.deque()

    @override
    def handle(self, record: stdlib_logging.LogRecord) -> Any:
        """As the standard library does it, without a lock: emit() may run in several threads."""
        # From Python 3.12 on, a filter may return another record.
        found: Any = self.filter(record)
        if found:
            self.emit(record if isinstance(found, bool) else found)
        return found

    @override
    def emit(self, record: stdlib_logging.LogRecord) -> None:
        try:
            self._lines.append(self._inner.format(record) + self._inner.terminator)
            # Another thread may have added a line after the writer looked, and before it let the lock go.
            while self._lines:
                if not self._lock.acquire(blocking=len(self._lines) > self.most):
                    return
                try:
                    self._write()
                finally:
                    self._lock.release()
        except Exception:  # noqa: BLE001  (as the handlers of the standard library do)
            self.handleError(record)

    @override
    def flush(self) -> None:
        self._inner.flush()

    @override
    def close(self) -> None:
        self._inner.close()
        super().close()

    @property
    def _lock(self) -> Any:
        """The lock of the stream. A forked child has another one."""
        return self._inner.lock

    def _write(self) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        if not lines:
            return
        if isinstance(self._inner, stdlib_handlers.WatchedFileHandler):
            self._inner.reopenIfNeeded()
        self._inner.stream.write("".join(lines))
        self._inner.flush()


class _InfoLines(stdlib_logging.Formatter):
    """Formats lines of level INFO as oslo.log does with its default formats, in a fifth of the time.

    oslo.log fills in all fields that any format may name, for each line. It formats the lines that have more than a text: those
    of other levels, exceptions, and what the caller of the logger adds.
    """

    def __init__(self, inner: formatters.ContextFormatter) -> None:
        super().__init__(datefmt=inner.datefmt)
        self._inner = inner
        #: The last second that was formatted.
        self._second: tuple[int, str] = (0, "")

    @override
    def format(self, record: stdlib_logging.LogRecord) -> str:
        plain = record.levelno == stdlib_logging.INFO and not (record.exc_info or record.exc_text or record.stack_info)
        context = oslo_context.get_current()
        if (
            not plain
            or record.__dict__.get("extra_keys") != _NO_EXTRA
            or not (context is None or (type(context) is RequestContext and not context.resource_uuid))
        ):
            return self._inner.format(record)
        who = "-"
        if context is not None and context.request_id:
            identity = _identity(
                context.user_id, context.project_id, context.domain_id, context.system_scope, context.user_domain_id,
                context.project_domain_id,
            )  # fmt: skip
            who = f"{context.global_request_id} {context.request_id} {identity}"
        when = f"{self._time(record)}.{int(record.msecs):03d}"
        return f"{when} {record.process} {record.levelname} {record.name} [{who}] {record.getMessage()}"

    def _time(self, record: stdlib_logging.LogRecord) -> str:
        second, text = self._second
        if int(record.created) != second:
            text = self.formatTime(record, self.datefmt)
            self._second = int(record.created), text
        return text


@functools.lru_cache(1024)
def _identity(*parts: str | None) -> str:
    return " ".join([each or "-" for each in parts])


class _Encodable(stdlib_logging.Formatter):
    """Another formatter's lines, without lone surrogates: messages are ours and have none, tracebacks may."""

    def __init__(self, inner: stdlib_logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    @override
    def format(self, record: stdlib_logging.LogRecord) -> str:
        return self._inner.format(record).encode("utf-8", "backslashreplace").decode("utf-8")
