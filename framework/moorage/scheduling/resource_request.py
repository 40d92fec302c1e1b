# SPDX-License-Identifier: Apache-2.0
"""The resources, traits and request groups of a request, parsed from a flavor's extra specs and an image's properties.

The words and rules are those of Nova and Placement:

* ``resources:CLASS = N`` replaces the flavor's amount of the class; 0 takes the class out.
* ``trait:NAME = required | forbidden`` and ``trait:in:A,B = required``: see :mod:`moorage.scheduling.traits`.
* ``resources1:CLASS = N`` and ``trait1:NAME = ...`` make the group ``1``, which one provider alone fulfils. A suffix has up to 64
  letters, digits, underscores and hyphens.
* ``group_policy = isolate | none``: whether groups take of different providers. Several groups need one.
* ``same_subtree = 1,2``: of the providers of these groups, one is above all others. Another such set has a key of its own, for
  example ``same_subtree2``.

Resources have two meanings, each with a type of its own. :data:`GivenResources` are what a flavor of the catalogue or of a body
says. :data:`HeldResources` are the sums of all groups: what an instance holds, and what quotas, weighers, agents and
:class:`moorage.scheduling.interface.requests.Flavor` count. :func:`held_resources` makes these sums, and only
:class:`moorage.scheduling.flavor_requests.FlavorResolver` puts them into a request.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NewType

from moorage import errors
from moorage.read_only import EMPTY, FrozenDict
from moorage.request_groups import CandidateQuery, RequestGroup
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.request_words import (
    FLAVOR,
    GROUP_POLICY,
    RESOURCES,
    SAME_SUBTREE,
    TRAIT,
    Word,
    is_word,
    refuse_near_words,
    words,
)
from moorage.scheduling.traits import NO_TRAITS, PREFIX, TraitRequirement, traits_of_words
from moorage.services.interface import GETS_HOLDS

__all__ = [
    "LARGEST",
    "MOST_GROUPS",
    "GivenResources",
    "HeldResources",
    "as_far_as_parsed",
    "check_flavor",
    "given_resources",
    "held_resources",
    "is_grouped",
    "needed_powers",
    "normal_given",
    "resource_request",
    "spread_providers",
    "with_held_resources",
]

LOG = logging.getLogger(__name__)

#: What a flavor says beside its extra specs: resource class -> units.
GivenResources = NewType("GivenResources", Mapping[str, int])
#: The sums of what a flavor gives and of its request groups.
HeldResources = NewType("HeldResources", Mapping[str, int])

#: The largest amount of a resource class.
LARGEST = 2**31 - 1
#: The most groups with a suffix, and the most sets of ``same_subtree``. The ways to combine providers grow exponentially with them.
MOST_GROUPS, _MOST_SUBTREES = 16, 8
_RESOURCE_CLASS = re.compile(r"[A-Z0-9_]{1,255}")
_POLICIES = ("isolate", "none")
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Asked:
    """What extra specs and image properties ask for.

    :param amounts: what replaces amounts of the flavor.
    :param groups: those with a suffix.
    :param traits: of the group without one.
    """

    amounts: Mapping[str, int]
    groups: tuple[RequestGroup, ...]
    traits: TraitRequirement
    isolate: bool
    same_subtree: tuple[frozenset[str], ...]


_NOTHING = _Asked(EMPTY, (), NO_TRAITS, False, ())


def check_flavor(body: Mapping[str, Any]) -> None:
    """Checks what the flavor and the image of a body ask for together, as a caller gives them; either may be missing.

    :raises InvalidInput: an extra spec or an image property is wrong, or an extra spec is nearly one of the language; the detail
        ``path`` names it.
    """
    flavor = body.get("flavor") or {}
    refuse_near_words(flavor.get("extra_specs") or ())
    _held_of(body)


def with_held_resources(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the body of a request with the sums of all groups in flavor/resources; there the flavor gave its resources.

    :raises InvalidInput: as :func:`held_resources`.
    """
    return {**body, "flavor": {**body["flavor"], "resources": _held_of(body)}}


def _held_of(body: Mapping[str, Any]) -> HeldResources:
    flavor = body.get("flavor") or {}
    given = GivenResources(flavor.get("resources", {}))
    extra_specs, properties = flavor.get("extra_specs") or {}, (body.get("image") or {}).get("properties") or {}
    return held_resources(given, extra_specs, properties)


def held_resources(
    given: GivenResources, extra_specs: Mapping[str, Any], properties: Mapping[str, Any] = EMPTY
) -> HeldResources:
    """Returns what an instance of a flavor holds: the sums of all groups.

    :raises InvalidInput: an extra spec or an image property is wrong; the detail ``path`` names it.
    """
    if not extra_specs and not properties:
        return HeldResources(given)
    asked = _parse(extra_specs, properties)
    if not asked.amounts and not asked.groups:
        return HeldResources(given)
    spread = {name: units for name, units in {**given, **asked.amounts}.items() if units}
    if not spread and asked.traits:
        raise errors.InvalidInput(
            "The flavor asks for traits outside of request groups, but for no resources there: its extra specs take all out. Ask "
            "for the traits in a group, for example trait1:NAME.",
            path=f"body/{FLAVOR}",
        )
    held = _sums(spread, asked.groups)
    if not held:
        raise errors.InvalidInput(
            "The flavor asks for nothing: its extra specs take out all of its resources.", path=f"body/{FLAVOR}"
        )
    return HeldResources(held)


