# SPDX-License-Identifier: Apache-2.0
"""What all allocation stores agree on: which input can never be right, and why a claim does not fit.

The sql store decides in SQL and asks here only for the reason of a refusal; the memory store decides here. The formulas are
those of the design (seed 001): capacity = (total - reserved) * allocation_ratio, compared as IEEE doubles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from moorage import errors
from moorage.allocation.interface import (
    MOST_LEVELS,
    AllocationChange,
    CandidateQuery,
    ClaimRequest,
    Expect,
    InventoryChange,
    InventoryItem,
    ResourceProvider,
    TreeTooDeep,
)

__all__ = [
    "LARGEST",
    "LARGEST_RATIO",
    "MOST_CLASSES",
    "PLACEMENT_RULE",
    "SEED_RULE",
    "as_change",
    "candidate_limit",
    "check_aggregates",
    "check_amounts",
    "check_changes",
    "check_class",
    "check_classes",
    "check_inventories",
    "check_levels",
    "check_provider_name",
    "check_providers",
    "check_request",
    "check_reshape",
    "has_room",
    "refusal",
    "refusals",
    "steps_of_reshape",
]

#: The largest amount that a claim or an inventory names (Placement's limit, so that amounts can be exchanged with it).
LARGEST = 2**31 - 1
#: The largest allocation ratio, Placement's limit too.
LARGEST_RATIO = 3.40282e38
SEED_RULE = "seed"
PLACEMENT_RULE = "modulo"
_CLASS = re.compile(r"[A-Z0-9_]{1,255}")
_UUID_LENGTH = 36
#: Groups of one query for candidates; each is some conditions of one statement.
_MOST_GROUPS = 100
#: Classes of one provider in one claim, or of one group: each is some conditions of one statement.
MOST_CLASSES = 200
_NAME_LENGTH = 255
#: Field of an inventory -> the smallest value that makes sense; the largest is LARGEST for all.
_SMALLEST = {"total": 0, "reserved": 0, "min_unit": 1, "max_unit": 1, "step_size": 1}


def refusal(
    provider: str, name: str, amount: int, item: InventoryItem | None, used: int, rule: str, *, lowers: bool = False
) -> errors.Conflict | None:
    """Returns why ``amount`` more of a class does not fit beside the ``used`` on a provider; None: it fits.

    :param item: the provider's inventory of the class; None when it has none.
    :param rule: ``seed`` or ``modulo``, see ``[allocation] step_size_rule``.
    :param lowers: no more is taken than was given back for it, so that capacity is not asked.
    """
    if item is None:
        return errors.CapacityExceeded(
            f"Provider {provider} has no {name} at all.", provider=provider, resource_class=name, asked=amount, free=0
        )
    free = max(0, math.floor(item.capacity - used))
    stepped = amount % item.step_size == 0 or (rule == SEED_RULE and amount == item.min_unit)
    if not (item.min_unit <= amount <= item.max_unit and stepped):
        return errors.ConstraintViolated(
            f"{amount} {name} cannot be claimed of provider {provider}: amounts are from {item.min_unit} to "
            f"{item.max_unit} in steps of {item.step_size}.",
            provider=provider,
            resource_class=name,
            asked=amount,
            free=free,
        )
    if used + amount > item.capacity and not lowers:
        return errors.CapacityExceeded(
            f"Provider {provider} has {free} {name} free, and {amount} were asked for.",
            provider=provider,
            resource_class=name,
            asked=amount,
            free=free,
        )
    return None


def has_room(
    amount: int, total: int, reserved: int, low: int, high: int, step: int, ratio: float, used: int, rule: str
) -> bool:
    """Returns whether :func:`refusal` has no reason, for the columns of an inventory, without making an object of them."""
    return (
        low <= amount <= high
        and (amount % step == 0 or (amount == low and rule == SEED_RULE))
        and used + amount <= (total - reserved) * ratio
    )


def refusals(
    changes: Sequence[AllocationChange],
    present: Mapping[tuple[str, str], tuple[InventoryItem, int]],
    own: Mapping[tuple[str, str], int],
    rule: str,
) -> Iterator[errors.Conflict]:
    """Why changes do not fit, one after the other, as they are written.

    :param present: inventories and what is used of them, by provider and class.
    :param own: what the consumers of the changes hold of them.
    """
    taken: dict[tuple[str, str], int] = {}
    for each in changes:
        for provider, wanted in sorted(each.resources.items()):
            for name, amount in sorted(wanted.items()):
                key = (provider, name)
                item, used = present.get(key, (None, 0))
                before, mine = taken.get(key, 0), own.get(key, 0)
                lowers = amount <= mine - before
                reason = refusal(provider, name, amount, item, used - mine + before, rule, lowers=lowers)
                taken[key] = before + amount
                if reason is not None:
                    reason.details["consumer"] = each.consumer
                    yield reason


def check_request(request: ClaimRequest) -> None:
    """Refuse a claim that can never be right, before anything is touched.

    :raises InvalidInput: says where.
    """
    _check_consumer(request)
    if not request.resources:
        raise errors.InvalidInput("A claim must name a provider.", path="resources")
    check_amounts(request.resources)


def as_change(request: ClaimRequest) -> AllocationChange:
    """A claim is a change of a consumer that must hold nothing yet."""
    return AllocationChange(
        request.consumer,
        request.resources,
        Expect.NOTHING,
        request.project,
        request.user,
        request.consumer_type,
        request.request_id,
        request.lifetime,
        request.residents,
        enforce_quota=request.enforce_quota,
    )


def check_changes(changes: Sequence[AllocationChange]) -> None:
    """Refuse changes that can never be right, before anything is touched.

    :raises InvalidInput: says where.
    """
    seen: set[str] = set()
    for change in changes:
        _check_consumer(change)
        check_amounts(change.resources)
        if change.consumer in seen:
            raise errors.InvalidInput(f"Consumer {change.consumer} stands twice among the changes.", path="consumer")
        seen.add(change.consumer)


def check_amounts(resources: Mapping[str, Mapping[str, int]]) -> None:
    """Refuse amounts that can never be right.

    :raises InvalidInput: says where.
    """
    for provider, wanted in resources.items():
        _check_text("provider", provider, _UUID_LENGTH)
        if not wanted:
            raise errors.InvalidInput(
                f"At least one resource class must be named of provider {provider}.", path="resources"
            )
        check_classes(wanted)
        for name, amount in wanted.items():
            _check_number(f"resources.{provider}.{name}", amount, 1)


def check_classes(wanted: Mapping[str, int]) -> None:
    """Refuses a request for too many resource classes.

    :raises InvalidInput: there are more than ``MOST_CLASSES``.
    """
    if len(wanted) > MOST_CLASSES:
        raise errors.InvalidInput(
            f"{len(wanted)} resource classes are asked for together; {MOST_CLASSES} are allowed.", path="resources"
        )


def _check_consumer(request: ClaimRequest | AllocationChange) -> None:
    _check_text("consumer", request.consumer, _UUID_LENGTH)
    for path, value in (
        ("request_id", request.request_id),
        ("project", request.project),
        ("user", request.user),
        ("consumer_type", request.consumer_type),
    ):
        if value:
            _check_text(path, value, _NAME_LENGTH)
    lifetime = request.lifetime
    if lifetime is not None and not (
        isinstance(lifetime, int | float) and not isinstance(lifetime, bool) and 0 < lifetime <= LARGEST
    ):
        raise errors.InvalidInput(
            f"lifetime is {lifetime!r}, and must be a positive number of seconds, at most {LARGEST}.", path="lifetime"
        )


def steps_of_reshape(items: Sequence[InventoryItem], moved: bool) -> int:
    """How much a reshape raises the generation of a provider: as much as Placement's does, whose clients count on it.

    One for joining the old inventories and the new ones (if there are new ones), one for what is held of it (``moved``), one
    for the new inventories alone.
    """
    return bool(items) + moved + 1


def check_class(name: str, known: bool) -> None:
    """Refuse a name that no resource class can have.

    :param known: it is a standard class, or exists.
    :raises InvalidInput: it is neither, and does not begin with ``CUSTOM_``.
    """
    if known:
        return
    if not isinstance(name, str) or not _CLASS.fullmatch(name):
        raise errors.InvalidInput(
            f"{name!r} cannot be a resource class; names are of A-Z, 0-9 and _, at most 255 of them.",
            path="resource_class",
        )
    if not name.startswith("CUSTOM_") or name == "CUSTOM_":
        raise errors.InvalidInput(
            f"{name} is no standard resource class; name a class of your own CUSTOM_{name.removeprefix('CUSTOM_')}.",
            path="resource_class",
        )


def check_providers(providers: Sequence[ResourceProvider]) -> None:
    """Refuse providers that can never be right.

    :raises InvalidInput: says which, where and why.
    """
    uuids: set[str] = set()
    names: set[str] = set()
    checked: set[int] = set()
    for each in providers:
        _check_text("uuid", each.uuid, _UUID_LENGTH)
        _check_text("name", each.name, _NAME_LENGTH)
        if each.uuid in uuids or each.name in names:
            raise errors.InvalidInput(f"Provider {each.uuid} ({each.name}) is given twice.", path="uuid")
        uuids.add(each.uuid)
        names.add(each.name)
        if each.parent is not None:
            _check_text("parent", each.parent, _UUID_LENGTH)
        check_inventories(each.name, each.inventories, checked)


def check_levels(uuid: str, parent: str, levels: int, before: int = 0) -> None:
    """Refuses a place in a tree that would get too many levels.

    :param levels: those of the tree with the provider there; ``before``: those that it has now down to what is below the provider.
        A provider of a tree that is too deep may move up.
    :raises TreeTooDeep: says how many they would be.
    """
    if MOST_LEVELS < levels > before:
        raise TreeTooDeep(
            f"With provider {uuid} below provider {parent}, its tree would have {levels} levels; the most is {MOST_LEVELS}. Choose "
            "a parent that is nearer to the root.",
            path="parent",
            levels=levels,
        )


def check_provider_name(name: str) -> None:
    """Refuse what cannot be the name of a provider.

    :raises InvalidInput: says why.
    """
    _check_text("name", name, _NAME_LENGTH)


def check_aggregates(uuids: Iterable[str]) -> None:
    """Refuse what cannot be an aggregate.

    :raises InvalidInput: says why.
    """
    for uuid in uuids:
        _check_text("aggregate", uuid, _UUID_LENGTH)


def check_reshape(inventories: Sequence[InventoryChange], changes: Sequence[AllocationChange]) -> None:
    """Refuse a reshape that can never be right.

    :raises InvalidInput: says where.
    """
    check_changes(changes)
    if len({each.provider for each in inventories}) < len(inventories):
        raise errors.InvalidInput("A provider stands twice among the inventories.", path="inventories")
    for each in inventories:
        check_inventories(each.provider, each.items)


def check_inventories(provider: str, items: Sequence[InventoryItem], checked: set[int] | None = None) -> None:
    """Refuse inventories of one provider that can never be right.

    :param provider: what it is called in messages.
    :param checked: the ids of objects that were checked for other providers, to which those of the items are added. Imports give
        nodes that are alike the same objects. The caller keeps the objects.
    :raises InvalidInput: says which, where and why.
    """
    classes: set[str] = set()
    for item in items:
        if item.resource_class in classes:
            raise errors.InvalidInput(
                f"Provider {provider} has two inventories of {item.resource_class}.", path="inventories"
            )
        classes.add(item.resource_class)
        if checked is None or id(item) not in checked:
            _check_inventory(provider, item)
        if checked is not None:
            checked.add(id(item))


def _check_inventory(provider: str, item: InventoryItem) -> None:
    where = f"{provider}.{item.resource_class}"
    for field, smallest in _SMALLEST.items():
        _check_number(f"{where}.{field}", getattr(item, field), smallest)
    if item.reserved > item.total:
        raise errors.InvalidInput(
            f"{where}: reserved ({item.reserved}) is more than total ({item.total}).", path=f"{where}.reserved"
        )
    ratio = item.allocation_ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= LARGEST_RATIO:
        raise errors.InvalidInput(
            f"{where}: allocation_ratio is {ratio!r}, and must be a number from 0 to {LARGEST_RATIO}.",
            path=f"{where}.allocation_ratio",
        )


def _check_number(path: str, value: int, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= LARGEST:
        raise errors.InvalidInput(
            f"{path} is {value!r}, and must be a whole number from {smallest} to {LARGEST}.", path=path
        )


def _check_text(path: str, value: str, longest: int) -> None:
    # PostgreSQL stores no NUL, and MariaDB takes two texts for the same that differ by spaces at the end.
    if not isinstance(value, str) or not 0 < len(value) <= longest or "\0" in value or value[-1] == " ":
        raise errors.InvalidInput(
            f"{path} is {value!r:.80}, and must be a text of 1 to {longest} characters, without the character NUL "
            "and without spaces at its end.",
            path=path,
        )


def candidate_limit(query: CandidateQuery, most: int) -> int:
    """Returns how many candidates a query is answered with.

    :param most: ``[allocation] max_candidates``.
    :raises InvalidInput: it has more than ``_MOST_GROUPS`` groups.
    """
    if len(query.groups) > _MOST_GROUPS:
        raise errors.InvalidInput(
            f"The query has {len(query.groups)} groups; {_MOST_GROUPS} are allowed.", path="resources"
        )
    for group in query.groups:
        check_classes(group.resources)
    return most if query.limit is None else min(query.limit, most)
