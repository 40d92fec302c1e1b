# SPDX-License-Identifier: Apache-2.0
"""``moorage-status upgrade check``: what stands in the way of an upgrade.

Each check looks and changes nothing. *Failure*: services of this release would not start, or would do harm. *Warning*: an
operator should look before going on.
"""

from __future__ import annotations

import argparse
import functools
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_upgradecheck import upgradecheck

from moorage import errors, plugin_isolation
from moorage.cli import validation
from moorage.control_plane import config, unknown_options
from moorage.control_plane.extension_points import survey
from moorage.db import Database, migrations
from moorage.extensions import PluginState
from moorage.http import authentication
from moorage.part import InstalledPart, parts

__all__ = ["Checks", "main", "make_parser"]

_SUCCESS = upgradecheck.Result(upgradecheck.Code.SUCCESS)


def _warning(text: str) -> upgradecheck.Result:
    return upgradecheck.Result(upgradecheck.Code.WARNING, text)


def _failure(text: str) -> upgradecheck.Result:
    return upgradecheck.Result(upgradecheck.Code.FAILURE, text)


def _of(found: Sequence[str], tell: Callable[[str], upgradecheck.Result]) -> upgradecheck.Result:
    return tell(" ".join(found)) if found else _SUCCESS


def _guarded(look: Callable[[Any], upgradecheck.Result]) -> Callable[[Any], upgradecheck.Result]:
    """A check that cannot be made is a failure that says why; the others are made all the same."""

    @functools.wraps(look)
    def guarded(checks: Any) -> upgradecheck.Result:
        try:
            with plugin_isolation.isolate_plugin_call():
                return look(checks)
        except errors.MoorageError as error:
            return _failure(error.message)
        except sa.exc.SQLAlchemyError as error:
            return _failure(f"This cannot be looked at: {error}")
        except Exception as error:  # noqa: BLE001  (whatever a plugin raises)
            return _failure(f"This cannot be looked at ({type(error).__name__}: {error}).")

    return guarded


class Checks(upgradecheck.UpgradeCommands):
    """Returns the checks, in the order in which an operator would correct their findings."""

    def __init__(self, files: Sequence[str] = (), state_dir: str | None = None) -> None:
        super().__init__()
        self._files = files
        self._state_dir = state_dir
        # Those of the configuration and of the schema come first.
        brought = (
            (what, _guarded(functools.partial(_look, part, function)))
            for part in parts()
            for what, function in part.declared.upgrade_checks.items()
        )
        self._upgrade_checks = (*self._own, *brought)

    def _conf(self) -> cfg.ConfigOpts:
        return config.load(files=self._files, state_dir=self._state_dir)

    def _database(self) -> Database:
        return Database.from_config(self._conf())

    @_guarded
    def _configuration(self) -> upgradecheck.Result:
        """A start would take the configuration."""
        return _of(validation.problems(self._conf()), _failure)

    @_guarded
    def _options(self) -> upgradecheck.Result:
        """Every name in the files is one that something reads; none, and no plugin that is chosen, is an old one."""
        conf = self._conf()
        files = conf.config_file
        names = [*unknown_options.unknown(files), *unknown_options.repeated(files), *unknown_options.deprecated(files)]
        return _of([*names, *validation.doubtful(conf), *validation.deprecated(conf)], _warning)

    @_guarded
    def _secrets(self) -> upgradecheck.Result:
        """Files with passwords are not readable by every user."""
        found = []
        conf = self._conf()
        for path in (*map(Path, conf.config_file), authentication.users_file(conf)):
            if path.is_file() and path.stat().st_mode & stat.S_IROTH:
                found.append(f"{path} can be read by every user of this machine; chmod o-r {path}.")
        return _of(found, _warning)

    @_guarded
    def _plugins(self) -> upgradecheck.Result:
        """Every installed plugin can be loaded; one that the configuration names is a matter of the first check."""
        return _of([each.sentence() for each in survey() if each.state is not PluginState.READY], _warning)

    @_guarded
    def _schema(self) -> upgradecheck.Result:
        """The database can be reached and is at the newest revision."""
        database = self._database()
        behind = [each.name for each in migrations.discover() if each.version(database) != each.head()]
        return _failure(f"Behind: {', '.join(behind)}. Run: moorage-manage db upgrade") if behind else _SUCCESS

    @_guarded
    def _tables(self) -> upgradecheck.Result:
        """Checks that the tables are those that the installed parts expect. The check before reports a database that is behind."""
        database = self._database()
        found = migrations.discover()
        if any(each.version(database) != each.head() for each in found):
            return _SUCCESS
        count = sum(len(each.differences(database)) for each in found)
        said = [f"{count} differ from what the code expects; moorage-manage db check shows them."] if count else []
        left = migrations.removed(database)
        said += [
            f"The part {name} (revision {revision}) is not installed. Install its distribution again, or drop its tables and "
            f"alembic_version_{name}."
            for name, revision in left.chains.items()
        ]
        if left.tables:
            said.append(f"No installed part knows the tables {', '.join(left.tables)}.")
        return _of(said, _warning)

    _own = (
        ("configuration", _configuration),
        ("options", _options),
        ("files", _secrets),
        ("plugins", _plugins),
        ("database schema", _schema),
        ("tables", _tables),
    )


def _look(part: InstalledPart, function: str, checks: Checks) -> upgradecheck.Result:
    """Make the check of a part."""
    return _of(part.load(function)(checks._conf()), _warning)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line, for completion and the manual too."""
    made = argparse.ArgumentParser(prog="moorage-status", description="Look for what stands in the way of an upgrade.")
    made.add_argument("--config-file", action="append", default=[], help="may be repeated; later ones win")
    made.add_argument("--state-dir", help="wins over [control_plane] state_dir")
    areas = made.add_subparsers(dest="area", required=True)
    actions = areas.add_parser("upgrade", help="upgrades").add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="make every check; ends with 0: all is well, 1: a warning, 2: a failure")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``moorage-status`` script."""
    arguments = make_parser().parse_args(argv)
    checks = Checks(arguments.config_file, arguments.state_dir)
    return int(
        upgradecheck.main(cfg.ConfigOpts(), project="moorage", upgrade_command=checks, argv=["upgrade", "check"])
    )


if __name__ == "__main__":
    sys.exit(main())
