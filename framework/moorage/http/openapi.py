# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, from the very schemas that requests are validated with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from moorage.http.dialect import Dialect
from moorage.http.routes import Route

__all__ = ["document"]

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
                "status": {"type": "integer"},
                "request_id": {"type": "string"},
            },
            "required": ["code", "message"],
        }
    },
    "required": ["error"],
}
_ERRORS = {
    400: "The request can never be right.",
    401: "Credentials are missing or wrong.",
    403: "The policy does not allow it.",
    404: "There is no such thing.",
    406: "The microversion is not served.",
    409: "It contradicts the present state.",
    413: "The body is too large.",
    503: "It cannot be done now; see Retry-After.",
}


def document(routes: Sequence[Route], dialect: Dialect, prefix: str) -> dict[str, Any]:
    """Returns the document as JSON data."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(prefix + route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Moorage {dialect.service_type}", "version": metadata.version("moorage")},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
        "security": [{"basic": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "tags": list(route.tags),
        "x-policy": route.policy,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {
            **{str(status): _response("Done.", schema) for status, schema in route.responses.items()},
            **{
                str(status): _response(text, {"$ref": "#/components/schemas/Error"}) for status, text in _ERRORS.items()
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    plain = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": route.path_schemas.get(name, plain)} for name in names
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    needed = route.query.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": schema}
        for name, schema in route.query.get("properties", {}).items()
    ]


def _response(text: str, schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"description": text}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
