# SPDX-License-Identifier: Apache-2.0
"""Messages and replies as JSON, for the transports that carry bytes.

A message is an object with ``method``, ``args``, ``version``, and where present ``origin`` as ``[service, epoch, sequence]``,
``context`` and ``timeout``. A reply is one of ``{"result": ...}``, ``{"error": {...}}`` (the handler raised) and
``{"refused": {...}}`` (the receiver's transport did not pass it to the handler), errors as :func:`moorage.errors.to_wire` has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from oslo_log import log as logging

from moorage import errors, plugin_isolation, randomness, threads
from moorage.json_text import writer
from moorage.read_only import replaced
from moorage.rpc.interface import Handler, Message, Origin

__all__ = [
    "absorb",
    "answer",
    "answer_once",
    "check_size",
    "dump",
    "error_reply",
    "load",
    "message_from_data",
    "message_to_data",
    "origin_from_data",
    "origin_to_data",
    "refusal",
    "result_of",
    "unexpected",
]

LOG = logging.getLogger(__name__)
_JSON = writer(allow_nan=False)
#: Bytes of an error that is one part of a reply.
_LARGEST_ERROR = 65_536


def dump(data: Any, limit: int, what: str) -> bytes:
    """JSON of ``data``.

    :param what: names it in the error, for example ``message 'update' to topic 'agent'``.
    :raises InvalidInput: it is not JSON data (NaN and infinity are not either).
    :raises MessageTooLarge: more than ``limit`` bytes.
    """
    try:
        encoded = _JSON(data).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidInput(
            f"The {what} is not JSON data ({error}); pass only text, numbers, booleans, null, lists and mappings."
        ) from error
    check_size(len(encoded), limit, what)
    return encoded


def check_size(size: int, limit: int, what: str) -> None:
    """Refuse what is larger than ``limit`` bytes; raises MessageTooLarge."""
    if size > limit:
        raise errors.MessageTooLarge(
            f"The {what} has {size} bytes, {limit} are allowed; send less at once or raise [rpc] max_message_bytes "
            "on both sides.",
            size=size,
            limit=limit,
        )


def load(encoded: bytes, what: str) -> dict[str, Any]:
    """Returns the object that ``encoded`` holds; raises InvalidInput when it is anything else."""
    try:
        data = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidInput(f"The {what} is not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise errors.InvalidInput(f"The {what} is JSON, but not an object.")
    return data


def origin_to_data(origin: Origin | None) -> list[Any] | None:
    """``[service, epoch, sequence]``."""
    return None if origin is None else [origin.service, origin.epoch, origin.sequence]


def origin_from_data(data: Any) -> Origin | None:
    """Returns the reverse of :func:`origin_to_data`; raises InvalidInput for anything else than it makes."""
    match data:
        case None:
            return None
        case [str() as service, int() as epoch, int() as sequence]:
            return Origin(service, epoch, sequence)
        case _:
            raise errors.InvalidInput("The origin of a message is not [service, epoch, sequence].")


def message_to_data(message: Message) -> dict[str, Any]:
    """Returns the plain data of a message, without its timeout (that is the transport's)."""
    return {
        "method": message.method,
        "args": dict(message.args),
        "version": message.version,
        "origin": origin_to_data(message.origin),
        "context": dict(message.context),
    }


def message_from_data(data: Mapping[str, Any], timeout: float | None = None) -> Message:
    """Returns the reverse of :func:`message_to_data`; raises InvalidInput when a field has a wrong type."""
    method, version = data.get("method"), data.get("version", "1.0")
    args, context = data.get("args") or {}, data.get("context") or {}
    if not (isinstance(method, str) and isinstance(version, str)):
        raise errors.InvalidInput("A message needs 'method' and 'version' as text.")
    if not (isinstance(args, dict) and isinstance(context, dict)):
        raise errors.InvalidInput(f"'args' and 'context' of the message '{method}' must be objects.")
    return Message(method, args, origin_from_data(data.get("origin")), context, version, timeout)


def answer(handler: Handler, message: Message, limit: int) -> bytes:
    """Let the handler work and encode the outcome as a reply of at most ``limit`` bytes; never raises.

    An unexpected exception, and a result that is not JSON data, is logged with an id, and only the id is sent.
    """
    try:
        with plugin_isolation.isolate_plugin_call(message.method):
            result = handler(message)
        try:
            return dump({"result": result}, limit, f"result of '{message.method}'")
        except errors.InvalidInput as error:
            if isinstance(error, errors.MessageTooLarge):
                raise
            # Not the caller's input is wrong: the handler is.
            raise TypeError(error.message) from error
    except Exception as error:  # noqa: BLE001  (whatever a handler raises is answered)
        return _error_answer(error, message.method, limit)


def answer_once(
    handler: Handler,
    message: Message,
    limit: int,
    send: Callable[[bytes], None],
    before_early: Callable[[], None] = lambda: None,
) -> None:
    """Calls the handler, and sends one reply to the caller: the handler's outcome, unless another thread has sent an error before.

    The other thread sends it by :attr:`moorage.rpc.interface.Message.answer_early`.

    :param before_early: called before the error of the other thread is sent.
    """
    unanswered = threads.lock()

    def answer_early(error: errors.MoorageError) -> None:
        if unanswered.acquire(blocking=False):
            before_early()
            send(_error_answer(error, message.method, limit))

    reply = answer(handler, replaced(message, answer_early=answer_early), limit)
    if unanswered.acquire(blocking=False):
        send(reply)


def _error_answer(error: Exception, method: str, limit: int) -> bytes:
    return dump(error_reply(error, method, limit), limit, "error")


def error_reply(error: Exception, method: str, limit: int = _LARGEST_ERROR) -> dict[str, Any]:
    """Returns the reply that carries an error to the caller of a method, in about ``limit`` bytes at most.

    An unexpected exception is logged with an id, and the reply has only the id.
    """
    if isinstance(error, errors.TransportError):
        # The caller must not take the handler's own NoListener for "my message was not handled".
        error = errors.TransportError(error.message, **{**error.details, "remote_code": error.code})
    elif not isinstance(error, errors.MoorageError):
        error = unexpected(method, error)
    return {"error": errors.to_wire(_sendable(error, limit))}


def absorb(handler: Handler, message: Message, topic: str) -> None:
    """Calls the handler of a cast or fanout. No caller waits for the outcome, so errors are logged; never raises."""
    try:
        with plugin_isolation.isolate_plugin_call(message.method):
            handler(message)
    except errors.MoorageError as error:
        LOG.warning("'%s' to topic '%s' was not done: %s", message.method, topic, error)
    except Exception as error:  # noqa: BLE001  (a surprise must not end the thread that handles messages)
        unexpected(message.method, error)


def unexpected(method: str, error: Exception) -> errors.MoorageError:
    """Log a surprise in full under a new id and make the error that may be shown: it has the id and no text of the surprise."""
    identity = randomness.new_hex()[:12]
    LOG.error("Error %s: handling of '%s' failed.", identity, method, exc_info=error)
    return errors.MoorageError(
        f"The handling of '{method}' failed unexpectedly; the log of the service has it as error {identity}.",
        id=identity,
    )


def _sendable(error: errors.MoorageError, limit: int) -> errors.MoorageError:
    """Returns the error, with details that are not JSON data turned to text, and without them when they are too large."""
    described = errors.to_wire(error)
    try:
        size = len(json.dumps(described, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        described["details"] = {str(key): repr(value) for key, value in error.details.items()}
        size = len(json.dumps(described))
    if size <= limit:
        return errors.from_wire(described)
    return errors.from_wire({"code": error.code, "message": error.message[: limit // 16]})


def refusal(error: errors.MoorageError) -> bytes:
    """Returns the reply of a receiver that did not pass the message to its handler."""
    return json.dumps({"refused": errors.to_wire(error)}).encode()


def result_of(reply: Mapping[str, Any]) -> Any:
    """What a reply says: its result, or its error raised as the class it had on the other side."""
    for kind in ("refused", "error"):
        described = reply.get(kind)
        if isinstance(described, dict):
            raise errors.from_wire(described)
    if "result" not in reply:
        raise errors.TransportError("The reply has neither a result nor an error; is the other side a Moorage service?")
    return reply["result"]
