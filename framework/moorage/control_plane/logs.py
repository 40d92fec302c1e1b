# SPDX-License-Identifier: Apache-2.0
"""Configures the log of a process by oslo.log's options."""

from __future__ import annotations

import logging as stdlib_logging
import os
from pathlib import Path

from oslo_config import cfg
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors

__all__ = ["check", "setup"]


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
    for handler in stdlib_logging.getLogger().handlers:
        if handler.formatter is not None:
            handler.setFormatter(_Encodable(handler.formatter))


class _Encodable(stdlib_logging.Formatter):
    """Another formatter's lines, without lone surrogates: messages are ours and have none, tracebacks may."""

    def __init__(self, inner: stdlib_logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    @override
    def format(self, record: stdlib_logging.LogRecord) -> str:
        return self._inner.format(record).encode("utf-8", "backslashreplace").decode("utf-8")