def _sums(spread: Mapping[str, int], groups: Iterable[RequestGroup]) -> dict[str, int]:
    sums = dict(spread)
    for group in groups:
        for name, units in group.resources.items():
            sums[name] = sums.get(name, 0) + units
            if sums[name] > LARGEST:
                raise errors.InvalidInput(
                    f"{FLAVOR} ask for {sums[name]} {name} in all groups together; the most is {LARGEST}.",
                    path=f"body/{FLAVOR}/resources{group.suffix}:{name}",
                )
    return sums


def given_resources(held: HeldResources, extra_specs: Mapping[str, Any]) -> GivenResources:
    """Returns what a flavor with these extra specs gives to an instance that holds this: the inverse of :func:`held_resources`.

    What the instance holds itself, where the extra specs cannot be parsed or their groups have more.
    """
    try:
        return GivenResources(_without_groups(held, _parse(extra_specs, {}).groups))
    except errors.InvalidInput:
        return GivenResources(held)


def normal_given(given: GivenResources, extra_specs: Mapping[str, Any]) -> GivenResources:
    """Returns what :func:`given_resources` finds of an instance of a flavor: amounts that extra specs replace are theirs."""
    try:
        return given_resources(held_resources(given, extra_specs), extra_specs)
    except errors.InvalidInput:
        return given


def as_far_as_parsed(spec: RequestSpec) -> RequestSpec:
    """Returns the request of an instance without what cannot be parsed, so that the instance can be moved.

    A release without these rules may have stored it. Then it asks for what the instance holds, without request groups, and for the
    traits outside of them if these can be parsed.
    """
    try:
        resource_request(spec)
    except errors.InvalidInput as error:
        LOG.warning(
            "Instance %s has a flavor or an image whose request cannot be parsed. It is treated as a request for what the instance "
            "holds, without request groups; resize the instance to another flavor to correct it. %s",
            spec.instance_uuid,
            error.message,
        )
    else:
        return spec
    with_traits = _only(spec, lambda key: key.startswith(PREFIX) or not is_word(key))
    try:
        resource_request(with_traits)
    except errors.InvalidInput:
        return _only(spec, lambda key: not is_word(key))
    return with_traits


def _only(spec: RequestSpec, wanted: Callable[[str], bool]) -> RequestSpec:
    """Returns the request with the wanted keys of its extra specs and image properties."""
    extra_specs = {key: value for key, value in spec.flavor.extra_specs.items() if wanted(key)}
    image = dict(spec.image)
    if properties := image.get("properties"):
        image["properties"] = {key: value for key, value in properties.items() if wanted(key)}
    return replace(spec, flavor=replace(spec.flavor, extra_specs=extra_specs), image=image)


def resource_request(spec: RequestSpec) -> CandidateQuery:
    """Returns the groups of a request, parsed once: equal requests share one object.

    :raises InvalidInput: as :func:`held_resources`.
    """
    properties = spec.image.get("properties") or {}
    return _query(
        tuple(spec.flavor.resources.items()),
        tuple([item for item in spec.flavor.extra_specs.items() if item[0].startswith(_WORDS)]),
        tuple([(key, str(value)) for key, value in properties.items() if key.startswith(_WORDS)]),
    )


def needed_powers(spec: RequestSpec) -> tuple[str, ...]:
    """Returns what the agent of the request's host must offer. With request groups, it must tell its driver which providers."""
    return (*spec.powers, GETS_HOLDS) if is_grouped(spec) else spec.powers


def is_grouped(spec: RequestSpec) -> bool:
    """Returns whether a request has groups with a suffix. Costs nothing where a flavor has no extra specs."""
    return bool(spec.flavor.extra_specs) and any(group.suffix for group in resource_request(spec).groups)


_WORDS = (RESOURCES, TRAIT, GROUP_POLICY, SAME_SUBTREE)
_Items = tuple[tuple[str, Any], ...]


def spread_providers(spec: RequestSpec, holds: Mapping[str, Mapping[str, int]]) -> frozenset[str]:
    """Returns which of the providers that an instance holds give what its request asks for outside of groups with a suffix.

    A provider counts if the instance holds any class of it that is asked for there.

    :param holds: provider uuid -> resource class -> units.
    """
    classes = {name for group in resource_request(spec).groups if not group.suffix for name in group.resources}
    return frozenset(provider for provider, held in holds.items() if classes & held.keys())


