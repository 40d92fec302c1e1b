# SPDX-License-Identifier: Apache-2.0
"""Protects a process from the plugins that it calls, and from their errors and texts.

A plugin must not end or fork the process, print into the output of a command, or put text into our messages that cannot be sent or
shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from moorage import threads

__all__ = ["Ending", "PluginExit", "isolate_plugin_call", "escape_unprintable", "printing_aside", "format_exception"]

#: Exit status of a copy of the process (EX_SOFTWARE of sysexits.h).
_COPY = 70
_lock = threads.lock()
#: How many blocks of :func:`printing_aside` are running, and the stdout of before the first.
_blocks = 0
_stdout: TextIO | None = None


class PluginExit(RuntimeError):
    """A plugin raised an exception that would have ended the thread or the process. The message names that exception."""


class Ending(BaseException):
    """Ends the process that raises it; :class:`isolate_plugin_call` lets it pass. For simulations, whose processes are threads."""


class isolate_plugin_call:
    """Isolates one call of a plugin's code. Use it within the ``try`` that handles the plugin's errors.

    SystemExit and every other exception that is no :class:`Exception` becomes a :class:`PluginExit`, which ``except Exception``
    catches. A KeyboardInterrupt that may be the user's passes. If the code forked the process (``os.fork``), the copy ends when
    it returns from the call: a copy must neither answer nor write.

    :param who: the name of the plugin, for the message of a copy that ends.
    """

    __slots__ = ("_pid", "_who")

    def __init__(self, who: str = "a plugin") -> None:
        self._who = who

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            _end_copy(self._who)
        if error is None or isinstance(error, Exception | Ending):
            return
        if isinstance(error, KeyboardInterrupt) and _may_be_the_users():
            return
        raise PluginExit(f"{error!r} would have ended the process") from error


@contextlib.contextmanager
def printing_aside() -> Iterator[None]:
    """Sends to stderr what an imported module prints. Stdout stays for the command's own output, which may be JSON.

    Blocks may nest and overlap, in any threads: stdout returns when the last block ends.
    """
    global _blocks, _stdout
    with _lock:
        if not _blocks:
            _stdout, sys.stdout = sys.stdout, sys.stderr
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _stdout is not None:
                sys.stdout, _stdout = _stdout, None


def escape_unprintable(text: str) -> str:
    """Returns a plugin's text for a log line or message, with escapes for what UTF-8 cannot encode and what is not printable.

    These are lone surrogates, line ends and the control sequences of terminals.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def format_exception(error: BaseException) -> str:
    """Returns the text of a plugin's exception for a message: ``ValueError: no licence``. Never raises."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001  (the plugin defines the class, too)
        text = f"its text cannot be had, {type(another).__name__}"
    return escape_unprintable(f"{type(error).__name__}: {text}")


def _may_be_the_users() -> bool:
    """Returns whether Ctrl-C raises in this thread: only in the main one, and not where a handler of ours takes it."""
    return threads.in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end_copy(who: str) -> None:
    # Not by the log: a lock of it may be held by a thread that the copy does not have.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = f"Process {os.getpid()} is a copy that {who} made by os.fork, and ends. Plugins must not fork.\n"
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore[union-attr]
    os._exit(_COPY)
