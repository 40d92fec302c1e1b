# SPDX-License-Identifier: Apache-2.0
"""The one hierarchy of errors, with codes that stay the same from release to release.

Every error has a ``code`` (what programs compare), a message (what a person reads: what was wrong, where, what to do) and
``details`` (plain JSON data). HTTP status numbers are not known here: each API dialect maps codes in a table of its own.
Errors cross process borders as plain data through :func:`to_wire` and :func:`from_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AlreadyExists",
    "Busy",
    "CallTimeout",
    "CapacityExceeded",
    "ConfigError",
    "Conflict",
    "ConstraintViolated",
    "Fenced",
    "Forbidden",
    "Gone",
    "InUse",
    "InvalidInput",
    "MessageTooLarge",
    "MoorageError",
    "NoListener",
    "NoValidHost",
    "NotFound",
    "PayloadTooLarge",
    "PeerLost",
    "PluginFailed",
    "PluginLoadError",
    "PluginTimeout",
    "QuotaExceeded",
    "RemoteError",
    "StoreBusy",
    "StoreUnavailable",
    "TransportError",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedVersion",
    "from_wire",
    "to_wire",
]


class MoorageError(Exception):
    """The base of all errors that Moorage raises on purpose.

    :param message: one or two sentences for a person.
    :param details: JSON data for programs; keys are documented by the class.
    """

    code: ClassVar[str] = "moorage.internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return self.message

    @property
    def is_outcome_unknown(self) -> bool:
        """Whether what failed may have been done all the same: the store did not answer a COMMIT."""
        return self.details.get("outcome") == "unknown"


class ConfigError(MoorageError):
    """The configuration cannot be used; the service must not start with it."""

    code = "moorage.config"


class InvalidInput(MoorageError):
    """The caller sent something that can never be right; ``details['path']`` says where."""

    code = "moorage.invalid_input"


class PayloadTooLarge(InvalidInput):
    """A request body, a file, or what is asked for, is larger than the configured limit."""

    code = "moorage.payload_too_large"


class UnsupportedVersion(InvalidInput):
    """A version (API microversion, RPC version) outside of the range that is served."""

    code = "moorage.unsupported_version"


class Unauthenticated(MoorageError):
    """Who is calling is not known: credentials are missing or wrong."""

    code = "moorage.unauthenticated"


class Forbidden(MoorageError):
    """The caller is known and may not do this."""

    code = "moorage.forbidden"


class QuotaExceeded(Forbidden):
    """A project may not hold so much; details: ``project``, ``resource_class``, ``limit``, ``used``, ``asked``, ``over``."""

    code = "moorage.quota_exceeded"


class NotFound(MoorageError):
    """A named thing does not exist."""

    code = "moorage.not_found"


class Gone(NotFound):
    """It existed and does not any more; ``details`` say what is left."""

    code = "moorage.gone"


class Conflict(MoorageError):
    """The request contradicts the present state."""

    code = "moorage.conflict"


class AlreadyExists(Conflict):
    """A thing of that name or uuid exists."""

    code = "moorage.already_exists"


class InUse(Conflict):
    """The thing is being used, or an operation on it is in progress; ``details['holder']`` says by whom."""

    code = "moorage.in_use"


class Fenced(Conflict):
    """The caller lost the right to do this work: its token or epoch is not the newest. The write did not happen."""

    code = "moorage.fenced"


class CapacityExceeded(Conflict):
    """A claim does not fit; details: ``provider``, ``resource_class``, ``asked``, ``free``."""

    code = "moorage.capacity_exceeded"


class ConstraintViolated(Conflict):
    """A claim breaks min_unit, max_unit or the step rule; details as for :class:`CapacityExceeded`."""

    code = "moorage.constraint_violated"


class ResidentsChanged(ConstraintViolated):
    """The instances of a node changed since filters judged them; details: ``provider``. Judge again, or take another node."""


class NoValidHost(Conflict):
    """No node can take the request; ``details['reasons']`` counts the nodes that each filter removed."""

    code = "moorage.no_valid_host"


class PluginLoadError(ConfigError):
    """A plugin that the configuration names cannot be used; the message names plugin, distribution and remedy."""

    code = "moorage.plugin_load"


class PluginFailed(MoorageError):
    """A plugin raised while it served a request; details: ``group``, ``plugin``, ``distribution``."""

    code = "moorage.plugin_failed"


class Unavailable(MoorageError):
    """It cannot be done now, and may be later; ``details['retry_after']`` is a number of seconds."""

    code = "moorage.unavailable"

    def __init__(self, message: str, **details: Any) -> None:
        details.setdefault("retry_after", 1)
        super().__init__(message, **details)

    @property
    def retry_after(self) -> float:
        """Seconds after which a new try makes sense."""
        return float(self.details["retry_after"])


class PluginTimeout(Unavailable):
    """A plugin overran its deadline; details: ``group``, ``plugin``, ``seconds``."""

    code = "moorage.plugin_timeout"


class StoreUnavailable(Unavailable):
    """The database cannot be reached or cannot be written."""

    code = "moorage.store_unavailable"


class StoreBusy(Unavailable):
    """The bounded number of tries was used up by lost races in the database."""

    code = "moorage.store_busy"


class TransportError(Unavailable):
    """A message could not be delivered, or its outcome is not known."""

    code = "moorage.transport"


class NoListener(TransportError):
    """No server listens on the topic: the message was certainly not handled."""

    code = "moorage.no_listener"


class Busy(TransportError):
    """The receiver refused because its queue is full: the message was certainly not handled."""

    code = "moorage.busy"


class PeerLost(TransportError):
    """The connection ended after the message was sent: whether it was handled is not known."""

    code = "moorage.peer_lost"


class CallTimeout(TransportError):
    """No answer in time: whether the message was handled is not known."""

    code = "moorage.call_timeout"


class MessageTooLarge(InvalidInput):
    """A message is larger than ``[rpc] max_message_bytes``."""

    code = "moorage.message_too_large"


class RemoteError(MoorageError):
    """The other side failed in a way that has no class here; ``details['remote_code']`` is its code."""

    code = "moorage.remote"


def _all_classes(root: type[MoorageError]) -> dict[str, type[MoorageError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        for code, cls in _all_classes(child).items():
            # A class that keeps its parent's code (an engine's own refinement) does not cross process borders.
            found.setdefault(code, cls)
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """Plain data for an error. What is not a :class:`MoorageError` keeps no text: it could hold secrets."""
    if isinstance(error, MoorageError):
        return {"code": error.code, "message": error.message, "details": error.details}
    return {
        "code": MoorageError.code,
        "message": f"An internal error ({type(error).__name__}); the log of the service has it in full.",
        "details": {},
    }


def from_wire(data: Mapping[str, Any]) -> MoorageError:
    """Returns the error that :func:`to_wire` wrote, in its class if this process knows the code."""
    details = {str(key): value for key, value in dict(data.get("details") or {}).items() if key != "message"}
    code = str(data.get("code", MoorageError.code))
    message = str(data.get("message", "The other side failed and did not say why."))
    known = _all_classes(MoorageError).get(code)
    if known is None:
        return RemoteError(message, remote_code=code, **details)
    return known(message, **details)
