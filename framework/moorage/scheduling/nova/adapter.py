# SPDX-License-Identifier: Apache-2.0
"""Nova's two interfaces, asked the way Nova's scheduler asks them.

A filter class has ``host_passes(host_state, spec)``, or ``_filter_one``, or decides over all hosts at once in ``filter_all``, where
None as the answer means that no host is left. A weigher class has ``_weigh_object(host_state, spec)``, or ``weigh_objects`` for all
hosts, and ``weight_multiplier(host_state)`` (before Stein: without the host), ``minval`` and ``maxval``. The classes need not
derive from anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from moorage import threads
from moorage.scheduling.interface import (
    SKIP,
    Fleet,
    HostFilter,
    HostState,
    HostWeigher,
    RequestSpec,
    Rows,
    Skip,
)
from moorage.scheduling.nova.facade import NovaHostState, NovaRequestSpec

__all__ = ["NovaFilter", "NovaWeigher", "adapted_filter", "adapted_weigher", "is_filter_class", "is_weigher_class"]

#: Modules whose methods are Nova's defaults, or ours in their place; anything else was written by the class's author.
_BASES = (
    "nova.filters",
    "nova.weights",
    "nova.scheduler.filters",
    "nova.scheduler.weights",
    "moorage.scheduling.nova.shim",
)


def is_filter_class(found: Any) -> bool:
    """Returns whether it is a class with one of the methods of Nova's filters."""
    return inspect.isclass(found) and any(hasattr(found, name) for name in ("host_passes", "_filter_one", "filter_all"))


def is_weigher_class(found: Any) -> bool:
    """Returns whether it is a class with one of the methods of Nova's weighers."""
    return inspect.isclass(found) and any(hasattr(found, name) for name in ("_weigh_object", "weigh_objects"))


def _author_wrote(found: type, name: str) -> bool:
    for cls in found.__mro__:
        if name in vars(cls):
            return cls.__module__ not in _BASES
    return False


class _Requests:
    """The request of this thread in Nova's shape, made once for all hosts."""

    def __init__(self) -> None:
        self._local = threads.local()

    def get(self, spec: RequestSpec, fleet: Fleet | None = None) -> NovaRequestSpec:
        """The same object as long as it is the same request."""
        known: NovaRequestSpec | None = getattr(self._local, "known", None)
        if known is None or known.spec is not spec or fleet is not None:
            known = self._local.known = NovaRequestSpec(spec, fleet)
        return known


class NovaFilter(HostFilter):
    """A filter class that was written for Nova; :func:`adapted_filter` makes a subclass for each."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    #: The class; it is built without arguments.
    wrapped: ClassVar[type]

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        self.plugin: Any = self.wrapped()
        self._requests = _Requests()
        one = "_filter_one" if _author_wrote(self.wrapped, "_filter_one") else "host_passes"
        self._one = getattr(self.plugin, one, None)
        if _author_wrote(self.wrapped, "run_filter_for_index"):
            # Only the object can say it; in place of the class's attribute.
            self.__dict__["run_filter_once_per_request"] = not self.plugin.run_filter_for_index(1)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        if spec.rebuild and not self.RUN_ON_REBUILD:
            return SKIP
        self._requests.get(spec, fleet)
        return None

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        request = self._requests.get(spec_obj)
        if self._one is None or self.needs_order:
            answer = self.plugin.filter_all([self._host(host_state)], request)
            return answer is not None and bool(list(answer))
        return bool(self._one(self._host(host_state), request))

    def _host(self, state: HostState, row: int = -1) -> NovaHostState:
        return NovaHostState(state, row, self._counted)

    def _counted(self) -> None:
        """The class reads instances or their number, which Nova's classes do not declare: it is asked again with the claim."""
        self.judges_instances = True

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows | None:
        if not self.needs_order:
            return None
        hosts = [self._host(fleet.host_state(row), row) for row in rows.tolist()]
        return _rows_of(self.plugin.filter_all(hosts, self._requests.get(spec)))

    @override
    def limits(self, host_state: HostState, spec: RequestSpec) -> Mapping[str, Any]:
        # A class of Nova writes them on the host while it decides.
        host = NovaHostState(host_state)
        request = self._requests.get(spec)
        if self._one is None or self.needs_order:
            list(self.plugin.filter_all([host], request) or ())
        else:
            self._one(host, request)
        return dict(host.limits)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return f"{type(self.plugin).__name__} (a class written for Nova, which does not say why) refused it"


def adapted_filter(found: type) -> type[NovaFilter]:
    """Returns a plugin over a filter class."""
    return type(
        found.__name__,
        (NovaFilter,),
        {
            "__doc__": found.__doc__,
            "wrapped": found,
            "RUN_ON_REBUILD": bool(getattr(found, "RUN_ON_REBUILD", False)),
            "run_filter_once_per_request": bool(getattr(found, "run_filter_once_per_request", False)),
            "needs_order": _author_wrote(found, "filter_all"),
            "needs_instances": bool(getattr(found, "needs_instances", False)),
            "instance_fields": tuple(getattr(found, "instance_fields", ())),
        },
    )


def adapted_weigher(found: type) -> type[NovaWeigher]:
    """Returns a plugin over a weigher class."""
    bounds = {name: _bound(getattr(found, name, None)) for name in ("minval", "maxval")}
    return type(found.__name__, (NovaWeigher,), {"__doc__": found.__doc__, "wrapped": found, **bounds})


def _rows_of(answer: Iterable[Any] | None) -> Rows:
    if answer is None:
        return np.array([], dtype=np.intp)
    rows = []
    for host in answer:
        if not isinstance(host, NovaHostState):
            raise TypeError(f"filter_all answered {host!r}, which is none of the hosts that it was given")
        rows.append(host.row)
    return np.array(rows, dtype=np.intp)


class _Weighed:
    """What ``weigh_objects`` is given for each host."""

    __slots__ = ("obj", "weight")

    def __init__(self, host: NovaHostState) -> None:
        self.obj = host
        self.weight = 0.0


class NovaWeigher(HostWeigher):
    """A weigher class that was written for Nova; :func:`adapted_weigher` makes a subclass for each."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    #: The class; it is built without arguments.
    wrapped: ClassVar[type]

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        self.plugin: Any = self.wrapped()
        self._requests = _Requests()
        self._all = _author_wrote(self.wrapped, "weigh_objects")
        self._multiplier = getattr(self.plugin, "weight_multiplier", None)
        self._by_host = self._multiplier is not None and bool(inspect.signature(self._multiplier).parameters)

    @property
    @override
    def multiplier(self) -> float:
        if self._multiplier is None or self._by_host:
            return 1.0
        return float(self._multiplier())

    @override
    def row_multipliers(self, fleet: Fleet, rows: Rows) -> npt.NDArray[np.float64] | None:
        if self._multiplier is None or not self._by_host:
            return None
        return np.array([self._multiplier(host) for host in _hosts(fleet, rows)], dtype=np.float64)

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        request = self._requests.get(spec, fleet)
        hosts = _hosts(fleet, rows)
        if self._all:
            weights = list(self.plugin.weigh_objects([_Weighed(host) for host in hosts], request))
        else:
            weights = [self.plugin._weigh_object(host, request) for host in hosts]
        return np.array(weights, dtype=np.float64)


def _hosts(fleet: Fleet, rows: Rows) -> Sequence[NovaHostState]:
    return [NovaHostState(fleet.host_state(row), row) for row in rows.tolist()]


def _bound(value: Any) -> float | None:
    return None if value is None else float(value)