@functools.lru_cache(_REMEMBERED)
def _query(resources: _Items, extra_specs: _Items, properties: _Items) -> CandidateQuery:
    asked = _parse(dict(extra_specs), dict(properties))
    left = _without_groups(dict(resources), asked.groups)
    spread = RequestGroup("", FrozenDict(left), asked.traits.required, asked.traits.forbidden)
    return CandidateQuery(
        (*((spread,) if left else ()), *asked.groups), isolate=asked.isolate, same_subtree=asked.same_subtree
    )


def _without_groups(held: Mapping[str, int], groups: Iterable[RequestGroup]) -> dict[str, int]:
    """What is left of the sums for the group without a suffix."""
    left = dict(held)
    for group in groups:
        for name, units in group.resources.items():
            left[name] = left.get(name, 0) - units
            if left[name] < 0:
                raise errors.InvalidInput(
                    f"The groups of {FLAVOR} ask for more {name} than flavor/resources, which are the sums of all groups.",
                    path=f"body/{FLAVOR}/resources{group.suffix}:{name}",
                )
    return {name: units for name, units in left.items() if units}


def _parse(extra_specs: Mapping[str, Any], properties: Mapping[str, Any]) -> _Asked:
    if not extra_specs and not properties:
        return _NOTHING
    found = list(words(extra_specs, properties))
    amounts = _amounts(found)
    traits = traits_of_words(found)
    groups = tuple(
        RequestGroup(suffix, FrozenDict(amounts.get(suffix, {})), asked.required, asked.forbidden)
        for suffix in dict.fromkeys((*amounts, *traits))
        if suffix
        for asked in (traits.get(suffix, NO_TRAITS),)
    )
    policy = _policy(found)
    subtrees = [
        (word, frozenset(part.strip() for part in word.value.split(","))) for word in found if word.kind == SAME_SUBTREE
    ]
    _check_number(groups, found)
    if len(groups) > 1 and policy is None:
        _refuse(GROUP_POLICY, "is missing: several request groups need it. Write isolate or none")
    _check_subtrees(subtrees, [group.suffix for group in groups])
    _check_resourceless(groups, subtrees, found)
    return _Asked(
        amounts.get("", {}),
        groups,
        traits.get("", NO_TRAITS),
        policy == "isolate",
        tuple(named for _, named in subtrees),
    )


def _amounts(found: Iterable[Word]) -> dict[str, dict[str, int]]:
    """Amounts by the suffix of the group and the resource class."""
    amounts: dict[str, dict[str, int]] = {}
    for word in found:
        if word.kind == RESOURCES:
            amounts.setdefault(word.suffix, {})[word.name] = _amount(word, 1 if word.suffix else 0)
    return amounts


def _policy(found: Iterable[Word]) -> str | None:
    for word in found:
        if word.kind == GROUP_POLICY:
            if word.value not in _POLICIES:
                word.refuse(f"is {word.value!r}; write {' or '.join(_POLICIES)}")
            return word.value
    return None


def _check_number(groups: tuple[RequestGroup, ...], found: Iterable[Word]) -> None:
    if len(groups) > MOST_GROUPS:
        first = _first_of(groups[MOST_GROUPS].suffix, found)
        first.refuse(f"is of one of {len(groups)} request groups; the most is {MOST_GROUPS}")


def _check_subtrees(subtrees: list[tuple[Word, frozenset[str]]], suffixes: list[str]) -> None:
    if len(subtrees) > _MOST_SUBTREES:
        subtrees[_MOST_SUBTREES][0].refuse(f"is one of {len(subtrees)} such sets; the most is {_MOST_SUBTREES}")
    for word, named in subtrees:
        if unknown := sorted(named.difference(suffixes)):
            groups = ", ".join(suffixes) or "none"
            word.refuse(f"names {', '.join(map(repr, unknown))}; the request groups are {groups}")


def _check_resourceless(
    groups: Iterable[RequestGroup], subtrees: list[tuple[Word, frozenset[str]]], found: Iterable[Word]
) -> None:
    for group in groups:
        if not group.resources and not any(group.suffix in named for _, named in subtrees):
            suffix = group.suffix
            _first_of(suffix, found).refuse(
                f"belongs to a group without resources; add resources{suffix}:CLASS, or same_subtree"
            )


def _first_of(suffix: str, found: Iterable[Word]) -> Word:
    """Returns the first key of a group."""
    return next(word for word in found if word.kind in (RESOURCES, TRAIT) and word.suffix == suffix)


def _refuse(key: str, problem: str) -> None:
    raise errors.InvalidInput(f"{FLAVOR}/{key} {problem}.", path=f"body/{FLAVOR}/{key}")


def _amount(word: Word, least: int) -> int:
    if not _RESOURCE_CLASS.fullmatch(word.name):
        word.refuse(
            f"names no resource class: {word.name!r} is none. A name has capital letters, digits and underscores, for example VCPU "
            "or CUSTOM_GPU"
        )
    text = word.value
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and least <= int(text) <= LARGEST):
        word.refuse(f"is {text!r}; write a whole number from {least} to {LARGEST}")
    return int(text)
