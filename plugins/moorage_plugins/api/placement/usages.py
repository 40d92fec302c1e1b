# SPDX-License-Identifier: Apache-2.0
"""``/usages``: what a project holds in all."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moorage.allocation.interface import FullStore, UsageTotal
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, queries, schemas
from moorage_plugins.api.placement.allocations import TYPES, UNKNOWN_TYPE
from moorage_plugins.api.placement.application import cached

__all__ = ["routes"]

_SINCE: Version = (1, 9)
_ALL_TYPES = "all"


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    here = _Usages(store)
    return (
        # The rule asks for the project, so the handler enforces it.
        Route("GET", "/usages", here.total, since=_SINCE, until=(1, 37), query=schemas.USAGES_1_9),
        Route("GET", "/usages", here.total, since=TYPES, query=schemas.USAGES_1_38),
    )


def _sum(totals: Iterable[UsageTotal]) -> Mapping[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for each in totals:
        found.update(each.used)
    return found


class _Usages:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    def total(self, request: Request) -> Response:
        """``GET /usages``."""
        project = queries.last(request.query, "project_id") or ""
        request.check_policy(policies.USAGES, {"project_id": project})
        user = queries.last(request.query, "user_id")
        if request.version < TYPES:
            return cached(
                request, Response(200, {"usages": dict(_sum(self._store.project_usages(project, user=user)))})
            )
        wanted = queries.last(request.query, "consumer_type")
        stored = {None: None, _ALL_TYPES: None, UNKNOWN_TYPE: ""}.get(wanted, wanted)
        totals = self._store.project_usages(project, user=user, consumer_type=stored)
        usages: dict[str, Any] = {}
        if wanted == _ALL_TYPES:
            if totals:
                usages[_ALL_TYPES] = {**_sum(totals), "consumer_count": sum(each.consumers for each in totals)}
        else:
            for each in totals:
                usages[each.consumer_type or UNKNOWN_TYPE] = {**each.used, "consumer_count": each.consumers}
        return cached(request, Response(200, {"usages": usages}))
