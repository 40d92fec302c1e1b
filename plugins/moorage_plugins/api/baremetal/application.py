# SPDX-License-Identifier: Apache-2.0
"""The baremetal dialect's wire conventions, which are Ironic's: version headers, errors, root documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.http.application import Application
from moorage.http.dialect import Dialect, parse_version, requested_version
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.baremetal.failures import fault

__all__ = ["DIALECT", "BaremetalApplication", "root", "v1", "with_slash"]

DIALECT = Dialect("baremetal", (1, 1), (1, 115))
_OWN = "X-OpenStack-Ironic-API-Version"
_LOW, _HIGH = (f"{major}.{minor}" for major, minor in (DIALECT.lowest, DIALECT.highest))
SHARDS: Version = (1, 82)
PORTGROUPS: Version = (1, 23)


class BaremetalApplication(Application):
    """Answers as Ironic does."""

    request_id_header = "Openstack-Request-Id"

    @override
    def read_version(self, request: Request) -> Version:
        text = request.header(_OWN)
        if not text:
            text = requested_version(request.header("OpenStack-API-Version"), "baremetal")
        if not text:
            return DIALECT.lowest
        if text.strip().lower() == "latest":
            return DIALECT.highest
        try:
            version = parse_version(text.strip())
        except ValueError:
            raise errors.InvalidInput(f"Invalid value for {_OWN} header: {text[:80]!r}", path=_OWN) from None
        if not DIALECT.lowest <= version <= DIALECT.highest:
            raise errors.UnsupportedVersion(
                f"Version {text} was requested but the minor version is not supported by this service. The supported version "
                f"range is: [{_LOW}, {_HIGH}].",
                min_version=_LOW,
                max_version=_HIGH,
            )
        return version

    @override
    def version_headers(self, request: Request) -> Iterable[tuple[str, str]]:
        major, minor = request.version
        return (
            ("X-OpenStack-Ironic-API-Minimum-Version", _LOW),
            ("X-OpenStack-Ironic-API-Maximum-Version", _HIGH),
            (_OWN, f"{major}.{minor}"),
            ("OpenStack-API-Version", f"baremetal {major}.{minor}"),
            ("Vary", f"{_OWN}, OpenStack-API-Version"),
        )

    @override
    def no_such_version(self, request: Request, routes: Sequence[Route]) -> errors.MoorageError:
        collection = request.path.strip("/").split("/")[1]
        return errors.NotFound(f"The API version does not allow {collection}")

    @override
    def render_error(self, request: Request, error: errors.MoorageError, status: int) -> tuple[str, bytes]:
        return "application/json", fault(error.message, status)


def with_slash(method: str, path: str, handler: Callable[[Request], Response], **more: Any) -> Iterable[Route]:
    """Returns a route at a path with and without a slash at its end; the clients write both."""
    return Route(method, path, handler, **more), Route(method, path + "/", handler, **more)


def _version(request: Request) -> dict[str, Any]:
    return {
        "id": "v1",
        "links": [{"href": f"{request.base_url}/v1/", "rel": "self"}],
        "status": "CURRENT",
        "min_version": _LOW,
        "version": _HIGH,
    }


def root(request: Request) -> Response:
    """``GET /``: the versions that there are; needs no authentication."""
    version = _version(request)
    return Response(
        200,
        {
            "name": "OpenStack Ironic API",
            "description": "The bare metal dialect of Moorage.",
            "default_version": version,
            "versions": [version],
        },
    )


def v1(request: Request) -> Response:
    """``GET /v1``: what is below; needs no authentication."""
    found: dict[str, Any] = {
        "id": "v1",
        "links": [{"href": f"{request.base_url}/v1/", "rel": "self"}],
        "media_types": [{"base": "application/json", "type": "application/vnd.openstack.ironic.v1+json"}],
        "version": _version(request),
    }
    for name, since in (("nodes", (1, 1)), ("ports", (1, 1)), ("portgroups", PORTGROUPS), ("shards", SHARDS)):
        if since <= request.version:
            found[name] = [
                {"href": f"{request.base_url}/v1/{name}/", "rel": "self"},
                {"href": f"{request.base_url}/{name}/", "rel": "bookmark"},
            ]
    return Response(200, found)
