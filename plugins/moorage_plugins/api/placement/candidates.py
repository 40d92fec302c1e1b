# SPDX-License-Identifier: Apache-2.0
"""``/allocation_candidates``: where a request would fit now."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence

from moorage import errors
from moorage.allocation.interface import Candidate, CandidateQuery, CandidateSet, FullStore, ProviderSummary
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import subject
from moorage_plugins.api.placement.groups import candidate_query
from moorage_plugins.api.placement.traits_and_aggregates import standard_first

__all__ = ["routes"]

_BY_PROVIDER: Version = (1, 12)
_TRAITS: Version = (1, 17)
_ALL_CLASSES: Version = (1, 27)
_NESTED: Version = (1, 29)
_MAPPINGS: Version = (1, 34)

#: Writes a string, or None, as JSON.
_Quote = Callable[[str | None], str]


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
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
        return cached(request, Response(200, _body(request.version, query, found)))


def _body(version: Version, query: CandidateQuery, found: CandidateSet) -> bytes:
    """Returns the answer as JSON. It is written provider by provider: as data it would be tens of objects for each."""
    # A name or uuid stands in the answer up to four times, a class as often as there are providers.
    quote = functools.cache(json.dumps)
    requests = ",".join([_request(version, each, quote) for each in found.candidates])
    summaries = ",".join(_summaries(version, query, found, quote))
    return f'{{"allocation_requests":[{requests}],"provider_summaries":{{{summaries}}}}}'.encode()


def _request(version: Version, candidate: Candidate, quote: _Quote) -> str:
    taken = [
        (quote(uuid), ",".join([f"{quote(name)}:{amount}" for name, amount in resources.items()]))
        for uuid, resources in candidate.allocations.items()
    ]
    if version < _BY_PROVIDER:
        items = [f'{{"resource_provider":{{"uuid":{uuid}}},"resources":{{{resources}}}}}' for uuid, resources in taken]
        return f'{{"allocations":[{",".join(items)}]}}'
    allocations = ",".join([f'{uuid}:{{"resources":{{{resources}}}}}' for uuid, resources in taken])
    if version < _MAPPINGS:
        return f'{{"allocations":{{{allocations}}}}}'
    mappings = ",".join(
        [f"{quote(suffix)}:[{','.join(map(quote, uuids))}]" for suffix, uuids in candidate.mappings.items()]
    )
    return f'{{"allocations":{{{allocations}}},"mappings":{{{mappings}}}}}'


def _summaries(version: Version, query: CandidateQuery, found: CandidateSet, quote: _Quote) -> Iterator[str]:
    classes: Collection[str] | None = None
    if version < _ALL_CLASSES:
        classes = {name for group in query.groups for name in group.resources}
    shown: Collection[str] = found.summaries
    if version < _NESTED:
        # Without trees only what the candidates take of is shown.
        shown = {uuid for each in found.candidates for uuid in each.allocations}
    for uuid, summary in found.summaries.items():
        if uuid in shown:
            yield f"{quote(uuid)}:{{{_summary(version, summary, classes, quote)}}}"


def _summary(version: Version, summary: ProviderSummary, classes: Collection[str] | None, quote: _Quote) -> str:
    resources = [
        f'{quote(name)}:{{"capacity":{capacity},"used":{summary.used[name]}}}'
        for name, capacity in summary.capacity.items()
        if classes is None or name in classes
    ]
    shown = f'"resources":{{{",".join(resources)}}}'
    if version >= _TRAITS:
        shown += f',"traits":[{",".join(map(quote, standard_first(summary.traits)))}]'
    if version >= _NESTED:
        shown += f',"parent_provider_uuid":{quote(summary.parent)},"root_provider_uuid":{quote(summary.root)}'
    return shown
