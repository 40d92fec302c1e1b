# SPDX-License-Identifier: Apache-2.0
"""Configures the log of a process by oslo.log's options."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging as stdlib_logging
import logging.handlers as stdlib_handlers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from oslo_config import cfg
from oslo_context import context as oslo_context
from oslo_log import formatters
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext

__all__ = ["check", "setup"]

#: The formats of :class:`_InfoLines`: oslo.log's defaults.
_FORMATS = {
    "logging_context_format_string": "%(asctime)s.%(msecs)03d %(process)d %(levelname)s %(name)s "
    "[%(global_request_id)s %(request_id)s %(user_identity)s] %(instance)s%(message)s",
    "logging_default_format_string": "%(asctime)s.%(msecs)03d %(process)d %(levelname)s %(name)s [-] "
    "%(instance)s%(message)s",
    "logging_user_identity_format": "%(user)s %(project)s %(domain)s %(system_scope)s %(user_domain)s %(project_domain)s",
}
#: Handlers that do nothing but write lines: others rotate files, or color lines.
_PLAIN = (stdlib_logging.StreamHandler, stdlib_handlers.WatchedFileHandler)
#: What oslo.log's adapter adds to a line where the caller gave no more (an instance, another context).
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

    :param name: the name of the program in lines, and of the file in ``log_dir``.
    :raises ConfigError: it cannot be opened.
    """
    check(conf)
    try:
        logging.setup(conf, name)
    except (OSError, logging.LogConfigError) as error:
        raise errors.ConfigError(f"The log cannot be opened as [DEFAULT] has it: {error}") from error
    root = stdlib_logging.getLogger()
    as_usual = all(conf[name] == text for name, text in _FORMATS.items())
    date_formats = {_date_format(each) if as_usual else None for each in root.handlers}
    for handler in list(root.handlers):
        if isinstance(handler, stdlib_logging.StreamHandler) and type(handler) in _PLAIN:
            root.removeHandler(handler)
            root.addHandler(_JointWrites(handler))
        elif handler.formatter is not None:
            handler.setFormatter(_Encodable(handler.formatter))
    date_format = date_formats.pop() if len(date_formats) == 1 else None
    _InfoLogger.lines = _InfoLines(root.handlers, date_format) if date_format else None
    # The loggers that exist, and those that plugins make later.
    stdlib_logging.setLoggerClass(_InfoLogger)
    for logger in list(stdlib_logging.Logger.manager.loggerDict.values()):
        if type(logger) is stdlib_logging.Logger:
            logger.__class__ = _InfoLogger


def _date_format(handler: stdlib_logging.Handler) -> str | None:
    """Returns how a handler writes dates; None if it does not write all lines of level INFO by oslo.log's formats."""
    formatter = handler.formatter
    # A formatter of a file log_config_append may be another class, or write fractions of a second in the date.
    if type(handler) not in _PLAIN or type(formatter) is not formatters.ContextFormatter:
        return None
    return formatter.datefmt if handler.level <= stdlib_logging.INFO and not handler.filters else None


class _JointWrites(stdlib_logging.Handler):
    """Writes the log lines of several threads together, to the stream of another handler.

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
            self.write(self._inner.format(record))
        except Exception:  # noqa: BLE001  (as the handlers of the standard library do)
            self.handleError(record)

    def write(self, line: str) -> None:
        """Writes a line, or leaves it to the thread that writes now."""
        self._lines.append(line + self._inner.terminator)
        # Another thread may have added a line after the writer looked, and before it let the lock go.
        while self._lines:
            if not self._lock.acquire(blocking=len(self._lines) > self.most):
                return
            try:
                self._write()
            finally:
                self._lock.release()

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
        stream = self._inner.stream
        stream.write(_encodable("".join(lines)))
        # The handler would take its lock, which this thread has.
        stream.flush()


class _InfoLines:
    """Writes log lines of level INFO in oslo.log's default formats, in a third of the time that oslo.log takes.

    oslo.log fills in all fields that any format may name, for each line.

    :param handlers: all handlers of the root logger; each is a :class:`_JointWrites`.
    """

    def __init__(self, handlers: Sequence[stdlib_logging.Handler], date_format: str) -> None:
        self._handlers = [each for each in handlers if isinstance(each, _JointWrites)]
        self._formatter = stdlib_logging.Formatter(datefmt=date_format)
        self._clock = SystemClock()
        #: The last second that was formatted.
        self._second: tuple[int, str] = (0, "")

    def are_all_of(self, logger: stdlib_logging.Logger) -> bool:
        """Returns whether the handlers of a logger are exactly these handlers."""
        above: stdlib_logging.Logger | None = logger
        while above is not None and above.parent is not None:
            if above.handlers or not above.propagate:
                return False
            above = above.parent
        return above is not None and above.handlers == self._handlers

    def write(self, name: str, message: str) -> bool:
        """Writes a line. Returns False, and writes nothing, if the request context has fields that these lines do not show."""
        context = oslo_context.get_current()
        who = "-"
        if context is not None:
            if type(context) is not RequestContext or context.resource_uuid:
                return False
            if context.request_id:
                identity = _identity(
                    context.user_id, context.project_id, context.domain_id, context.system_scope, context.user_domain_id,
                    context.project_domain_id,
                )  # fmt: skip
                who = f"{context.global_request_id} {context.request_id} {identity}"
        now = self._clock.wall()
        when = f"{self._time(int(now))}.{int(now % 1 * 1000):03d}"
        line = f"{when} {os.getpid()} INFO {name} [{who}] {message}"
        for handler in self._handlers:
            handler.write(line)
        return True

    def _time(self, now: int) -> str:
        second, text = self._second
        if now != second:
            text = self._formatter.formatTime(stdlib_logging.makeLogRecord({"created": now}), self._formatter.datefmt)
            self._second = now, text
        return text


class _InfoLogger(stdlib_logging.Logger):
    """Writes lines of level INFO without a record; making and passing on a record takes longer than the rest of a line.

    It does so for lines that have nothing but a text, and while all handlers write such lines as oslo.log does by default.
    """

    #: Writes them; None: other handlers or formats are configured.
    lines: ClassVar[_InfoLines | None] = None

    @override
    def _log(
        self,
        level: int,
        msg: object,
        args: Any,
        exc_info: Any = None,
        extra: Mapping[str, object] | None = None,
        stack_info: bool = False,
        stacklevel: int = 1,
    ) -> None:
        lines = self.lines
        if (
            level == stdlib_logging.INFO
            and lines is not None
            and (extra is None or extra.get("extra_keys") == _NO_EXTRA)
            and not (exc_info or stack_info or self.filters)
            and lines.are_all_of(self)
        ):
            # A wrong message raises here; logging reports it.
            with contextlib.suppress(Exception):
                if lines.write(self.name, str(msg) % args if args else str(msg)):
                    return
        # A record names the caller of the logger, not this method.
        super()._log(level, msg, args, exc_info, extra, stack_info, stacklevel + 1)


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
        return _encodable(self._inner.format(record))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
