# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries against schemas that were compiled once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from moorage import errors
from moorage.http.routes import Schema

jsonschema_rs: Any
try:
    import jsonschema_rs
except ImportError:  # a distribution may not carry Rust: slower, with the same answers
    jsonschema_rs = None

__all__ = ["Validator", "parse_json", "refuse_unstorable"]

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Validator:
    """One compiled schema. ``where`` names what is validated, for messages (``body``, ``query``).

    :param formats: the checks of ``format``; None: formats are only documentation.
    :raises SchemaError: the schema has a mistake.
    """

    def __init__(self, schema: Schema, where: str, formats: jsonschema.FormatChecker | None = None) -> None:
        self._where = where
        self._slow = jsonschema.Draft202012Validator(_to_the_end(dict(schema)), format_checker=formats)
        self._fast = self._compile_fast(dict(schema), formats) if jsonschema_rs else None
        if self._fast is None:
            self._slow.check_schema(dict(schema))
        self._properties: Mapping[str, Any] = schema.get("properties", {})

    def _compile_fast(self, schema: dict[str, Any], formats: jsonschema.FormatChecker | None) -> Any:
        """Returns the validator of the Rust library, which checks the schema too: in a hundredth of the time.

        :raises SchemaError: the schema has a mistake; the error is that of the slow library, which says where.
        """
        try:
            return jsonschema_rs.validator_for(schema, **_fast_formats(formats))
        except ValueError:
            self._slow.check_schema(schema)
            raise

    def check(self, data: Any) -> None:
        """Refuse what the schema does not allow.

        :raises InvalidInput: says where and what.
        """
        if self._fast is not None and self._fast.is_valid(data):
            return
        found = sorted(self._slow.iter_errors(data), key=lambda error: (len(error.absolute_path), str(error.message)))
        if not found:
            if self._fast is None:
                return
            raise errors.InvalidInput(f"The {self._where} is not what the API document allows.", path=self._where)
        worst = jsonschema.exceptions.best_match(found) or found[0]
        raise self.refusal(worst, "/".join([self._where, *(str(part) for part in worst.absolute_path)]))

    def refusal(self, worst: jsonschema.ValidationError, path: str) -> errors.InvalidInput:
        """Returns the error for the first violation, with its place. Dialects override it to use their own words."""
        return errors.InvalidInput(f"{path}: {_shortened(worst.message)}.", path=path)

    def read_query(self, given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
        """The parameters of a query with the types that the schema says. An array may be given several times, all else once.

        :raises InvalidInput: one is not what the schema says, or is given twice where only one is asked for.
        """
        typed = {name: self._typed(name, values) for name, values in given.items()}
        self.check(typed)
        return typed

    def _typed(self, name: str, values: Sequence[str]) -> Any:
        schema = self._properties.get(name)
        if schema is None:  # the schema refuses it, or allows any
            return values
        wanted = schema.get("type")
        if wanted == "array":
            return values
        if len(values) > 1:
            raise errors.InvalidInput(
                f"query/{name}: it is given {len(values)} times; give it once.", path=f"query/{name}"
            )
        value = values[0]
        if wanted == "integer" and _INTEGER.fullmatch(value):
            return int(value)
        if wanted == "boolean":
            return _BOOLEANS.get(value.lower(), value)
        return value


def parse_json(raw: bytes) -> Any:
    """Parses the JSON of a request body.

    :raises InvalidInput: it is none; says where it stops being JSON.
    """
    if not raw:
        raise errors.InvalidInput("The body is not JSON: it is empty; a JSON body is needed.", path="body")
    try:
        data = _DECODER.decode(raw.decode("utf-8"))
        if b"\\u" in raw:
            refuse_unstorable(data, "body")
        return data
    except UnicodeDecodeError as error:
        raise errors.InvalidInput(f"The body is not UTF-8 (byte {error.start}).", path="body") from None
    except RecursionError:
        raise errors.InvalidInput("The body is nested too deeply.", path="body") from None
    except json.JSONDecodeError as error:
        raise errors.InvalidInput(
            f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).", path="body"
        ) from None
    except ValueError as error:
        raise errors.InvalidInput(f"The body is not JSON: {_shortened(str(error))}.", path="body") from None


def refuse_unstorable(data: Any, where: str) -> None:
    """Refuse text that JSON can spell but no database keeps: halves of a surrogate pair, and NUL.

    :raises InvalidInput: says where.
    """
    if isinstance(data, str):
        if "\0" in data or not data.isascii() and any("\ud800" <= character <= "\udfff" for character in data):
            raise errors.InvalidInput(
                f"{where}: it holds a character that is no text (NUL, or half of a surrogate pair).", path=where
            )
    elif isinstance(data, dict):
        for key, value in data.items():
            refuse_unstorable(key, where)
            refuse_unstorable(value, f"{where}/{key}")
    elif isinstance(data, list):
        for number, value in enumerate(data):
            refuse_unstorable(value, f"{where}/{number}")


def _to_the_end(schema: Any) -> Any:
    """Returns the schema for Python's regular expressions, in which ``$`` would let a newline follow, unlike JSON Schema's."""
    if isinstance(schema, dict):
        return {
            key: re.sub(r"(?<!\\)\$$", r"\\Z", value)
            if key == "pattern" and isinstance(value, str)
            else _to_the_end(value)
            for key, value in schema.items()
        }
    return [_to_the_end(each) for each in schema] if isinstance(schema, list) else schema


def _fast_formats(formats: jsonschema.FormatChecker | None) -> dict[str, Any]:
    if formats is None:
        return {}
    checks = {name: check for name, (check, _) in formats.checkers.items()}
    return {"validate_formats": True, "formats": checks}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return found


#: Made once: ``json.loads`` would make one for each body, in as much time as it takes to parse a small one.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
