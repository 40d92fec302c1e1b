# SPDX-License-Identifier: Apache-2.0
"""moorage config validate."""

from __future__ import annotations

import argparse
import logging

from moorage.cli import base, validation
from moorage.control_plane import config, unknown_options

__all__ = ["ConfigValidate"]


class ConfigValidate(base.LocalCommand):
    """Check configuration files without starting anything; exit status 1 when a start would refuse them.

    Options that nothing reads are printed too, with status 0 unless --strict is given: they may be misspelt.
    So are options that a file sets twice, and a list of filters that is empty.
    Deprecated options and plugins are printed with their replacement, and do not change the status.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--config-file", action="append", default=[], metavar="F", help="may be repeated; later ones win"
        )
        parser.add_argument("--state-dir", help="as the control plane is given it")
        parser.add_argument(
            "--strict", action="store_true", help="exit with status 1 also for options that nothing reads"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Checks the files and prints what is wrong."""
        # Libraries log what is printed here.
        for name in ("oslo_config", "keystonemiddleware"):
            logging.getLogger(name).setLevel(logging.ERROR)
        conf = config.load(files=parsed_args.config_file, state_dir=parsed_args.state_dir)
        files = conf.config_file
        old = [*unknown_options.deprecated(files), *validation.deprecated(conf)]
        wrong = validation.problems(conf)
        unread = [*unknown_options.unknown(files), *unknown_options.repeated(files), *validation.doubtful(conf)]
        for text in (*wrong, *unread, *(f"deprecated: {each}" for each in old)):
            self.app.stdout.write(f"{text}\n")
        if wrong or (unread and parsed_args.strict):
            return 1
        self.app.stdout.write("The configuration can be used.\n")
        return 0
