# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of bodies and queries of the volume dialect.

Every object is closed: a key that is not listed is refused. Clients of Cinder send most keys always, with the value that means
nothing. So a key that Cinder knows and Moorage does not support is listed as :func:`_unsupported`, which allows only that value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
from typing_extensions import override

from moorage import errors
from moorage.http.validation import Validator
from moorage_plugins.block_storage.rows import BACKUP, SNAPSHOT, VOLUME

__all__ = [
    "ACTIONS",
    "CREATE",
    "DELETE_VOLUME",
    "LARGEST_GB",
    "LARGEST_PAGE",
    "LIST",
    "RESTORE",
    "VolumeValidator",
    "action",
    "is_true",
]

#: The largest size that a request can name, in GB.
LARGEST_GB = 2**31
#: The largest number of rows of a list.
LARGEST_PAGE = 1000
_NULL = {"type": "null"}
_NAME = {"type": ["string", "null"], "maxLength": 255}
_UUID = {"type": "string", "minLength": 1, "maxLength": 36}
_TRUE, _FALSE = "1|[tT]|[tT]rue|[oO]n|[yY]|[yY]es", "0|[fF]|[fF]alse|[oO]ff|[nN]|[nN]o"
_WORD = f"^({_TRUE}|{_FALSE})$"
_BOOLEAN = {"type": ["boolean", "string", "null"], "pattern": _WORD}
_REASON = "moorage:unsupported"
Schema = dict[str, Any]


def _object(required: Sequence[str] = (), /, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _body(key: str, inner: Schema, **beside: Any) -> Schema:
    """Returns a body with one object under one key."""
    return _object((key,), **{key: inner}, **beside)


def _unsupported(*harmless: Any) -> Schema:
    """A key of Cinder's that only means something with other values than null and ``harmless``."""
    return {"enum": [None, *harmless], _REASON: True}


#: Cinder copies an attached volume only when it is forced; Moorage always does.
_FORCE = _BOOLEAN
CREATE: Mapping[str, Schema] = {
    VOLUME: _body(
        "volume",
        _object(
            ("size",),
            size={"type": ["integer", "string"], "minimum": 1, "maximum": LARGEST_GB, "pattern": "^[0-9]{1,10}$"},
            name=_NAME,
            imageRef=_NAME,
            **dict.fromkeys(
                ("snapshot_id", "source_volid", "source_replica", "backup_id", "volume_type", "group_id",
                 "consistencygroup_id", "availability_zone", "user_id", "project_id", "status", "attach_status"),
                _unsupported(),
            ),
            description=_unsupported(""),
            metadata=_unsupported({}),
            multiattach=_unsupported(False),
        ),
        **{"OS-SCH-HNT:scheduler_hints": _unsupported({})},
    ),
    SNAPSHOT: _body(
        "snapshot",
        _object(
            ("volume_id",),
            volume_id=_UUID,
            name=_NAME,
            force=_FORCE,
            description=_unsupported(""),
            metadata=_unsupported({}),
        ),
    ),
    BACKUP: _body(
        "backup",
        _object(
            ("volume_id",),
            volume_id=_UUID,
            name=_NAME,
            force=_FORCE,
            description=_unsupported(""),
            metadata=_unsupported({}),
            incremental=_unsupported(False),
            **dict.fromkeys(("container", "snapshot_id", "availability_zone"), _unsupported()),
        ),
    ),
}  # fmt: skip
RESTORE = _body("restore", _object(volume_id={"oneOf": [_UUID, _NULL]}, name=_NAME))

_NOTHING: Schema = {"enum": [None, {}]}
_RESET = _object(
    ("status",),
    status={"type": "string", "maxLength": 40},
    attach_status=_unsupported(),
    migration_status=_unsupported(),
)
_COMMON = {"os-reset_status": _RESET, "os-force_delete": _NOTHING}
#: Resource type -> action -> the schema of what belongs to the action.
ACTIONS: Mapping[str, Mapping[str, Schema]] = {
    VOLUME: {
        **_COMMON,
        "os-attach": _object(
            instance_uuid=_NAME, host_name=_NAME, mountpoint=_NAME, mode=_unsupported("rw")
        ),
        "os-detach": {"oneOf": [_NULL, _object(attachment_id={"oneOf": [_UUID, _NULL]})]},
        "os-volume_upload_image": _object(
            image_name=_NAME,
            force=_FORCE,
            container_format=_unsupported("bare"),
            disk_format=_unsupported("raw"),
            visibility=_unsupported("private"),
            protected=_unsupported(False),
        ),
    },
    SNAPSHOT: _COMMON,
    BACKUP: _COMMON,
}  # fmt: skip


_TEXT = {"type": "string", "maxLength": 255}
LIST = _object(
    limit={"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE},
    marker=_TEXT,
    name=_TEXT,
    status=_TEXT,
    # A list always has all that the caller may see, as with Cinder, where the parameter changes nothing for members.
    all_tenants={**_TEXT, "pattern": _WORD},
)
#: The query of the deletion of a volume; openstackclient sends both parameters always.
DELETE_VOLUME = _object(force={**_TEXT, "pattern": _WORD}, cascade={**_TEXT, "pattern": f"^({_FALSE})$"})


def action(kind: str) -> Schema:
    """Returns the schema of the body of an action on a type of resources: exactly one of its actions."""
    found = _object((), **ACTIONS[kind])
    return {**found, "minProperties": 1, "maxProperties": 1}


def is_true(word: str) -> bool:
    """Returns whether a word that a schema has allowed means true."""
    return re.fullmatch(_TRUE, word) is not None


class VolumeValidator(Validator):
    """Names what is not supported, beside what is wrong."""

    @override
    def refusal(self, worst: jsonschema.ValidationError, path: str) -> errors.InvalidInput:
        if isinstance(worst.schema, Mapping) and worst.schema.get(_REASON):
            allowed = " or ".join(repr(each) for each in worst.schema["enum"])
            return errors.InvalidInput(
                f"{path} is not supported: Moorage would ignore {worst.instance!r:.100}. Leave it out, or send {allowed}.",
                path=path,
            )
        return super().refusal(worst, path)
