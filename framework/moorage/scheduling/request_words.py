# SPDX-License-Identifier: Apache-2.0
"""The keys of a flavor's extra specs and an image's properties that ask for resources, traits and request groups.

:mod:`moorage.scheduling.resource_request` says what each key means. Other keys belong to filters and drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moorage import errors

__all__ = [
    "FLAVOR",
    "GROUP_POLICY",
    "IMAGE",
    "RESOURCES",
    "SAME_SUBTREE",
    "TRAIT",
    "Word",
    "is_word",
    "refuse_near_words",
    "words",
]

FLAVOR, IMAGE = "flavor/extra_specs", "image/properties"
RESOURCES, TRAIT, GROUP_POLICY, SAME_SUBTREE = "resources", "trait", "group_policy", "same_subtree"
_KEY = re.compile(
    r"(?:(?P<kind>resources|trait)(?P<suffix>[^:]*):(?P<name>.*)|(?P<policy>group_policy)|(?P<subtree>same_subtree)(?P<set>.*))",
    re.DOTALL,
)
_SUFFIX = re.compile(r"[a-zA-Z0-9_-]{0,64}")
#: What a key that begins like one of the language should have been.
_FORMS = {
    "resource": "resources:CLASS, or resources1:CLASS for the request group 1",
    TRAIT: "trait:NAME, or trait1:NAME for the request group 1",
    GROUP_POLICY: "group_policy",
    SAME_SUBTREE: "same_subtree, or same_subtree2 for another set",
}


@dataclass(frozen=True, slots=True)
class Word:
    """A key of the language with its value.

    :param place: where it was: :data:`FLAVOR` or :data:`IMAGE`.
    :param kind: :data:`RESOURCES`, :data:`TRAIT`, :data:`GROUP_POLICY` or :data:`SAME_SUBTREE`.
    :param suffix: of the request group, or of the set of same_subtree; empty for none.
    :param name: of the resource class or trait.
    """

    place: str
    key: str
    kind: str
    suffix: str
    name: str
    value: str

    def refuse(self, problem: str) -> NoReturn:
        """Refuses the key.

        :raises InvalidInput: always; the detail ``path`` names the key.
        """
        path = f"{self.place}/{self.key}"
        raise errors.InvalidInput(f"{path} {problem}.", path=f"body/{path}")


def words(extra_specs: Mapping[str, Any], properties: Mapping[str, Any]) -> Iterator[Word]:
    """Reads the keys of the language; the values are not checked.

    :raises InvalidInput: a suffix that no group can have, or a property of an image that only a flavor can have.
    """
    for place, found in ((FLAVOR, extra_specs), (IMAGE, properties)):
        for key, value in found.items():
            word = _word(place, key, str(value))
            if word is not None:
                _check(word)
                yield word


def is_word(key: str) -> bool:
    """Returns whether a key is of the language."""
    return _KEY.fullmatch(key) is not None


def refuse_near_words(keys: Iterable[str]) -> None:
    """Refuses keys that begin like those of the language and are none: they would be ignored silently.

    :raises InvalidInput: there is one; the detail ``path`` names it.
    """
    for key in keys:
        for beginning, form in _FORMS.items():
            if key.lower().startswith(beginning) and not is_word(key):
                raise errors.InvalidInput(
                    f"{FLAVOR} has {key!r}, which asks for nothing. Write {form}.", path=f"body/{FLAVOR}/{key}"
                )


def _word(place: str, key: str, value: str) -> Word | None:
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    kind = match["kind"] or match["policy"] or match["subtree"]
    return Word(place, key, kind, match["suffix"] or match["set"] or "", match["name"] or "", value)


def _check(word: Word) -> None:
    if word.place == IMAGE and word.kind != TRAIT:
        _refuse_property(word, "only a flavor asks for resources and request groups. Take it out.")
    if word.place == IMAGE and word.suffix:
        _refuse_property(word, f"only a flavor has request groups. Take it out, or write trait:{word.name}.")
    if not _SUFFIX.fullmatch(word.suffix):
        word.refuse("has a suffix that no request group can have: up to 64 letters, digits, underscores and hyphens")


def _refuse_property(word: Word, why: str) -> NoReturn:
    raise errors.InvalidInput(f"{IMAGE} has {word.key!r}; {why}", path=f"body/{IMAGE}/{word.key}")
