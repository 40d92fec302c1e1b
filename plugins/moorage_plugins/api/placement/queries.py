# SPDX-License-Identifier: Apache-2.0
"""The little languages inside of Placement's query strings: resources, traits, aggregates, trees.

``resources=VCPU:2,MEMORY_MB:512``, ``required=A,!B`` (forbidden from 1.22) or ``required=in:A,B`` (any of them, from 1.39),
``member_of=uuid``, ``member_of=in:uuid,uuid``, ``member_of=!uuid`` and ``!in:`` (from 1.32), ``in_tree=uuid``. The messages are
Placement's, which people look up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.http.routes import Version
from moorage_plugins.api.placement.schemas import LARGEST
from moorage_plugins.api.placement.validation import canonical_uuid, is_uuid

__all__ = ["Aggregates", "Traits", "aggregates", "in_tree", "last", "resources", "root_traits", "traits"]

FORBIDDEN_TRAITS: Version = (1, 22)
SEVERAL_MEMBER_OF: Version = (1, 24)
FORBIDDEN_AGGREGATES: Version = (1, 32)
ANY_TRAITS: Version = (1, 39)

_BAD_RESOURCES = (
    "Badly formed resources parameter. Expected resources query string parameter in form: "
    "?resources=VCPU:2,MEMORY_MB:1024. Got: "
)
_INVALID = "Invalid query string parameters: "
_ANY_FORM = "in:HW_CPU_X86_VMX,CUSTOM_MAGIC"


@dataclass(frozen=True, slots=True)
class Traits:
    """Of each set of ``required`` one trait is needed, and none of ``forbidden`` may be there."""

    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Aggregates:
    """Of each set of ``required`` one aggregate is needed, and none of ``forbidden`` may be there."""

    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()


def resources(text: str) -> dict[str, int]:
    """Class -> amount.

    :raises InvalidInput: it is malformed.
    """
    if not text.strip():
        raise errors.InvalidInput(f"{_BAD_RESOURCES}empty string.", path="resources")
    found = {}
    for part in text.split(","):
        name, colon, amount = part.partition(":")
        if not colon or ":" in amount:
            raise errors.InvalidInput(f"{_BAD_RESOURCES}{part:.100}.", path="resources")
        try:
            number = int(amount)
        except ValueError:
            raise errors.InvalidInput(
                f"Requested resource {name:.100} expected positive integer amount. Got: {amount:.100}.",
                path="resources",
            ) from None
        if number < 1:
            raise errors.InvalidInput(
                f"Requested resource {name:.100} requires amount >= 1. Got: {number}.", path="resources"
            )
        if number > LARGEST:
            raise errors.InvalidInput(
                f"Requested resource {name:.100} requires amount <= {LARGEST}. Got: {amount:.100}.", path="resources"
            )
        found[name] = number
    return found


def traits(values: Sequence[str], version: Version) -> Traits:
    """What the values of one parameter ``required`` ask for; before 1.39 the last value alone counts.

    :raises InvalidInput: it is malformed, or not in that version yet.
    """
    required: list[frozenset[str]] = []
    forbidden: set[str] = set()
    for value in values if version >= ANY_TRAITS else values[-1:]:
        if value.startswith("in:"):
            required.append(_any_of(value, version))
        else:
            wanted, unwanted = _all_of(value, forbidden_allowed=version >= FORBIDDEN_TRAITS)
            required += wanted
            forbidden |= unwanted
    return Traits(tuple(required), frozenset(forbidden))


def root_traits(value: str) -> Traits:
    """What ``root_required`` asks for: traits and forbidden ones, without ``in:``.

    :raises InvalidInput: it is malformed.
    """
    if value.startswith("in:"):
        raise _too_early(value)
    required, forbidden = _all_of(value, forbidden_allowed=True)
    return Traits(tuple(required), frozenset(forbidden))


def _too_early(value: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"{_INVALID}The format '{_ANY_FORM}' only supported since microversion 1.39. Got: {value:.200}",
        path="required",
    )


def _any_of(value: str, version: Version) -> frozenset[str]:
    if version < ANY_TRAITS:
        raise _too_early(value)
    found = frozenset(part.strip() for part in value[len("in:") :].split(","))
    if "" in found:
        raise errors.InvalidInput(
            f"{_INVALID}Expected 'required' parameter value of the form: {_ANY_FORM}. Got an empty trait in: "
            f"{value:.200}",
            path="required",
        )
    if any(name.startswith("!") for name in found):
        raise errors.InvalidInput(
            f"{_INVALID}The format '{_ANY_FORM}' does not support forbidden traits. Got: {value:.200}", path="required"
        )
    return found


def _all_of(value: str, *, forbidden_allowed: bool) -> tuple[list[frozenset[str]], set[str]]:
    names = [part.strip() for part in value.split(",")]
    forbidden = {name.lstrip("!") for name in names if name.startswith("!")}
    form = "HW_CPU_X86_VMX,!CUSTOM_MAGIC" if forbidden_allowed else "HW_CPU_X86_VMX,CUSTOM_MAGIC"
    expected = f"{_INVALID}Expected 'required' parameter value of the form: {form}. "
    if "" in forbidden or "" in names:
        raise errors.InvalidInput(f"{expected}Got an empty trait in: {value:.200}", path="required")
    if forbidden and not forbidden_allowed:
        raise errors.InvalidInput(f"{expected}Got: {value:.200}", path="required")
    return [frozenset({name}) for name in names if not name.startswith("!")], forbidden


def aggregates(values: Sequence[str], version: Version, suffix: str = "") -> Aggregates:
    """What the values of one parameter ``member_of`` ask for.

    :raises InvalidInput: it is malformed, or not in that version yet.
    """
    if len(values) > 1 and version < SEVERAL_MEMBER_OF:
        raise errors.InvalidInput(f"Multiple member_of{suffix} parameters are not supported", path="member_of")
    required: list[frozenset[str]] = []
    forbidden: set[str] = set()
    for value in values:
        wanted, unwanted = _members(value)
        if unwanted and version < FORBIDDEN_AGGREGATES:
            raise errors.InvalidInput(
                f"Forbidden member_of{suffix} parameters are not supported in the specified microversion",
                path="member_of",
            )
        if wanted:
            required.append(wanted)
        forbidden |= unwanted
    return Aggregates(tuple(required), frozenset(forbidden))


def _members(value: str) -> tuple[frozenset[str], frozenset[str]]:
    """Required and forbidden aggregates of one value."""
    unwanted = value.startswith("!")
    rest = value.removeprefix("!")
    if rest.startswith("in:"):
        uuids = rest[len("in:") :].split(",")
    elif "," in rest:
        raise errors.InvalidInput(
            "Multiple values for 'member_of' must be prefixed with the 'in:' or '!in:' keyword using the valid "
            f"microversion. Got: {value:.200}",
            path="member_of",
        )
    else:
        uuids = [rest]
    for each in uuids:
        if not is_uuid(each):
            raise errors.InvalidInput(
                f"{_INVALID}Expected 'member_of' parameter to contain valid UUID(s). Got: {each:.200}",
                path="member_of",
            )
    found = frozenset(canonical_uuid(each) for each in uuids)
    return (frozenset(), found) if unwanted else (found, frozenset())


def in_tree(value: str) -> str:
    """Returns the uuid of a provider of the tree.

    :raises InvalidInput: it is none.
    """
    text = value.strip()
    if not is_uuid(text):
        raise errors.InvalidInput(
            f"{_INVALID}Expected 'in_tree' parameter to be a format of uuid. Got: {value:.200}", path="in_tree"
        )
    return canonical_uuid(text)


def last(query: Mapping[str, list[str]], name: str) -> str | None:
    """Returns the value of a parameter; of several the last one counts."""
    values = query.get(name)
    return values[-1] if values else None
