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

``resources`` of a :class:`moorage.scheduling.interface.Flavor` are the sums of all groups: what an instance holds, and what quotas,
weighers and agents count. :func:`with_group_resources` makes these sums once, where a request comes in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.frozen import FrozenDict
from moorage.request_groups import CandidateQuery, RequestGroup
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.traits import NO_TRAITS, parse_traits
from moorage.services.interface import GETS_HOLDS

__all__ = [
    "LARGEST",
    "MOST_GROUPS",
    "check_extra_specs",
    "is_grouped",
    "needed_powers",
    "resource_request",
    "with_group_resources",
]

#: The largest amount of a resource class.
LARGEST = 2**31 - 1
#: The most groups with a suffix, and the most sets of ``same_subtree``. The ways to combine providers grow exponentially with them.
MOST_GROUPS, _MOST_SUBTREES = 16, 8
_KEY = re.compile(r"(resources|trait)([^:]*):(.*)|(group_policy)|(same_subtree)(.*)", re.DOTALL)
_SUFFIX = re.compile(r"[a-zA-Z0-9_-]{0,64}")
_RESOURCE_CLASS = re.compile(r"[A-Z0-9_]{1,255}")
_POLICIES = ("isolate", "none")
_PLACE = "flavor/extra_specs"
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Asked:
    """What extra specs and image properties ask for.

    :param amounts: what replaces amounts of the flavor.
    :param groups: those with a suffix.
    :param spread: the traits of the group without one.
    """

    amounts: Mapping[str, int]
    groups: tuple[RequestGroup, ...]
    spread: RequestGroup
    isolate: bool
    same_subtree: tuple[frozenset[str], ...]


