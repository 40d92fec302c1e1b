# SPDX-License-Identifier: Apache-2.0
"""A requester's own condition, in JSON."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip
from moorage_plugins.filters.sets import attribute, attribute_column, rows_where_all

__all__ = ["JsonFilter"]

#: How deep a query may be nested.
_DEPTH = 50
#: Commands of a query: each may be carried out for every node of a large fleet.
_MOST = 64
Lookup = Callable[[str], Any]


def _compare(holds: Callable[[Any, Any], bool]) -> Callable[[list[Any]], bool]:
    def compare(arguments: list[Any]) -> bool:
        if len(arguments) < 2:
            return False
        try:
            return all(holds(arguments[0], other) for other in arguments[1:])
        except TypeError:
            # A text compared with a number: a node that says such a thing does not pass.
            return False

    return compare


_COMMANDS: Mapping[str, Callable[[list[Any]], Any]] = {
    "=": _compare(operator.eq),
    "<": _compare(operator.lt),
    ">": _compare(operator.gt),
    "<=": _compare(operator.le),
    ">=": _compare(operator.ge),
    "in": lambda arguments: len(arguments) > 1 and arguments[0] in arguments[1:],
    "not": lambda arguments: [not argument for argument in arguments],
    "or": any,
    "and": all,
}


class JsonFilter(HostFilter):
    """Passes nodes for which the hint ``query`` holds.

    A query is a list: one of ``= < > <= >= in not or and``, then its arguments, which may be queries. A text that begins with ``$``
    stands for what the node says under that name: ``$free_ram_mb``, ``$properties.rack``. What a node does not say is left out of
    the arguments, and a comparison with fewer than two does not hold. ``not`` answers a list with an answer for each argument; as
    the whole query it holds when one of them does, within ``and`` and ``or`` a list always counts as true (as in Nova).
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    judges_instances = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        query = _query(spec_obj)

        def lookup(name: str) -> Any:
            return _follow(*attribute(host_state, name.split(".")))

        return not query or _holds(query, lookup)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return None if _query(spec) else SKIP

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        query = _query(spec)
        if not query:
            return rows
        names = sorted(set(_names(query)))
        columns, rests = [], []
        for name in names:
            column, rest = attribute_column(fleet, name.split("."))
            columns.append(column)
            rests.append(rest)

        def holds(*values: Any) -> bool:
            known = {name: _follow(value, rest) for name, value, rest in zip(names, values, rests, strict=True)}
            return _holds(query, known.__getitem__)

        return rows_where_all(columns, rows, holds)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        names = sorted(set(_names(_query(spec) or [])))
        said = [f"{name} = {_follow(*attribute(host_state, name.split('.')))!r}" for name in names]
        return "the hint query does not hold" + (f" ({', '.join(said)})" if said else "")


def _query(spec: RequestSpec) -> list[Any] | None:
    """Parses the query of a request; None: it has none.

    :raises InvalidInput: says what is wrong with it, and where.
    """
    texts = spec.hints.get("query")
    if not texts or not texts[0]:
        return None
    if len(texts) > 1:
        raise _wrong("it is given more than once")
    try:
        query = json.loads(texts[0])
    except ValueError as error:
        raise _wrong(f"it is no JSON ({error})") from None
    except RecursionError:
        raise _wrong("it is nested too deep") from None
    if not query:
        return None
    _check(query, 0)
    if _commands(query) > _MOST:
        raise _wrong(f"it has more than {_MOST} commands")
    return list(query)


def _commands(query: Sequence[Any]) -> int:
    return 1 + sum(_commands(argument) for argument in query[1:] if isinstance(argument, list))


def _check(query: Any, depth: int) -> None:
    if depth > _DEPTH:
        raise _wrong(f"it is nested deeper than {_DEPTH} levels")
    if not isinstance(query, list):
        raise _wrong(f"{json.dumps(query)} stands where a list [command, argument, ...] should")
    if not query:
        return
    if not isinstance(query[0], str) or query[0] not in _COMMANDS:
        raise _wrong(f"{json.dumps(query[0])} is no command; there are {', '.join(_COMMANDS)}")
    for argument in query[1:]:
        if isinstance(argument, list):
            _check(argument, depth + 1)
        elif isinstance(argument, dict):
            raise _wrong(f"{json.dumps(argument)} is an object, which cannot be compared")


def _wrong(problem: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f'The hint query cannot be used: {problem}. Write for example ["and", [">=", "$free_ram_mb", 1024], ["=", '
        '"$properties.rack", "a"]].',
        path="hints/query",
    )


def _names(query: Sequence[Any]) -> Iterator[str]:
    for argument in query[1:]:
        if isinstance(argument, list):
            yield from _names(argument)
        elif isinstance(argument, str) and argument.startswith("$"):
            yield argument[1:]


def _holds(query: Sequence[Any], lookup: Lookup) -> bool:
    answer = _evaluated(query, lookup)
    return any(answer) if isinstance(answer, list) else bool(answer)


def _evaluated(query: Sequence[Any], lookup: Lookup) -> Any:
    if not query:
        return True
    arguments = []
    for argument in query[1:]:
        value = argument
        if isinstance(argument, list):
            value = _evaluated(argument, lookup)
        elif isinstance(argument, str):
            value = lookup(argument[1:]) if argument.startswith("$") else argument or None
        if value is not None:
            arguments.append(value)
    return _COMMANDS[query[0]](arguments)


def _follow(value: Any, path: Sequence[str]) -> Any:
    for word in path:
        if not isinstance(value, dict):
            return None
        value = value.get(word)
    return value
