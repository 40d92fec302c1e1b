# SPDX-License-Identifier: Apache-2.0
"""``moorage-status upgrade check``: what stands in the way of an upgrade.

Each check looks and changes nothing. *Failure*: services of this release would not start, or would do harm. *Warning*: somebody
should look before going on.
"""

from __future__ import annotations

import argparse
import functools
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from oslo_config import cfg
from oslo_upgradecheck import upgradecheck

from moorage import errors, foreign
from moorage.cli import validation
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.extension_points import survey
from moorage.control_plane.process import RPC_VERSION
from moorage.coordination import loading as coordination_loading
from moorage.db import Database, migrations
from moorage.extensions import State
from moorage.http import authentication
from moorage.services.registry import ServiceRegistry
from moorage.sharding.checks import problems
from moorage.work.interface import Phase
from moorage.work.tables import workers

__all__ = ["Checks", "main", "make_parser"]

_SUCCESS = upgradecheck.Result(upgradecheck.Code.SUCCESS)
#: Of a broker whose URL names none, and seconds that one may take to answer.
_PORT = 5672
_PATIENCE = 5.0
_QUARANTINED = sa.select(workers.c.resource_type, sa.func.count()).where(workers.c.phase == Phase.QUARANTINED.value)


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
            with foreign.isolate_plugin_call():
                return look(checks)
        except errors.MoorageError as error:
            return _failure(error.message)
        except sa.exc.SQLAlchemyError as error:
            return _failure(f"This cannot be looked at: {error}")
        except Exception as error:  # noqa: BLE001  (whatever a plugin raises)
            return _failure(f"This cannot be looked at ({type(error).__name__}: {error}).")

    return guarded


class Checks(upgradecheck.UpgradeCommands):
    """The checks, in the order in which somebody would mend what they find."""

    def __init__(self, files: Sequence[str] = (), state_dir: str | None = None) -> None:
        super().__init__()
        self._files = files
        self._state_dir = state_dir

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
        names = [*config.unknown(files), *config.repeated(files), *config.deprecated(files)]
        return _of([*names, *validation.doubtful(conf), *validation.deprecated(conf)], _warning)

    @_guarded
    def _secrets(self) -> upgradecheck.Result:
        """Files with passwords are not readable by everybody."""
        found = []
        conf = self._conf()
        for path in (*map(Path, conf.config_file), authentication.users_file(conf)):
            if path.is_file() and path.stat().st_mode & stat.S_IROTH:
                found.append(f"{path} can be read by every user of this machine; chmod o-r {path}.")
        return _of(found, _warning)

    @_guarded
    def _plugins(self) -> upgradecheck.Result:
        """Every installed plugin can be loaded; one that the configuration names is a matter of the first check."""
        return _of([each.sentence() for each in survey() if each.state is not State.READY], _warning)

    @_guarded
    def _schema(self) -> upgradecheck.Result:
        """The database can be reached and is at the newest revision."""
        database = self._database()
        behind = [each.distribution for each in migrations.discover() if each.version(database) != each.head()]
        return _failure(f"Behind: {', '.join(behind)}. Run: moorage-manage db upgrade") if behind else _SUCCESS

    @_guarded
    def _tables(self) -> upgradecheck.Result:
        """The tables are what the code expects; of a database that is behind, the check before has told."""
        database = self._database()
        found = migrations.discover()
        if any(each.version(database) != each.head() for each in found):
            return _SUCCESS
        count = sum(len(each.differences(database)) for each in found)
        return (
            _warning(f"{count} differ from what the code expects; moorage-manage db check shows them.")
            if count
            else _SUCCESS
        )

    @_guarded
    def _services(self) -> upgradecheck.Result:
        """Services that have not ended speak this release's version, or one of the same major."""
        others: dict[str, list[str]] = {}
        for each in ServiceRegistry(self._database(), SystemClock()).list():
            if not each.stopped and each.rpc_version != RPC_VERSION:
                others.setdefault(each.rpc_version, []).append(f"{each.binary} {each.host}")
        if not others:
            return _SUCCESS
        told = "; ".join(f"{version}: {', '.join(sorted(names))}" for version, names in sorted(others.items()))
        if any(version.partition(".")[0] != RPC_VERSION.partition(".")[0] for version in others):
            return _failure(
                f"Services speak versions that this release ({RPC_VERSION}) does not. Stop them first. {told}."
            )
        return _warning(
            f"Services of another version than {RPC_VERSION} run; restart them in the order of the guide. {told}."
        )

    @_guarded
    def _operations(self) -> upgradecheck.Result:
        """No operation waits for a person."""
        with self._database().read() as tx:
            found = [
                f"{count} of {kind} are quarantined; moorage cleanup list --phase quarantined shows them."
                for kind, count in tx.execute(_QUARANTINED.group_by(workers.c.resource_type))
            ]
        return _of(found, _warning)

    @_guarded
    def _shards(self) -> upgradecheck.Result:
        """No or every node has a shard, and every shard can be asked for."""
        return _of(problems(self._database()), _warning)

    @_guarded
    def _messages(self) -> upgradecheck.Result:
        """A message broker, where there is one, can be reached from here."""
        conf = self._conf()
        places = _places(conf.rpc.transport_url)
        wrong = [f"{host}:{port} ({why})" for host, port in places if (why := _unreachable(host, port))]
        if not wrong:
            return _SUCCESS
        text = f"[rpc] transport_url: cannot be reached from here: {', '.join(wrong)}."
        return _failure(text) if len(wrong) == len(places) else _warning(text)

    @_guarded
    def _coordination(self) -> upgradecheck.Result:
        """The backend of coordination, where there is one, can be reached from here."""
        conf = self._conf()
        if not conf.coordination.periodic_coordination_backend:
            return _SUCCESS
        database = Database.from_config(conf)
        make = coordination_loading.factory_from_config(
            conf, SystemClock(), database=database, services=validation.NullServiceLives(database)
        )
        client = make(lambda: None)
        try:
            client.start()
        except errors.Unavailable as error:
            return (_failure if conf.coordination.startup_policy == "fail" else _warning)(error.message)
        finally:
            client.close()
        return _SUCCESS

    _upgrade_checks = (
        ("configuration", _configuration),
        ("options", _options),
        ("files", _secrets),
        ("plugins", _plugins),
        ("database schema", _schema),
        ("tables", _tables),
        ("services", _services),
        ("operations", _operations),
        ("shards", _shards),
        ("messages", _messages),
        ("coordination", _coordination),
    )


def _places(url: str) -> list[tuple[str, int]]:
    """The brokers that a transport's URL names, as oslo.messaging reads it; none for those of one machine."""
    network = urlsplit(url).netloc
    found = [urlsplit(f"//{each}") for each in network.split(",") if each]
    return [(each.hostname, each.port or _PORT) for each in found if each.hostname]


def _unreachable(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def make_parser() -> argparse.ArgumentParser:
    """The command line, for completion and the manual too."""
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
