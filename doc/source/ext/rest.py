# SPDX-License-Identifier: Apache-2.0
"""``.. rest-core::`` and ``.. rest-dialect:: NAME``: every operation of the API, from the document and the tables that are served."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList

from moorage.http.application import Application
from moorage.control_plane.core_api import PREFIX
from moorage.control_plane.api_assembly import ApiAssembly
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.interface import API_EXTENSIONS
from moorage.control_plane.process import anonymous_platform
from moorage.db import Database, migrations
from moorage.http.routes import Route, Version


@functools.cache
def _assembly() -> tuple[ApiAssembly, Any]:
    """The API as it is served, over an empty database, with its defaults."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    url = f"sqlite:///{folder.name}/moorage.sqlite"
    conf = config.load(files=[], state_dir=folder.name)
    conf.set_override("connection", url, "database")
    conf.set_override("auth_strategy", "noauth", "api")
    database = Database(url)
    migrations.upgrade_all(database)
    database.close()
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    return ApiAssembly(anonymous_platform("documentation", conf, SystemClock(), opened), conf), conf


def document() -> Mapping[str, Any]:
    """The OpenAPI document that a client gets."""
    assembly, conf = _assembly()
    conf.set_override("enabled_apis", [], "api")
    application = assembly.mounts(conf)[""]
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": f"{PREFIX}/openapi.json", "SERVER_NAME": "x", "SERVER_PORT": "80",
               "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO()}  # fmt: skip
    found: Mapping[str, Any] = json.loads(b"".join(application(environ, lambda *_: None)))
    return found


def operations(name: str) -> tuple[str, Application]:
    """Where a dialect is mounted, and its application."""
    assembly, conf = _assembly()
    application = assembly.dialect(name, conf)
    assert isinstance(application, Application)
    return API_EXTENSIONS.load(name).plugin.mount, application


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kinds = schema.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if text == "array" and isinstance(schema.get("items"), Mapping):
        text = f"array of {_kind(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        text += f", {low if low is not None else '...'} to {high if high is not None else '...'}"
    return text


def _members(schema: Mapping[str, Any]) -> list[str]:
    """The members of an object, each with its kind."""
    needed = schema.get("required", ())
    return [
        f"``{name}`` ({_kind(each)}{', required' if name in needed else ''})"
        for name, each in schema.get("properties", {}).items()
    ]


def _versions(rows: Sequence[Route], lowest: Version) -> str:
    """Of the rows of one method and path, which follow each other."""
    since = min(each.since for each in rows)
    until = None if any(each.until is None for each in rows) else max(each.until for each in rows if each.until)
    low = "" if since <= lowest else ".".join(map(str, since))
    if until is not None:
        return f"{low or '.'.join(map(str, lowest))} to {'.'.join(map(str, until))}"
    return f"from {low}" if low else "all"


def _policy(operation: Route) -> str:
    if operation.public:
        return "nobody is asked who they are"
    return f"``{operation.policy}``" if operation.policy else "depends on what is asked for"


class _Rest(Directive):
    def parsed(self, lines: Sequence[str]) -> list[nodes.Node]:
        found = nodes.container()
        self.state.nested_parse(StringList(list(lines), source="code"), self.content_offset, found)
        return found.children


class RestCore(_Rest):
    """Each operation of the core: what it does, who may ask, what it takes and answers."""

    def run(self) -> list[nodes.Node]:
        """Definitions, in the order of the document."""
        return self.parsed(list(self._lines()))

    def _lines(self) -> Iterator[str]:
        tag = ""
        for path, methods in document()["paths"].items():
            for method, operation in methods.items():
                if operation["tags"] != [tag]:
                    (tag,) = operation["tags"]
                    yield from (f".. rubric:: {tag.capitalize()}", "")
                yield f"``{method.upper()} {path}``"
                yield f"   {operation['summary']} Policy ``{operation['x-policy']}``."
                yield from self._taken(operation)
                done = ", ".join(status for status in operation["responses"] if int(status) < 400)
                yield f"   Answers {done}."
                yield ""

    def _taken(self, operation: Mapping[str, Any]) -> Iterator[str]:
        query = [
            f"``{each['name']}`` ({_kind(each['schema'])}{', required' if each['required'] else ''})"
            for each in operation["parameters"]
            if each["in"] == "query"
        ]
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        for title, members in (("Query", query), ("Body", _members(body))):
            if members:
                yield f"   {title}: {', '.join(members)}."


class RestDialect(_Rest):
    """Each operation of a dialect: from which microversion on, and who may ask.

    ``:without:`` names a part of the path; rows with it are those of other rows, and are left out.
    """

    required_arguments: ClassVar[int] = 1
    option_spec: ClassVar[dict[str, Any]] = {"without": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """A table."""
        mount, application = operations(self.arguments[0])
        low, high = (".".join(map(str, each)) for each in (application.dialect.lowest, application.dialect.highest))
        lines = [
            f"Mounted at ``{mount}``, microversions {low} to {high}.", "",
            ".. list-table::", "   :header-rows: 1", "   :widths: auto", "",
            "   * - Operation", "     - Versions", "     - Policy",
        ]  # fmt: skip
        found: dict[tuple[str, str], list[Route]] = {}
        for each in application.routes:
            if self.options.get("without", " ") not in each.path:
                found.setdefault((each.method, each.path.rstrip("/")), []).append(each)
        for (method, path), rows in found.items():
            policies = sorted({_policy(each) for each in rows})
            lines += [
                f"   * - ``{method} {mount}{path}``",
                f"     - {_versions(rows, application.dialect.lowest)}",
                f"     - {', '.join(policies)}",
            ]
        return self.parsed(lines)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("rest-core", RestCore)
    app.add_directive("rest-dialect", RestDialect)
    return {"parallel_read_safe": True}
