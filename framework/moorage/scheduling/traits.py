# SPDX-License-Identifier: Apache-2.0
"""The traits that a request requires or forbids, parsed from a flavor's extra specs and an image's properties.

The keys are Nova's: ``trait:NAME = required | forbidden``. And ``trait:in:A,B = required`` asks for at least one of several traits,
as Placement's ``required=in:A,B`` does. ``trait1:NAME`` is said of the request group ``1`` (any suffix that Nova takes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.request_words import TRAIT, Word, words

__all__ = [
    "NO_TRAITS",
    "PREFIX",
    "TraitRequirement",
    "asks_for_traits",
    "parse_traits",
    "traits_of_request",
    "traits_of_words",
]

PREFIX = "trait:"
_ANY = "in:"
_NAME = re.compile(r"[A-Z0-9_]{1,255}")
_REQUIRED, _FORBIDDEN = "required", "forbidden"


@dataclass(frozen=True, slots=True)
class TraitRequirement:
    """What a request asks of the traits of a node.

    :param required: of each set, the node has at least one trait.
    :param forbidden: the node has none of these traits.
    """

    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.required or self.forbidden)

    def met_by(self, traits: frozenset[str]) -> bool:
        """Returns whether a node with these traits passes."""
        return all(each & traits for each in self.required) and not self.forbidden & traits

    def missing_in(self, traits: frozenset[str]) -> list[str]:
        """Says what a node with these traits lacks, and which forbidden traits it has."""
        lacking = ["no " + " or ".join(sorted(each)) for each in self.required if not each & traits]
        return lacking + [f"the forbidden {name}" for name in sorted(self.forbidden & traits)]


#: What a request asks that says nothing of traits.
NO_TRAITS = TraitRequirement()


def parse_traits(extra_specs: Mapping[str, Any], image_properties: Mapping[str, Any]) -> Mapping[str, TraitRequirement]:
    """Parses what a flavor and an image ask of traits; returns it by the suffix of its group.

    The suffix is empty for ``trait:NAME``. Only a flavor has groups with a suffix.

    :raises InvalidInput: as :func:`traits_of_words`, and for keys that :func:`moorage.scheduling.request_words.words` refuses.
    """
    return traits_of_words(words(extra_specs, image_properties))


def traits_of_words(found: Iterable[Word]) -> Mapping[str, TraitRequirement]:
    """Parses the keys that ask for traits; returns what they ask for by the suffix of its group.

    :raises InvalidInput: a name that no trait can have, a word other than required and forbidden, or a trait that is required and
        forbidden; the detail ``path`` names the key.
    """
    required: dict[str, list[frozenset[str]]] = {}
    forbidden: dict[str, dict[str, Word]] = {}
    for word in found:
        if word.kind != TRAIT:
            continue
        names = _names(word)
        if _is_required(word):
            required.setdefault(word.suffix, []).append(names)
        else:
            forbidden.setdefault(word.suffix, {}).update(dict.fromkeys(names, word))
    _refuse_contradictions(required, forbidden)
    return {
        suffix: TraitRequirement(tuple(dict.fromkeys(required.get(suffix, ()))), frozenset(forbidden.get(suffix, ())))
        for suffix in dict.fromkeys((*required, *forbidden))
    }


def _is_required(word: Word) -> bool:
    """Returns whether the traits of a key are required; otherwise they are forbidden."""
    any_of = word.name.startswith(_ANY)
    if word.value not in ((_REQUIRED,) if any_of else (_REQUIRED, _FORBIDDEN)):
        word.refuse(f"is {word.value!r}; write {_REQUIRED}" + ("" if any_of else f" or {_FORBIDDEN}"))
    return word.value == _REQUIRED


def _refuse_contradictions(
    required: Mapping[str, list[frozenset[str]]], forbidden: Mapping[str, Mapping[str, Word]]
) -> None:
    for suffix, sets in required.items():
        for names in sets:
            if names <= forbidden.get(suffix, {}).keys():
                name = min(names)
                word = forbidden[suffix][name]
                raise errors.InvalidInput(
                    f"The request requires and forbids the trait {name}, so no node can pass; take one of the two out.",
                    path=f"body/{word.place}/{word.key}",
                )


def asks_for_traits(spec: RequestSpec) -> bool:
    """Returns whether a request has conditions on traits. Reads keys only."""
    properties = spec.image.get("properties") or {}
    return any(key.startswith(PREFIX) for found in (spec.flavor.extra_specs, properties) for key in found)


def traits_of_request(spec: RequestSpec) -> TraitRequirement:
    """Returns what a request asks of traits outside of groups with a suffix; empty when it asks for nothing.

    :raises InvalidInput: as :func:`parse_traits`.
    """
    return parse_traits(spec.flavor.extra_specs, spec.image.get("properties") or {}).get("", NO_TRAITS)


def _names(word: Word) -> frozenset[str]:
    text = word.name
    names = text.removeprefix(_ANY).split(",") if text.startswith(_ANY) else [text]
    for name in names:
        if not _NAME.fullmatch(name):
            word.refuse(
                f"names no trait: {name!r} is none. A name has capital letters, digits and underscores, for example "
                "HW_CPU_X86_AVX2 or CUSTOM_GPU"
            )
    return frozenset(names)
