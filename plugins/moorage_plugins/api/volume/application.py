# SPDX-License-Identifier: Apache-2.0
"""The volume dialect's wire conventions, which are Cinder's: the shape of errors and of version documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.error_statuses import STATUSES
from moorage.http.routes import Request, Response, Schema
from moorage.http.validation import Validator
from moorage_plugins.api.volume.schemas import VolumeValidator

__all__ = ["DIALECT", "NAMES_AND_STATES", "VolumeApplication", "versions_document"]

#: Cinder's highest is 3.71; the one after it is ours, with what the clients of Cinder do not know.
DIALECT = Dialect("volume", (3, 0), (3, 72), statuses={**STATUSES, errors.Conflict: 400, errors.InUse: 409})
NAMES_AND_STATES = (3, 72)
_KINDS = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    409: "conflictingRequest",
    413: "overLimit",
}


class VolumeApplication(Application):
    """Answers as Cinder does."""

    request_id_header = "x-openstack-request-id"

    @override
    def version_headers(self, request: Request) -> Iterable[tuple[str, str]]:
        return (*super().version_headers(request), ("x-compute-request-id", request.request_id))

    @override
    def compile_schema(self, schema: Schema, where: str) -> Validator:
        return VolumeValidator(schema, where)

    @override
    def render_error(self, request: Request, error: errors.MoorageError, status: int) -> tuple[str, bytes]:
        shown: dict[str, Any] = {"code": status, "message": error.message}
        if status == 413:
            # Cinder's clients look for it: waiting is no use.
            shown["retryAfter"] = "0"
        return self.content_type, json.dumps({_KINDS.get(status, "computeFault"): shown}).encode()


def versions_document(request: Request) -> Response:
    """What is served here; needs no authentication."""
    low, high = (f"{major}.{minor}" for major, minor in (DIALECT.lowest, DIALECT.highest))
    base = request.base_url.removesuffix("/")
    version = {
        "id": "v3.0",
        "status": "CURRENT",
        "version": high,
        "min_version": low,
        "updated": "2026-11-21T00:00:00Z",
        "links": [{"rel": "self", "href": f"{base}/v3/"}],
        "media-types": [{"base": "application/json", "type": "application/vnd.openstack.volume+json;version=3"}],
    }
    return Response(300 if request.path in ("", "/") else 200, {"versions": [version]})
