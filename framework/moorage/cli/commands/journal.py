# SPDX-License-Identifier: Apache-2.0
"""moorage events, moorage audit, moorage trace."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from moorage import client, errors
from moorage.cli import base
from moorage.clock import Clock, SystemClock

__all__ = ["Audit", "Events", "Trace"]

#: Seconds that one request waits for new events.
_WAIT = 30
#: Seconds until an API that does not answer is asked again.
_PAUSE = 1.0
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
TRACE_COLUMNS = ("at", "seconds", "step", "subject", "detail", "service", "request_id")
AUDIT_COLUMNS = ("number", "at", "kind", "subject", "change", "actor", "service", "request_id")


class Events(base.ApiCommand):
    """Print the events of the journal: what changed, when, by whom, and by which request."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--follow", action="store_true", help="go on with new events until interrupted")
        parser.add_argument(
            "--after", metavar="NUMBER", help="only events after the one of this number; latest: only new ones"
        )
        parser.add_argument("--kind", help="only this kind, for example instance.delete")
        parser.add_argument("--subject", help="only this subject, for example instance/UUID")
        parser.add_argument("--actor", help="only changes that this user asked for")
        parser.add_argument("--request-id", metavar="ID", help="only changes of this request")
        parser.add_argument("--json", action="store_true", help="one JSON object a line")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Sends the request and prints the answer."""
        query = {name: getattr(parsed_args, name) for name in ("kind", "subject", "actor", "request_id")}
        follow = SystemClock() if parsed_args.follow else None
        for event in _pages(base.connection(parsed_args), query, parsed_args.after, follow):
            line = json.dumps(event, sort_keys=True) if parsed_args.json else _line(event)
            self.app.stdout.write(line + "\n")
            self.app.stdout.flush()
        return 0


class Audit(base.ApiLister):
    """List changes with their user, time and request, and the values before and after each change."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--actor", help="only changes that this user asked for")
        parser.add_argument("--subject", help="only this subject, for example instance/UUID")
        parser.add_argument("--since", metavar="TIME", help="not before: 2026-11-21T18:00 (UTC), or 30m, 12h, 7d ago")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args)
        since = None if parsed_args.since is None else _since(parsed_args.since)
        query = {"actor": parsed_args.actor, "subject": parsed_args.subject, "since": since, "before": "true"}
        return base.table(AUDIT_COLUMNS, [_audited(event) for event in _pages(api, query)])


class Trace(base.ApiLister):
    """Trace one request, or one instance, step by step with times.

    The steps: the API receives the request, a scheduler decides and claims, an agent gets the message ("told"), begins and
    finishes. The times are the database's; only "received" is by the clock of the API's host, and "told" by that of the agent's.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "id",
            metavar="ID",
            help="a request id (the header X-OpenStack-Request-ID of an answer, or the one that the client sent), "
            "the uuid of an instance, or a subject of the journal such as volume/UUID",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api, name = base.connection(parsed_args), str(parsed_args.id)
        # A decision and what it changed are one commit; the decision comes first.
        events = sorted(_of(api, name), key=lambda event: (event["at"], event["kind"] != "operation.place"))
        steps = [step for event in events for step in _steps(event)]
        if not steps:
            # A request that was refused has changed nothing, so the journal has nothing of it.
            try:
                steps = [_refused(api.decision(name))]
            # Only administrators may ask schedulers for decisions.
            except (errors.NotFound, errors.Forbidden) as error:
                raise errors.NotFound(
                    f"The journal has no event of {name} (any more), and no scheduler remembers a decision on it."
                ) from error
        began = steps[0]["time"]
        rows = [
            {**step, "at": base.time_text(step["time"]), "seconds": _since_first(step["time"], began)} for step in steps
        ]
        return base.table(TRACE_COLUMNS, rows)


def _of(api: client.Client, name: str) -> list[dict[str, Any]]:
    """Returns the events of a request or of a subject, in the order of their numbers.

    A request that a client's id names comes as one: the service that asked may have sent several with that id.
    """
    if not name.startswith("req-"):
        return list(_pages(api, {"subject": name if "/" in name else f"instance/{name}"}))
    return list(_pages(api, {"request_id": name})) or list(_pages(api, {"global_request_id": name}))


def _steps(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What one event says of the way, as lines of the table."""
    state, at = event["state"], event["at"]
    common = {name: event.get(name, "") for name in ("subject", "service", "request_id")}
    what = state.get("operation", "")

    def step(name: str, time: int | None = at, detail: str = "") -> dict[str, Any]:
        return {**common, "step": name, "time": time, "detail": detail}

    match event["kind"]:
        case "operation.place":
            if state.get("received_at"):
                yield {**step("received", state["received_at"], f"by the API, for {what}"), "service": ""}
            yield step("decided", at, _decision(state))
            yield step("claimed", at, f"{what} on node {state['node']}" if "node" in state else what)
        case "operation.take":
            yield step("taken over", at, f"{what}, try {state['attempts']}")
        case "operation.end" | "operation.release" as kind:
            tries = f", try {state['attempts']}" if state["attempts"] > 1 else ""
            if state.get("told_at"):
                yield step("told", state["told_at"], f"to do the {what}")
            yield step("begun", state["began_at"] or None, f"{what}{tries}")
            yield step("finished" if kind == "operation.end" else "released, to be tried again", at, what)
        case kind:
            shown = {name: state[name] for name in ("status", "host", "node") if state.get(name)} or state
            yield step(kind, at, _change({}, shown))


