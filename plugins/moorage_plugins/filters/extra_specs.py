# SPDX-License-Identifier: Apache-2.0
"""What a flavor's extra spec asks of a value, in Nova's words.

``= N`` (at least N), ``== N``, ``!= N``, ``>= N``, ``<= N`` compare numbers; ``s== T``, ``s!= T``, ``s< T``, ``s<= T``,
``s> T``, ``s>= T`` compare texts; ``<in> T`` asks that T is part of the value, ``<all-in> T U`` that all of them are, and
``<or> T <or> U`` that the value is one of them. Anything else is compared with the value as it stands.

Two things differ from Nova, which fails the whole request in both cases: a condition that can never be right is refused with a
sentence, and a node whose value is no number where one is asked for does not match.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors

__all__ = ["SpecCondition", "condition"]

_NUMBERS: Mapping[str, Callable[[float, float], bool]] = {
    "=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}
_TEXTS: Mapping[str, Callable[[str, str], bool]] = {
    "s==": operator.eq,
    "s!=": operator.ne,
    "s<": operator.lt,
    "s<=": operator.le,
    "s>": operator.gt,
    "s>=": operator.ge,
    "<in>": lambda value, part: part in value,
}


@dataclass(frozen=True, slots=True)
class SpecCondition:
    """A condition that was understood."""

    text: str
    matches: Callable[[str], bool]


def condition(key: str, text: str) -> SpecCondition:
    """Returns the condition that an extra spec states.

    :raises InvalidInput: it can never be right; names the extra spec.
    """
    try:
        return _parsed(text)
    except ValueError as error:
        raise errors.InvalidInput(
            f"The extra spec {key} = {text!r} of the flavor cannot be understood: {error}.",
            path=f"flavor/extra_specs/{key}",
        ) from None


@functools.lru_cache(4096)
def _parsed(text: str) -> SpecCondition:
    words = text.split()
    known = words and (words[0] in _NUMBERS or words[0] in _TEXTS or words[0] in ("<or>", "<all-in>"))
    if not known:
        return SpecCondition(text, lambda value: value == text)
    name, operands = words[0], words[1:]
    if not operands:
        raise ValueError(f"nothing stands after {name}")
    return SpecCondition(text, _comparison(name, operands))


def _comparison(name: str, operands: list[str]) -> Callable[[str], bool]:
    if name == "<or>":
        wanted = frozenset(operands[::2])
        return lambda value: value in wanted
    if name == "<all-in>":
        return lambda value: all(part in value for part in operands)
    if name in _TEXTS:
        compare = _TEXTS[name]
        return lambda value: compare(value, operands[0])
    try:
        number = float(operands[0])
    except ValueError:
        raise ValueError(f"{operands[0]!r} is not a number, which {name} compares") from None
    return functools.partial(_number_matches, _NUMBERS[name], number)


def _number_matches(compare: Callable[[float, float], bool], number: float, value: Any) -> bool:
    try:
        return compare(float(value), number)
    except ValueError:
        return False
