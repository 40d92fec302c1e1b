# SPDX-License-Identifier: Apache-2.0
"""Finds the routes of a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moorage.http.routes import Route

__all__ = ["PathRoutes", "RouteTable"]


@dataclass(slots=True)
class PathRoutes:
    """The routes of one path."""

    #: The path with ``{name}`` parts.
    template: str
    names: tuple[str, ...]
    methods: dict[str, list[Route]] = field(default_factory=dict)
    #: A route of the path needs no authentication.
    public: bool = False

    def add(self, route: Route) -> None:
        """Adds a route."""
        self.methods.setdefault(route.method, []).append(route)
        self.public = self.public or route.public

    def of(self, method: str) -> Sequence[Route]:
        """Returns the routes of a method; HEAD is answered like GET, without the body."""
        return self.methods.get("GET" if method == "HEAD" else method, ())


@dataclass(slots=True)
class _Segment:
    """Where a path may go on: a literal segment wins over a parameter."""

    literals: dict[str, _Segment] = field(default_factory=dict)
    parameter: _Segment | None = None
    routes: PathRoutes | None = None


class RouteTable:
    """The routes of an API by path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._root = _Segment()
        for route in routes:
            self._add(route)

    def find(self, path: str) -> tuple[PathRoutes, dict[str, str]] | None:
        """Returns the routes of a path and its parameters; None if no route has the path."""
        values: list[str] = []
        found = _match(self._root, path.split("/"), 0, values)
        return None if found is None else (found, dict(zip(found.names, values, strict=True)))

    def _add(self, route: Route) -> None:
        names, segment = [], self._root
        for text in route.path.split("/"):
            if text.startswith("{"):
                names.append(text[1:-1])
                segment.parameter = segment.parameter or _Segment()
                segment = segment.parameter
            else:
                segment = segment.literals.setdefault(text, _Segment())
        if segment.routes is None:
            segment.routes = PathRoutes(route.path, tuple(names))
        if segment.routes.template != route.path:
            raise ValueError(f"The paths {segment.routes.template} and {route.path} are the same.")
        segment.routes.add(route)


def _match(segment: _Segment, texts: Sequence[str], number: int, values: list[str]) -> PathRoutes | None:
    if number == len(texts):
        return segment.routes
    text = texts[number]
    literal = segment.literals.get(text)
    if literal is not None:
        found = _match(literal, texts, number + 1, values)
        if found is not None:
            return found
    if segment.parameter is not None and text:
        values.append(text)
        found = _match(segment.parameter, texts, number + 1, values)
        if found is not None:
            return found
        values.pop()
    return None