def _decision(state: Mapping[str, Any]) -> str:
    if "considered" not in state:
        return ""
    removed = ", ".join(f"{name} removed {count}" for name, count in (state.get("removed") or {}).items() if count)
    return f"{state['passed']} of {state['considered']} nodes passed the filters" + (f": {removed}" if removed else "")


def _refused(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line of a request that no node could take."""
    return {
        "time": None, "step": "refused", "subject": f"instance/{decision['instance_uuid']}",
        "detail": f"{decision['outcome']}; {_decision(decision)}", "service": "", "request_id": decision.get("request_id", ""),
    }  # fmt: skip


def _since_first(time: int | None, first: int | None) -> str:
    return "" if time is None or first is None else f"{(time - first) / 1_000_000:.3f}"


def _audited(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of the table of changes."""
    state, before = event["state"], event.get("before")
    if event["kind"].startswith("operation."):
        # It tells of work on the subject, and what is empty tells nothing.
        change = _change({}, {name: value for name, value in state.items() if value})
    elif before is None:
        change = _change({}, state)
    else:
        change = _change(before, {name: state.get(name) for name in before})
    return {**event, "at": base.time_text(event["at"]), "change": change}


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    parts = []
    for name, value in sorted(after.items()):
        if before.get(name) not in (value, None, ""):
            parts.append(f"{name}: {_short(before[name])} -> {_short(value) or 'nothing'}")
        elif name not in before or before[name] != value:
            parts.append(f"{name}: {_short(value)}")
    return ", ".join(part for part in parts if not part.endswith(": "))


def _short(value: Any) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else str(value)


def _since(text: str) -> int:
    """Microseconds since the Unix epoch.

    :raises InvalidInput: it is neither a time nor an age.
    """
    age = re.fullmatch(r"(\d+)([mhd])", text)
    try:
        if age is not None:
            moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(**{_UNITS[age[2]]: int(age[1])})
        else:
            moment = datetime.datetime.fromisoformat(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        raise errors.InvalidInput(f"--since {text}: write a time as 2026-11-21T18:00, or an age as 12h.") from None
    return max(0, int(moment.timestamp() * 1_000_000))


def _pages(
    api: client.Client, query: Mapping[str, Any], after: str | None = None, follow: Clock | None = None
) -> Iterator[dict[str, Any]]:
    """Returns all events of a query, page after page.

    :param after: the cursor to begin after; None: from the oldest event.
    :param follow: go on with new events for ever, and pause by this clock while the API does not answer.
    """
    cursor = after
    while True:
        try:
            page = api.events(cursor, wait=_WAIT if follow is not None and cursor is not None else None, **query)
        except errors.Unavailable:
            if follow is None or cursor is None:
                raise
            # The API starts again, or is busy. The cursor is where it was, so nothing is missed.
            follow.sleep(_PAUSE)
            continue
        yield from page["events"]
        if page["next_after"] == cursor and follow is None:
            return
        cursor = page["next_after"]


def _line(event: dict[str, Any]) -> str:
    parts = [str(event["number"]), base.time_text(event["at"]), event["kind"], event["subject"]]
    state = " ".join(f"{name}={value}" for name, value in sorted(event["state"].items()) if value not in ("", None))
    by = {"by": event["actor"], "through": event.get("service"), "request": event["request_id"]}
    return " ".join([*parts, state, *(f"{name} {value}" for name, value in by.items() if value)])
