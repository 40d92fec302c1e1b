# SPDX-License-Identifier: Apache-2.0
"""Everything that a start would refuse of a configuration, looked at without starting anything.

For ``moorage config validate``, and before ``moorage up`` starts its processes or has them reload: either all of them can use
a configuration, or none gets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moorage import errors, extensions, foreign
from moorage.allocation.interface import DETECTORS, STORES
from moorage.clock import SystemClock
from moorage.control_plane import cleaning, logs
from moorage.control_plane.factories import load_store
from moorage.control_plane.interface import AGENT_SERVICES, API_EXTENSIONS
from moorage.control_plane.periodic import check_tasks, open_backend
from moorage.control_plane.policies import POLICIES
from moorage.coordination import loading as coordination_loading
from moorage.coordination import options as coordination_options
from moorage.coordination.interface import BACKENDS
from moorage.db import Database
from moorage.http import authentication
from moorage.http.middleware import with_middleware
from moorage.http.mounts import resolve_mounts
from moorage.http.policy import Policy
from moorage.http.server import address_of
from moorage.instances.interface import INSTANCE_STORES
from moorage.observers.interface import OBSERVERS
from moorage.rpc import loading as rpc_loading
from moorage.rpc.interface import CROSS_PROCESS
from moorage.scheduling import pipeline
from moorage.services import options as services_options
from moorage.services.registry import ServiceRegistry
from moorage.sharding.interface import STRATEGIES

__all__ = ["CHECKS", "NullServiceLives", "check", "deprecated", "doubtful", "problems"]


class NullServiceLives:
    """The lives of services, for a backend that only shall connect."""

    uuid, epoch = "", 0

    def __init__(self, database: Database) -> None:
        self._registry = ServiceRegistry(database, SystemClock())

    def valid_until(self) -> float:
        """It is no member."""
        return float("-inf")

    def living(self) -> frozenset[tuple[str, int]]:
        """All that have not ended."""
        return frozenset((each.uuid, each.epoch) for each in self._registry.list() if not each.stopped)


def _callers(conf: Any) -> None:
    """Who may call: the authenticator, and Keystone's filter before it."""
    with_middleware(lambda environ, start: [], conf)
    # A file of users that nobody named is made by ``moorage up``.
    if conf.api.http_basic_auth_user_file or authentication.users_file(conf).exists():
        authentication.authenticator(conf)


def _api(conf: Any) -> None:
    address_of(conf.api.bind)
    authentication.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
    extensions = API_EXTENSIONS.load_all(conf.api.enabled_apis)
    resolve_mounts({each.name: each.plugin.mount for each in extensions}, conf.api.mounts, ())
    Policy((*POLICIES, *(rule for each in extensions for rule in each.plugin.policies)), conf.api.policy_file)


@contextlib.contextmanager
def _database(conf: Any) -> Iterator[Database]:
    """The database, to which nothing connects."""
    database = Database.from_config(conf)
    try:
        yield database
    finally:
        database.close()


def _store(conf: Any) -> None:
    if STORES.load(conf.allocation.store) and _usable_database(conf):
        with _database(conf) as database:
            load_store(conf, database, SystemClock())


def _coordination(conf: Any) -> None:
    coordination_options.check(conf)
    section = conf.coordination
    if not section.periodic_coordination_backend:
        return
    BACKENDS.load(coordination_loading.chosen(section.periodic_coordination_backend, section.backend_url)[0])
    if _usable_database(conf):
        with _database(conf) as database:
            open_backend(conf, SystemClock(), database, NullServiceLives(database))


def _usable_database(conf: Any) -> bool:
    """Whether what needs one can be looked at; what is wrong with it is told by its own check."""
    try:
        Database.from_config(conf).close()
    except errors.ConfigError:
        return False
    return True


def _messages(conf: Any) -> None:
    rpc_loading.open_transport(conf, SystemClock(), frozenset({CROSS_PROCESS})).close()


#: (what is looked at, a function that raises MoorageError where it cannot be used). Nothing is connected or written.
CHECKS: Sequence[tuple[str, Callable[[Any], object]]] = (
    # Each by itself, so that both are told of; what the pipeline finds again is told once.
    ("filters", pipeline.load_filters),
    ("weighers", pipeline.load_weighers),
    ("filters and weighers", pipeline.load),
    ("log", logs.check),
    ("heartbeats", services_options.check),
    ("allocation store", _store),
    ("orphan detectors", lambda conf: DETECTORS.load_all(conf.allocation.orphan_detectors)),
    ("instances", lambda conf: INSTANCE_STORES.load(conf.control_plane.instance_store)),
    ("agent", lambda conf: AGENT_SERVICES.load_all(conf.agent.services)),
    ("messages", _messages),
    ("database", lambda conf: Database.from_config(conf).close()),
    ("cleanup", cleaning.check),
    ("shards", lambda conf: STRATEGIES.load(conf.sharding.strategy)),
    ("periodic tasks", check_tasks),
    ("coordination", _coordination),
    ("observers", lambda conf: OBSERVERS.load_all(conf.observers.enabled)),
    ("callers", _callers),
    ("API", _api),
)


def problems(conf: Any) -> list[str]:
    """What is wrong, a sentence for each; empty when a start would find nothing."""
    return list(dict.fromkeys(error.message for error in _failures(conf)))


def _failures(conf: Any) -> Iterator[errors.MoorageError]:
    for what, look in CHECKS:
        try:
            with foreign.isolate_plugin_call():
                look(conf)
        except errors.MoorageError as error:
            yield error
        except Exception as error:  # noqa: BLE001  (a plugin's check that fails is what was looked for)
            yield errors.ConfigError(f"The {what} cannot be checked ({foreign.format_exception(error)}).")


def doubtful(conf: Any) -> list[str]:
    """What a start takes and hardly anybody can mean, a sentence for each."""
    if conf.scheduling.enabled_filters:
        return []
    return [
        "[scheduling] enabled_filters is empty: every node is tried for every request, be it silent, disabled or full."
    ]


def deprecated(conf: Any) -> list[str]:
    """What works now and not for ever of the plugins that are chosen, a sentence for each."""
    with extensions.noting() as noted:
        problems(conf)
    return [f"The {each.sentence()}" for each in noted]


def check(conf: Any) -> None:
    """Refuse what cannot be used.

    :raises ConfigError: says everything that is wrong.
    :raises Unavailable: nothing is wrong, but something was late or away; a later try may succeed.
    """
    found = list(_failures(conf))
    if found:
        may_be_mended_by_time = all(isinstance(error, errors.Unavailable) for error in found)
        refused = errors.Unavailable if may_be_mended_by_time else errors.ConfigError
        raise refused(" ".join(dict.fromkeys(error.message for error in found)))
