# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries against compiled schemas, refused in Placement's words, which its clients and operators know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
from typing_extensions import override

from moorage import errors
from moorage.http import validation
from moorage.http.routes import Schema

__all__ = ["BodyValidator", "QueryValidator", "canonical_uuid", "is_uuid"]

#: What Python's uuid.UUID takes, as Placement's clients write it: hyphens anywhere or nowhere, upper or lower case.
_UUID = re.compile(r"(urn:)?(uuid:)?\{?-*([0-9a-fA-F]-*){32}\}?")
_FORMATS = jsonschema.FormatChecker(formats=())
_LONGEST = 1000


def is_uuid(value: object) -> bool:
    """It is written like a uuid; what is no text is the affair of the schema's type."""
    return not isinstance(value, str) or _UUID.fullmatch(value) is not None


def canonical_uuid(value: str) -> str:
    """Converts a uuid in any form that :func:`is_uuid` accepts to lower case with hyphens, as it is stored."""
    digits = re.sub(r"[^0-9a-f]", "", value.lower().removeprefix("urn:").removeprefix("uuid:"))
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


_FORMATS.checks("uuid")(is_uuid)


class BodyValidator(validation.Validator):
    """A compiled schema of a body."""

    _prefix = "JSON does not validate"

    def __init__(self, schema: Schema, where: str) -> None:
        super().__init__(schema, where, formats=_FORMATS)

    @override
    def refusal(self, worst: Any, path: str) -> errors.InvalidInput:
        # As the schema is published: $ is written as Python's end of a text only to be checked.
        text = str(worst).replace("\\\\Z", "$")
        return errors.InvalidInput(f"{self._prefix}: {text[:_LONGEST]}", path=path)


class QueryValidator(BodyValidator):
    """A compiled schema of a query. It checks the last value of a parameter, as in Placement; handlers get all values."""

    _prefix = "Invalid query string parameters"

    @override
    def read_query(self, given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
        self.check({name: values[-1] for name, values in given.items()})
        return given