def with_group_resources(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks what a flavor and an image ask for; returns the body with the sums of all groups in flavor/resources.

    To be called once for a body: the sums of a sum are wrong.

    :raises InvalidInput: an extra spec or an image property is wrong; the detail ``path`` names it.
    """
    flavor = body.get("flavor") or {}
    asked = _parse(flavor.get("extra_specs") or {}, (body.get("image") or {}).get("properties") or {})
    if not asked.amounts and not asked.groups:
        return body
    resources = {name: units for name, units in {**flavor.get("resources", {}), **asked.amounts}.items() if units}
    if not resources and (asked.spread.required or asked.spread.forbidden):
        raise errors.InvalidInput(
            "The flavor asks for traits outside of request groups, but for no resources there: its extra specs take all out. Ask "
            "for the traits in a group, for example trait1:NAME.",
            path=f"body/{_PLACE}",
        )
    for group in asked.groups:
        for name, units in group.resources.items():
            resources[name] = resources.get(name, 0) + units
            if resources[name] > LARGEST:
                raise errors.InvalidInput(
                    f"{_PLACE} ask for {resources[name]} {name} in all groups together; the most is {LARGEST}.",
                    path=f"body/{_PLACE}/resources{group.suffix}:{name}",
                )
    if not resources:
        raise errors.InvalidInput(
            "The flavor asks for nothing: its extra specs take out all of its resources.", path=f"body/{_PLACE}"
        )
    return {**body, "flavor": {**flavor, "resources": resources}}


def check_extra_specs(body: Mapping[str, Any]) -> None:
    """Checks what a flavor and an image ask for together.

    :raises InvalidInput: as :func:`with_group_resources`.
    """
    flavor = body.get("flavor") or {}
    _parse(flavor.get("extra_specs") or {}, (body.get("image") or {}).get("properties") or {})


def resource_request(spec: RequestSpec) -> CandidateQuery:
    """Returns the groups of a request, parsed once: equal requests share one object.

    :raises InvalidInput: as :func:`with_group_resources`.
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
    """Whether a request has groups with a suffix. Costs nothing where a flavor has no extra specs."""
    return bool(spec.flavor.extra_specs) and any(group.suffix for group in resource_request(spec).groups)


_WORDS = ("resources", "trait", "group_policy", "same_subtree")
_Items = tuple[tuple[str, Any], ...]


@functools.lru_cache(_REMEMBERED)
def _query(resources: _Items, extra_specs: _Items, properties: _Items) -> CandidateQuery:
    asked = _parse(dict(extra_specs), dict(properties))
    left = dict(resources)
    for group in asked.groups:
        for name, units in group.resources.items():
            left[name] = left.get(name, 0) - units
            if left[name] < 0:
                raise errors.InvalidInput(
                    f"The groups of {_PLACE} ask for more {name} than flavor/resources, which are the sums of all groups.",
                    path=f"body/{_PLACE}/resources{group.suffix}:{name}",
                )
    left = {name: units for name, units in left.items() if units}
    spread = RequestGroup("", FrozenDict(left), asked.spread.required, asked.spread.forbidden)
    return CandidateQuery(
        (*((spread,) if left else ()), *asked.groups), isolate=asked.isolate, same_subtree=asked.same_subtree
    )


def _parse(extra_specs: Mapping[str, Any], properties: Mapping[str, Any]) -> _Asked:
    _check_image(properties)
    amounts: dict[str, dict[str, int]] = {}
    policy: str | None = None
    subtrees: dict[str, frozenset[str]] = {}
    for key, value in extra_specs.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        kind, suffix, name, is_policy, _, set_name = match.groups()
        if not _SUFFIX.fullmatch(suffix or set_name or ""):
            _refuse(
                key, "has a suffix that no request group can have: up to 64 letters, digits, underscores and hyphens"
            )
        if kind == "resources":
            amounts.setdefault(suffix, {})[name] = _amount(key, name, str(value), 1 if suffix else 0)
        elif is_policy:
            policy = str(value)
            if policy not in _POLICIES:
                _refuse(key, f"is {policy!r}; write {' or '.join(_POLICIES)}")
        elif kind is None:
            subtrees[key] = frozenset(part.strip() for part in str(value).split(","))
    traits = parse_traits(extra_specs, properties)
    suffixes = [suffix for suffix in dict.fromkeys((*amounts, *traits)) if suffix]
    _check_groups(suffixes, amounts, policy, subtrees, extra_specs)
    groups = []
    for suffix in suffixes:
        found = traits.get(suffix, NO_TRAITS)
        groups.append(RequestGroup(suffix, FrozenDict(amounts.get(suffix, {})), found.required, found.forbidden))
    found = traits.get("", NO_TRAITS)
    return _Asked(
        amounts.get("", {}),
        tuple(groups),
        RequestGroup("", {}, found.required, found.forbidden),
        policy == "isolate",
        tuple(subtrees.values()),
    )


def _check_image(properties: Mapping[str, Any]) -> None:
    for key in properties:
        match = _KEY.fullmatch(key)
        if match is not None and match[1] != "trait":
            raise errors.InvalidInput(
                f"image/properties has {key!r}; only a flavor asks for resources and request groups. Take it out.",
                path=f"body/image/properties/{key}",
            )


def _check_groups(
    suffixes: list[str],
    amounts: Mapping[str, Mapping[str, int]],
    policy: str | None,
    subtrees: Mapping[str, frozenset[str]],
    extra_specs: Mapping[str, Any],
) -> None:
    """Checks how groups relate, by Placement's rules and the bounds of this module."""
    if len(suffixes) > MOST_GROUPS:
        key = _key_of(suffixes[MOST_GROUPS], extra_specs)
        _refuse(key, f"is of one of {len(suffixes)} request groups; the most is {MOST_GROUPS}")
    if len(subtrees) > _MOST_SUBTREES:
        _refuse(list(subtrees)[_MOST_SUBTREES], f"is one of {len(subtrees)} such sets; the most is {_MOST_SUBTREES}")
    if len(suffixes) > 1 and policy is None:
        _refuse("group_policy", "is missing: several request groups need it. Write isolate or none")
    for key, named in subtrees.items():
        unknown = sorted(named.difference(suffixes))
        if unknown:
            _refuse(
                key, f"names {', '.join(map(repr, unknown))}; the request groups are {', '.join(suffixes) or 'none'}"
            )
    for suffix in suffixes:
        if suffix not in amounts and not any(suffix in named for named in subtrees.values()):
            key = _key_of(suffix, extra_specs)
            _refuse(key, f"belongs to a group without resources; add resources{suffix}:CLASS, or same_subtree")


def _key_of(suffix: str, extra_specs: Mapping[str, Any]) -> str:
    """The first extra spec of a group."""
    return next(key for key in extra_specs if key.startswith((f"resources{suffix}:", f"trait{suffix}:")))


def _refuse(key: str, problem: str) -> None:
    raise errors.InvalidInput(f"{_PLACE}/{key} {problem}.", path=f"body/{_PLACE}/{key}")


def _amount(key: str, name: str, text: str, least: int) -> int:
    if not _RESOURCE_CLASS.fullmatch(name):
        _refuse(
            key,
            f"names no resource class: {name!r} is none. A name has capital letters, digits and underscores, for example VCPU or "
            "CUSTOM_GPU",
        )
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and least <= int(text) <= LARGEST):
        _refuse(key, f"is {text!r}; write a whole number from {least} to {LARGEST}")
    return int(text)
