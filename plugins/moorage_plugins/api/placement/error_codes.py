# SPDX-License-Identifier: Apache-2.0
"""Gives each error the code that Placement has for it; its HTTP status comes from :mod:`moorage.http.dialect`.

The codes that begin with ``placement.`` are Placement's (its API reference, "Errors"); ``placement.allocation.*`` are ours, and
tell a claim that does not fit from one that lost a race, which Placement answers alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from moorage import errors

__all__ = [
    "CODES",
    "BadValue",
    "CannotDeleteParent",
    "ConcurrentUpdate",
    "DuplicateKey",
    "DuplicateName",
    "InventoryInUse",
    "MissingValue",
    "ProviderInUse",
    "UnknownProvider",
    "code",
    "no_provider",
    "subject",
]

UNDEFINED = "placement.undefined_code"


class ConcurrentUpdate(errors.Conflict):
    """The generation that the client gave is not the present one."""


class DuplicateName(errors.AlreadyExists):
    """Another provider has the name or uuid."""


class InventoryInUse(errors.InUse):
    """An inventory that has allocations cannot go."""


class ProviderInUse(errors.InUse):
    """A provider that has allocations cannot go."""


class CannotDeleteParent(errors.InUse):
    """A provider that has children cannot go."""


class UnknownProvider(errors.InvalidInput):
    """A body names a provider that does not exist."""


class DuplicateKey(errors.InvalidInput):
    """A parameter of the query stands twice and may not."""


class BadValue(errors.InvalidInput):
    """A parameter of the query has a value that is none."""


class MissingValue(errors.InvalidInput):
    """A parameter of the query needs another one."""


#: Error class -> code from 1.23; the nearest ancestor counts.
CODES: Mapping[type[errors.MoorageError], str] = {
    errors.MoorageError: UNDEFINED,
    errors.CapacityExceeded: "placement.allocation.capacity_exceeded",
    errors.ConstraintViolated: "placement.allocation.constraints",
    ConcurrentUpdate: "placement.concurrent_update",
    DuplicateName: "placement.duplicate_name",
    InventoryInUse: "placement.inventory.inuse",
    ProviderInUse: "placement.resource_provider.inuse",
    CannotDeleteParent: "placement.resource_provider.cannot_delete_parent",
    UnknownProvider: "placement.resource_provider.not_found",
    DuplicateKey: "placement.query.duplicate_key",
    BadValue: "placement.query.bad_value",
    MissingValue: "placement.query.missing_value",
}


def code(error: errors.MoorageError) -> str:
    """Placement's code of an error."""
    return next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), UNDEFINED)


def subject(error: errors.NotFound) -> str:
    """What does not exist, in Placement's words."""
    details = error.details
    if "inventory" in details:
        return f"No inventory of class {details['inventory']} found."
    if "resource_class" in details:
        return f"No such resource class {details['resource_class']}."
    if "traits" in details:
        return f"No such trait(s): {', '.join(details['traits'])}."
    if "provider" in details:
        return f"No resource provider with uuid {details['provider']} found"
    return error.message


@contextlib.contextmanager
def no_provider(uuid: str) -> Iterator[None]:
    """Say in Placement's words that there is no such provider."""
    try:
        yield
    except errors.NotFound as error:
        if error.details.get("provider") != uuid:
            raise
        raise errors.NotFound(f"No resource provider with uuid {uuid} found", provider=uuid) from error
