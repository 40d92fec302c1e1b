# SPDX-License-Identifier: Apache-2.0
"""Everything that a start would refuse of a configuration, looked at without starting anything.

For ``moorage config validate``, and before ``moorage up`` starts its processes or has them reload: either all of them can use
a configuration, or none gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moorage import errors, extensions, foreign
from moorage.allocation.interface import DETECTORS, STORES
from moorage.api import auth
from moorage.api.mounts import places
from moorage.api.policies import POLICIES
from moorage.api.policy import Policy
from moorage.control_plane import cleaning
from moorage.control_plane.interface import AGENT_SERVICES, API_EXTENSIONS, INSTANCE_STORES
from moorage.control_plane.periodic import check_tasks
from moorage.coordination import loading as coordination_loading
from moorage.coordination import options as coordination_options
from moorage.coordination.interface import BACKENDS
from moorage.db import engines
from moorage.observers.interface import OBSERVERS
from moorage.rpc import loading as rpc_loading
from moorage.rpc.interface import CROSS_PROCESS
from moorage.scheduling import pipeline
from moorage.services.heartbeat import check_times
from moorage.sharding.interface import STRATEGIES

__all__ = ["CHECKS", "check", "deprecated", "problems"]


def _api(conf: Any) -> None:
    auth.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
    extensions = API_EXTENSIONS.load_all(conf.api.enabled_apis)
    places({each.name: each.plugin.mount for each in extensions}, conf.api.mounts, {})
    given = conf.api.policy_file
    if given and not Path(given).is_file():
        raise errors.ConfigError(f"[api] policy_file = {given}: there is no such file.")
    Policy((*POLICIES, *(rule for each in extensions for rule in each.plugin.policies)), given)


def _coordination(conf: Any) -> None:
    section = conf.coordination
    coordination_options.check(conf)
    if section.periodic_coordination_backend:
        name, _ = coordination_loading.chosen(section.periodic_coordination_backend, section.backend_url)
        BACKENDS.load(name)


#: (what is looked at, a function that raises MoorageError where it cannot be used). Nothing is connected or written.
CHECKS: Sequence[tuple[str, Callable[[Any], object]]] = (
    # Each by itself, so that both are told of; what the pipeline finds again is told once.
    ("filters", pipeline.load_filters),
    ("weighers", pipeline.load_weighers),
    ("filters and weighers", pipeline.load),
    ("allocation store", lambda conf: STORES.load(conf.allocation.store)),
    ("orphan detectors", lambda conf: DETECTORS.load_all(conf.allocation.orphan_detectors)),
    ("instances", lambda conf: INSTANCE_STORES.load(conf.control_plane.instance_store)),
    ("agent", lambda conf: AGENT_SERVICES.load_all(conf.agent.services)),
    ("messages", lambda conf: rpc_loading.check_transport(conf.rpc.transport_url, frozenset({CROSS_PROCESS}))),
    ("database", lambda conf: engines.parse(conf.database.connection)),
    ("heartbeats", lambda conf: check_times(conf.services.report_interval, conf.services.service_down_time)),
    ("cleanup", cleaning.check),
    ("shards", lambda conf: STRATEGIES.load(conf.sharding.strategy)),
    ("periodic tasks", check_tasks),
    ("coordination", _coordination),
    ("observers", lambda conf: OBSERVERS.load_all(conf.observers.enabled)),
    ("API", _api),
)


def problems(conf: Any) -> list[str]:
    """What is wrong, a sentence for each; empty when a start would find nothing."""
    found = []
    for what, look in CHECKS:
        try:
            with foreign.contained():
                look(conf)
        except errors.MoorageError as error:
            found.append(error.message)
        except Exception as error:  # noqa: BLE001  (a plugin's check that fails is what was looked for)
            found.append(f"The {what} cannot be checked ({type(error).__name__}: {error}).")
    return list(dict.fromkeys(found))


def deprecated(conf: Any) -> list[str]:
    """What works now and not for ever of the plugins that are chosen, a sentence for each."""
    with extensions.noting() as noted:
        problems(conf)
    return [f"The {each.sentence()}" for each in noted]


def check(conf: Any) -> None:
    """Refuse what cannot be used.

    :raises ConfigError: says everything that is wrong.
    """
    found = problems(conf)
    if found:
        raise errors.ConfigError(" ".join(found))
