# SPDX-License-Identifier: Apache-2.0
"""``/allocation_candidates``: where a request would fit now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import Candidate, CandidateQuery, CandidateSet, FullStore, ProviderSummary
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import subject
from moorage_plugins.api.placement.features import standard_first
from moorage_plugins.api.placement.groups import candidate_query

__all__ = ["routes"]

_BY_PROVIDER: Version = (1, 12)
_TRAITS: Version = (1, 17)
_ALL_CLASSES: Version = (1, 27)
_NESTED: Version = (1, 29)
_MAPPINGS: Version = (1, 34)


def routes(store: FullStore) -> Sequence[Route]:
    """The routes over a store."""
    here = _Candidates(store)
    starts = list(schemas.CANDIDATES)
    ends: list[Version | None] = [(major, minor - 1) for major, minor in starts[1:]]
    return [
        Route(
            "GET",
            "/allocation_candidates",
            here.list,
            policies.CANDIDATES_LIST,
            since=since,
            until=until,
            query=schemas.CANDIDATES[since],
        )
        for since, until in zip(starts, [*ends, None], strict=True)
    ]


class _Candidates:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    def list(self, request: Request) -> Response:
        """``GET /allocation_candidates``."""
        query = candidate_query(request.query, request.version)
        try:
            found = self._store.candidates(query)
        except errors.NotFound as error:
            if "resource_class" in error.details:
                text = f"Invalid resource class in resources parameter: {subject(error)}"
            else:
                text = subject(error)
            raise errors.InvalidInput(text, **error.details) from error
        body = {
            "allocation_requests": [_request(request.version, each) for each in found.candidates],
            "provider_summaries": _summaries(request.version, query, found),
        }
        return cached(request, Response(200, body))


def _request(version: Version, candidate: Candidate) -> dict[str, Any]:
    if version < _BY_PROVIDER:
        return {
            "allocations": [
                {"resource_provider": {"uuid": uuid}, "resources": resources}
                for uuid, resources in candidate.allocations.items()
            ]
        }
    shown: dict[str, Any] = {
        "allocations": {uuid: {"resources": resources} for uuid, resources in candidate.allocations.items()}
    }
    if version >= _MAPPINGS:
        shown["mappings"] = {suffix: list(uuids) for suffix, uuids in candidate.mappings.items()}
    return shown


def _summaries(version: Version, query: CandidateQuery, found: CandidateSet) -> dict[str, Any]:
    classes: Collection[str] | None = None
    if version < _ALL_CLASSES:
        classes = {name for group in query.groups for name in group.resources}
    if version >= _NESTED:
        return {uuid: _summary(version, each, classes) for uuid, each in found.summaries.items()}
    # Without trees only what the candidates take of is shown.
    taken = {uuid for each in found.candidates for uuid in each.allocations}
    return {uuid: _summary(version, each, classes) for uuid, each in found.summaries.items() if uuid in taken}


def _summary(version: Version, summary: ProviderSummary, classes: Collection[str] | None) -> dict[str, Any]:
    provider = summary.provider
    shown: dict[str, Any] = {
        "resources": {
            each.resource_class: {"capacity": int(each.capacity), "used": summary.used[each.resource_class]}
            for each in provider.inventories
            if classes is None or each.resource_class in classes
        }
    }
    if version >= _TRAITS:
        shown["traits"] = standard_first(summary.traits)
    if version >= _NESTED:
        shown |= {"parent_provider_uuid": provider.parent, "root_provider_uuid": provider.root}
    return shown
