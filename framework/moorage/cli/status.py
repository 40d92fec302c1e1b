# SPDX-License-Identifier: Apache-2.0
"""``moorage-status upgrade check``: what stands in the way of an upgrade."""

from __future__ import annotations

import sys
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_upgradecheck import upgradecheck

from moorage import errors
from moorage.control_plane import config
from moorage.control_plane.extension_points import survey
from moorage.db import Database, migrations
from moorage.extensions import State
from moorage.sharding.checks import problems

__all__ = ["Checks", "main"]


class Checks(upgradecheck.UpgradeCommands):
    """The checks; each looks and changes nothing."""

    def _schema(self) -> upgradecheck.Result:
        """The database is at the newest revision."""
        try:
            database = Database.from_config(config.load(files=self.files))
            behind = [each.distribution for each in migrations.discover() if each.version(database) != each.head()]
        except errors.MoorageError as error:
            return upgradecheck.Result(upgradecheck.Code.FAILURE, error.message)
        if behind:
            return upgradecheck.Result(
                upgradecheck.Code.FAILURE, f"Behind: {', '.join(behind)}. Run: moorage-manage db upgrade"
            )
        return upgradecheck.Result(upgradecheck.Code.SUCCESS)

    def _plugins(self) -> upgradecheck.Result:
        """Every installed plugin can be loaded."""
        broken = [finding for finding in survey() if finding.state is not State.READY]
        if broken:
            return upgradecheck.Result(upgradecheck.Code.WARNING, " ".join(finding.sentence() for finding in broken))
        return upgradecheck.Result(upgradecheck.Code.SUCCESS)

    def _shards(self) -> upgradecheck.Result:
        """No or every node has a shard, and every shard can be asked for."""
        try:
            found = problems(Database.from_config(config.load(files=self.files)))
        except (errors.MoorageError, sa.exc.SQLAlchemyError) as error:
            return upgradecheck.Result(upgradecheck.Code.WARNING, f"The shards could not be looked at: {error}")
        if found:
            return upgradecheck.Result(upgradecheck.Code.WARNING, " ".join(found))
        return upgradecheck.Result(upgradecheck.Code.SUCCESS)

    files: Any = ()
    _upgrade_checks = (("database schema", _schema), ("plugins", _plugins), ("shards", _shards))


def main() -> int:
    """Entry point of the ``moorage-status`` script."""
    checks = Checks()
    arguments = sys.argv[1:]
    if "--config-file" in arguments:
        place = arguments.index("--config-file")
        checks.files = arguments[place + 1 : place + 2]
        del arguments[place : place + 2]
    return int(upgradecheck.main(cfg.ConfigOpts(), project="moorage", upgrade_command=checks, argv=arguments))


if __name__ == "__main__":
    sys.exit(main())
