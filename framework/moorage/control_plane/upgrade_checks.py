# SPDX-License-Identifier: Apache-2.0
"""Checks services and the coordination backend for the upgrade check."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.periodic import NullServiceLives
from moorage.control_plane.process import RPC_VERSION
from moorage.coordination.loading import factory_from_config
from moorage.db import Database
from moorage.journal.subscriptions import SubscriptionStore
from moorage.services.registry import ServiceRegistry

__all__ = ["coordination", "followers", "services"]

#: What the names of subscriptions of observers begin with.
_OBSERVER = "observer/"
#: For people to run.
_DELETE = "DELETE FROM event_subscriptions WHERE name = '{}'"


def services(conf: cfg.ConfigOpts) -> Sequence[str]:
    """Checks that every running service speaks an RPC version that this release understands.

    :raises ConfigError: some speak another one.
    """
    others: dict[str, list[str]] = {}
    for each in ServiceRegistry(Database.from_config(conf), SystemClock()).list():
        if not each.stopped and each.rpc_version != RPC_VERSION:
            others.setdefault(each.rpc_version, []).append(f"{each.binary} {each.host}")
    if not others:
        return []
    told = "; ".join(f"{version}: {', '.join(sorted(names))}" for version, names in sorted(others.items()))
    if any(version.partition(".")[0] != RPC_VERSION.partition(".")[0] for version in others):
        raise errors.ConfigError(
            f"Services speak versions that this release ({RPC_VERSION}) does not. Stop them first. {told}."
        )
    return [f"Services of another version than {RPC_VERSION} run; restart them in the order of the guide. {told}."]


def coordination(conf: cfg.ConfigOpts) -> Sequence[str]:
    """The backend of coordination, where there is one, can be reached from here.

    :raises Unavailable: it cannot, and engines would not start without it.
    """
    if not conf.coordination.periodic_coordination_backend:
        return []
    database = Database.from_config(conf)
    client = factory_from_config(conf, SystemClock(), database=database, services=NullServiceLives(database))(
        lambda: None
    )
    try:
        client.start()
    except errors.Unavailable as error:
        if conf.coordination.startup_policy == "fail":
            raise
        return [error.message]
    finally:
        client.close()
    return []


def followers(conf: cfg.ConfigOpts) -> Sequence[str]:
    """Checks that every observer with a place in the journal is chosen: nothing is delivered to the others any more."""
    rows, last, _ = SubscriptionStore(Database.from_config(conf)).list()
    chosen = {f"{_OBSERVER}{name}" for name in conf.observers.enabled}
    return [
        f"The observer {row.name.removeprefix(_OBSERVER)} is not in [observers] enabled, and its place in the journal is kept: "
        f"{max(0, last - row.position)} events wait for it. Choose it again; or, if no engine shall, run this statement on the "
        f"database: {_DELETE.format(row.name)}"
        for row in rows
        if row.name.startswith(_OBSERVER) and row.name not in chosen
    ]
