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

    Names that nothing reads are told as well, with status 0 unless --strict is given: they are what becomes of a misspelt option.
    So are options that a file sets twice, and a list of filters that is empty.
    Options and plugins that are deprecated are told with what to write instead, and change no status.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--config-file", action="append", default=[], metavar="F", help="may be repeated; later ones win"
        )
        parser.add_argument("--state-dir", help="as the control plane is given it")
        parser.add_argument(
            "--strict", action="store_true", help="what is told with status 0 otherwise is a mistake too"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Checks the files and prints what is wrong."""
        # Libraries log in their own words what is told here.
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
