# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON text, column by column: nothing is decided, looked up or encoded once for each row that can be once for all.

JSON that the store keeps as text is passed through as it is. Values that repeat (states, classes, shards) are encoded once. A
template that is made for a microversion and a choice of fields takes the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from moorage.db.time import MICROSECONDS
from moorage.http.routes import Version
from moorage_plugins.api.baremetal.fields import Field, Kind, Resource

__all__ = ["MASK", "Renderer"]

_quote = json.encoder.encode_basestring_ascii
#: What is shown instead of a secret.
MASK = "******"
_SECRETS = ("pass", "secret", "token", "credential", "private_key")


def _texts(values: Sequence[Any]) -> list[str]:
    known = {value: "null" if value is None else _quote(str(value)) for value in set(values)}
    return [known[value] for value in values]


def _uuids(values: Sequence[Any]) -> Sequence[Any]:
    return [f'"{value}"' for value in values]


def _flags(values: Sequence[Any]) -> list[str]:
    return ["true" if value else "false" for value in values]


def _json(values: Sequence[Any]) -> list[str]:
    return [value or "null" for value in values]


def _secrets(values: Sequence[Any]) -> list[str]:
    # Most have none: one look at all of them costs a fraction of a look at each.
    if not _secretive("".join(filter(None, values))):
        return _json(values)
    return [_masked(value) if value and _secretive(value) else value or "null" for value in values]


def _secretive(text: str) -> bool:
    lower = text.lower()
    return any(word in lower for word in _SECRETS)


def _times(values: Sequence[Any]) -> list[str]:
    known = {value: "null" if value is None else f'"{_iso(value)}"' for value in set(values)}
    return [known[value] for value in values]


_ENCODERS: dict[Kind, Callable[[Sequence[Any]], Sequence[str]]] = {
    Kind.UUID: _uuids,
    Kind.TEXT: _texts,
    Kind.FLAG: _flags,
    Kind.JSON: _json,
    Kind.SECRETS: _secrets,
    Kind.TIME: _times,
}


class Renderer:
    """Writes rows of ``columns`` as JSON objects of some fields of a resource.

    :param links: with ``links`` to the thing itself.
    :param sub: with links to the collections below it, as details have them.
    """

    def __init__(
        self, resource: Resource, fields: Sequence[Field], version: Version, *, links: bool, sub: bool
    ) -> None:
        kept = [field for field in fields if field.column is not None]
        # Types are left out: SQLAlchemy would turn every value around, only to have it turned back.
        self.columns = [resource.ident, resource.uuid, *(_raw(field) for field in kept)]
        self._encoders = [_ENCODERS[field.kind] for field in kept]
        parts = [f'"{field.name}":%s' for field in kept]
        parts += [f'"{field.name}":{field.constant}' for field in fields if field.column is None]
        self._below = [name for name, since in resource.links if sub and since <= version]
        self._links = links
        self._collection = resource.name
        self._template = ",".join(parts)

    def render(self, rows: Sequence[Any], base_url: str) -> list[str]:
        """Returns the JSON text of each row.

        :param base_url: the mount with scheme and host, for links.
        """
        if not rows:
            return []
        columns = list(zip(*rows, strict=True))
        encoded: list[Sequence[Any]] = [
            encode(values) for encode, values in zip(self._encoders, columns[2:], strict=True)
        ]
        template, uses = self._with_links(base_url)
        encoded += [columns[1]] * uses
        if not encoded:
            return [template] * len(rows)
        return list(map(template.__mod__, zip(*encoded, strict=True)))

    def _with_links(self, base_url: str) -> tuple[str, int]:
        base = _quote(base_url)[1:-1].replace("%", "%%")
        parts = [self._template] if self._template else []
        uses = 0
        if self._links:
            parts.append(f'"links":{_pair(base, self._collection, "%s")}')
            uses += 2
        for name in self._below:
            parts.append(f'"{name}":{_pair(base, self._collection, "%s/" + name)}')
            uses += 2
        return "{" + ",".join(parts) + "}", uses


def _pair(base: str, collection: str, rest: str) -> str:
    return (
        f'[{{"href":"{base}/v1/{collection}/{rest}","rel":"self"}},'
        f'{{"href":"{base}/{collection}/{rest}","rel":"bookmark"}}]'
    )


def _raw(field: Field) -> Any:
    if field.kind in (Kind.JSON, Kind.SECRETS):
        return sa.type_coerce(field.column, sa.Text)
    if field.kind is Kind.FLAG:
        return sa.type_coerce(field.column, sa.Integer)
    return field.column


@functools.lru_cache(maxsize=10_000)
def _iso(micros: int) -> str:
    return datetime.fromtimestamp(micros // MICROSECONDS, UTC).isoformat()


def _masked(text: str) -> str:
    return json.dumps(_without_secrets(json.loads(text)), separators=(",", ":"))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: MASK if _secretive(key) and not isinstance(inside, dict | list) else _without_secrets(inside)
            for key, inside in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(inside) for inside in value]
    return value
