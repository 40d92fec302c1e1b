# SPDX-License-Identifier: Apache-2.0
"""``GET /scheduling/v1/events``: pages of the journal, a long poll for new events, and server-sent events."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.clock import Clock
from moorage.db import RecordedEvent
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.journal.reader import EventFilter, EventPage, JournalReader
from moorage.journal.tail import Tail
from moorage.journal.waiting_limit import WaitingLimit
from moorage.read_only import fields_of
from moorage.scheduling.api import allowed

__all__ = ["POLICIES", "routes"]

_GET = "scheduling:events:get"
_SEE_PLACES = "scheduling:events:get:host"
POLICIES = (
    PolicyRule(
        _GET,
        "rule:system_reader or rule:project_reader",
        "Read the journal. Members of a project see the events of their project's instances.",
    ),
    PolicyRule(_SEE_PLACES, "rule:system_reader", "See hosts, nodes and services in events."),
)

#: Seconds that a long poll lasts at most.
_LONGEST_WAIT = 60
#: Seconds after which a waiting request looks whether its client is still there.
_LOOK = 2.0
_PAGE = 1000
#: Requests of one project, or of one reader of the system, that wait in a process; of all together 512 may.
_MOST_OF_PROJECT, _MOST_OF_READER = 128, 384
_STREAM_TYPE = "text/event-stream"
#: Seconds after which a stream without events sends a comment, so that no proxy takes it for dead.
_KEEP_ALIVE = 15.0
#: Seconds after which a stream ends. The client connects again, and its rights are looked at again.
_STREAM_ENDS = 3600.0
_CURSOR = re.compile("[0-9]{1,18}")
#: Fields of an event's state that tell of hosts, nodes or services; what a driver says of a workload may name its host.
_PLACES = frozenset(
    {"host", "node", "node_uuid", "destination_uuid", "considered", "passed", "removed", "actual_detail", "worker"}
)
_TEXT = {"type": "string", "minLength": 1, "maxLength": 255}
_QUERY = {
    "type": "object",
    "properties": {
        "after": {"type": "string", "pattern": "^([0-9]{1,18}|latest)$"},
        "limit": {"type": "integer", "minimum": 1, "maximum": _PAGE},
        "kind": _TEXT,
        "subject": _TEXT,
        "actor": _TEXT,
        "request_id": _TEXT,
        "global_request_id": _TEXT,
        "since": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "wait": {"type": "integer", "minimum": 0, "maximum": _LONGEST_WAIT},
        "before": {"type": "boolean"},
    },
    "additionalProperties": False,
}
_EVENT = {
    "type": "object",
    "properties": {
        "number": {"type": "integer"},
        "kind": {"type": "string"},
        "subject": {"type": "string"},
        "version": {"type": "integer"},
        "at": {"type": "integer"},
        "actor": {"type": "string"},
        "service": {"type": "string"},
        "project_id": {"type": "string"},
        "request_id": {"type": "string"},
        "global_request_id": {"type": "string"},
        "state": {"type": "object"},
        "before": {"type": "object"},
    },
}
_EVENTS = {
    "type": "object",
    "properties": {"events": {"type": "array", "items": _EVENT}, "next_after": {"type": "string"}},
}


class _EventsApi:
    def __init__(self, reader: JournalReader, tail: Tail, clock: Clock) -> None:
        self._reader = reader
        self._tail = tail
        self._clock = clock
        self._of_projects, self._of_readers = WaitingLimit(_MOST_OF_PROJECT), WaitingLimit(_MOST_OF_READER)

    def read(self, request: Request) -> Response:
        """Returns a page; with ``wait`` and no event yet, a stream that ends with the page."""
        query = request.query
        wanted = _wanted(request)
        limit, places = query.get("limit", _PAGE), allowed(request, _SEE_PLACES)
        streams = _STREAM_TYPE in (request.header("Accept") or "")
        _refuse_before(query, streams)
        after = _last_event_id(request) if streams else query.get("after")
        cursor = self._reader.last() if after == "latest" else None if after is None else int(after)
        page = self._reader.page(cursor, wanted, limit)
        if streams:
            headers = {"Content-Type": _STREAM_TYPE, "Cache-Control": "no-store"}
            return Response(200, self._admit(request, self._stream(page, wanted, places)), headers)
        if not page.events and query.get("wait"):
            parts = self._wait(page.cursor, wanted, limit, places, query["wait"])
            return Response(200, self._admit(request, parts))
        tag = f'"{page.cursor}"'
        if not page.events and request.header("If-None-Match") == tag:
            return Response(304, headers={"ETag": tag})
        before = self._reader.before(page.events) if query.get("before") else None
        return Response(200, _shown(page, places, before), {"ETag": tag})

    def _admit(self, request: Request, parts: Generator[bytes, None, None]) -> Iterator[bytes]:
        """:raises Unavailable: too many requests of the caller wait."""
        context = request.context
        if context.system_scope:
            return self._of_readers.admit(f"the user {context.user_id}", parts)
        return self._of_projects.admit(f"the project {context.project_id}", parts)

    def _wait(
        self, cursor: int, wanted: EventFilter, limit: int, places: bool, seconds: float
    ) -> Generator[bytes, None, None]:
        """Yields nothing every few seconds, and once the page."""
        deadline = self._clock.monotonic() + seconds
        while True:
            rest = deadline - self._clock.monotonic()
            seconds = min(_LOOK, max(0.0, rest))
            try:
                page = self._newest(cursor, wanted, limit, seconds)
            except errors.MoorageError:
                # The answer has begun, so it cannot become an error. The next request with this cursor gets the error.
                self._clock.sleep(seconds)
                page = EventPage((), cursor)
            cursor = page.cursor
            if page.events or rest <= 0:
                yield json.dumps(_shown(page, places)).encode()
                return
            yield b""

    def _stream(self, page: EventPage, wanted: EventFilter, places: bool) -> Generator[bytes, None, None]:
        """Yields events as they come, with their numbers as ids; nothing every few seconds."""
        begun = quiet = self._clock.monotonic()
        yield b"retry: 1000\n\n"
        while self._clock.monotonic() - begun < _STREAM_ENDS:
            for event in page.events:
                data = json.dumps(_event(event, places))
                yield f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n".encode()
            moment = self._clock.monotonic()
            if page.events:
                quiet = moment
            elif moment - quiet >= _KEEP_ALIVE:
                # The id moves past the events that the filter leaves out, so that the cursor does not grow old.
                yield f"id: {page.cursor}\n:\n\n".encode()
                quiet = moment
            else:
                yield b""
            try:
                page = self._newest(page.cursor, wanted, _PAGE, _LOOK)
            except errors.MoorageError:
                # The client connects again, and gets the error.
                return

    def _newest(self, cursor: int, wanted: EventFilter, limit: int, seconds: float) -> EventPage:
        found = self._tail.after(cursor, seconds)
        if found is None:
            return self._reader.page(cursor, wanted, limit)
        chosen = [event for event in found if wanted.wants(event)][:limit]
        if len(chosen) == limit:
            return EventPage(chosen, chosen[-1].number)
        return EventPage(chosen, found[-1].number if found else cursor)


def routes(reader: JournalReader, tail: Tail, clock: Clock) -> Sequence[Route]:
    """Returns the routes, over the journal.

    :param tail: has the newest events for the requests that wait.
    """
    return (
        Route(
            "GET",
            "/events",
            _EventsApi(reader, tail, clock).read,
            _GET,
            "List events in the order of their numbers. With wait: wait so many seconds for the first one. With "
            "Accept: text/event-stream: a stream of events from Last-Event-ID on. With before: each event also has the fields "
            "that the change has changed, with their values before it.",
            {200: _EVENTS, 304: None, 410: None},
            query=_QUERY,
            tags=("events",),
        ),
    )


def _wanted(request: Request) -> EventFilter:
    """Returns the filter of a query, within what the caller may see.

    :raises Forbidden: the caller is neither of the system nor of a project.
    """
    context, query = request.context, request.query
    if not context.system_scope and not context.project_id:
        raise errors.Forbidden("Events are shown to readers of the system and to members of a project.")
    return EventFilter(
        query.get("kind"),
        query.get("subject"),
        None if context.system_scope else context.project_id,
        query.get("actor"),
        query.get("request_id"),
        query.get("global_request_id"),
        query.get("since"),
    )


def _last_event_id(request: Request) -> str:
    """Where a stream begins: the header of a client that connects again, the query, or the end of the journal.

    :raises InvalidInput: the header is no number of an event.
    """
    last = request.header("Last-Event-ID")
    if last is not None and not _CURSOR.fullmatch(last):
        raise errors.InvalidInput("Last-Event-ID must be the number of an event.", path="Last-Event-ID")
    return last or request.query.get("after") or "latest"


def _refuse_before(query: Mapping[str, Any], streams: bool) -> None:
    """:raises InvalidInput: values before changes are asked for of an answer that waits; those are written from memory."""
    if query.get("before") and (streams or query.get("wait")):
        raise errors.InvalidInput("before is for pages: leave out wait, and do not ask for a stream.", path="before")


def _shown(page: EventPage, places: bool, before: Mapping[int, Mapping[str, Any]] | None = None) -> Mapping[str, Any]:
    """Returns a page of events as JSON data.

    :param before: what each change has changed, by the number of its event; None: that is not shown.
    """
    found = [_event(each, places) for each in page.events]
    for event in found:
        if before is not None and event["number"] in before:
            event["before"] = _visible(before[event["number"]], places)
    return {"events": found, "next_after": str(page.cursor)}


def _event(event: RecordedEvent, places: bool) -> dict[str, Any]:
    found = fields_of(event)
    found["state"] = _visible(event.state, places)
    if not places:
        del found["service"]
    return found


def _visible(state: Mapping[str, Any], places: bool) -> Mapping[str, Any]:
    return state if places else {name: value for name, value in state.items() if name not in _PLACES}
