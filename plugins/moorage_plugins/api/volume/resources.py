# SPDX-License-Identifier: Apache-2.0
"""Volumes, snapshots and backups in Cinder's shape: what is needed to drive the block storage service.

Beside them the images that volumes were uploaded to, which Cinder leaves to Glance.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.api.dialect_application import Answer, Call, Operation
from moorage.routes import PolicyRule
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, SNAPSHOT, VOLUME
from moorage_plugins.block_storage.service import UNKNOWN, BlockStorage

__all__ = ["POLICIES", "operations"]

_MEMBER = "rule:system_member or rule:project_member"
POLICIES = (
    PolicyRule("volume:get", "rule:system_reader or rule:project_reader", "See volumes, snapshots and backups."),
    PolicyRule("volume:change", _MEMBER, "Create, change and delete volumes, snapshots and backups."),
    PolicyRule(
        "volume:admin", "rule:system_admin", "Reset a status, or delete whatever is being done to it.", ("system",)
    ),
)
_SEE, _CHANGE, _ADMIN = (rule.name for rule in POLICIES)
_PLURAL = {VOLUME: "volumes", SNAPSHOT: "snapshots", BACKUP: "backups", IMAGE: "images"}
#: GB.
_LARGEST = 2**31
_NAME = {"type": ["string", "null"], "maxLength": 255}
_UUID = {"type": "string", "minLength": 1, "maxLength": 36}


def _body(key: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """A body of one object under one key, in which Cinder's clients put more than is looked at here."""
    inner = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "object", "properties": {key: inner}, "required": [key]}


_CREATE = {
    VOLUME: _body(
        "volume",
        ("size",),
        size={"type": ["integer", "string"], "minimum": 1, "maximum": _LARGEST, "pattern": "^[0-9]{1,10}$"},
        name=_NAME,
        imageRef={"type": ["string", "null"], "maxLength": 255},
    ),
    SNAPSHOT: _body("snapshot", ("volume_id",), volume_id=_UUID, name=_NAME),
    BACKUP: _body("backup", ("volume_id",), volume_id=_UUID, name=_NAME),
}
_RESTORE = _body("restore", (), volume_id={"type": ["string", "null"], "maxLength": 36}, name=_NAME)
_ACTION = {"type": "object", "minProperties": 1, "maxProperties": 1}


class _Resources:
    def __init__(self, storage: BlockStorage, check: Callable[..., None], gigabyte: int) -> None:
        self._storage = storage
        self._check = check
        self._gigabyte = gigabyte

    def operations(self, prefix: str) -> list[Operation]:
        """All rows of the table below a prefix."""
        found = [Operation("POST", f"{prefix}/backups/{{uuid}}/restore", self.restore, policy=_CHANGE, body=_RESTORE)]
        for kind, plural in _PLURAL.items():
            one = f"{prefix}/{plural}/{{uuid}}"
            found += [
                Operation("GET", f"{prefix}/{plural}", self._bound(self.list, kind), _SEE),
                Operation("GET", f"{prefix}/{plural}/detail", self._bound(self.list, kind), _SEE),
                Operation("GET", one, self._bound(self.show, kind), _SEE),
                Operation("DELETE", one, self._bound(self.delete, kind), _CHANGE),
            ]
        for kind, body in _CREATE.items():
            every, one = f"{prefix}/{_PLURAL[kind]}", f"{prefix}/{_PLURAL[kind]}/{{uuid}}"
            found += [
                Operation("POST", every, self._bound(self.create, kind), _CHANGE, body=body),
                Operation("POST", f"{one}/action", self._bound(self.action, kind), _CHANGE, body=_ACTION),
            ]
        return found

    @staticmethod
    def _bound(handler: Callable[[Call, str], Answer], kind: str) -> Callable[[Call], Answer]:
        return lambda call: handler(call, kind)

    def create(self, call: Call, kind: str) -> Answer:
        """Begin to create; 202, as it goes on."""
        body = call.body[kind]
        common = {"name": body.get("name") or "", "project_id": call.context.project_id or ""}
        if kind == VOLUME:
            size = int(body["size"])
            if not 1 <= size <= _LARGEST:
                raise errors.InvalidInput(f"The size must be from 1 to {_LARGEST}.", path="volume.size")
            row = self._storage.create_volume(size * self._gigabyte, image=body.get("imageRef") or "", **common)
        else:
            self._storage.get(VOLUME, body["volume_id"], _project(call))
            make = self._storage.create_snapshot if kind == SNAPSHOT else self._storage.create_backup
            row = make(body["volume_id"], **common)
        return Answer(202, {kind: self._shown(kind, row)})

    def list(self, call: Call, kind: str) -> Answer:
        """A page, by uuid."""
        given = {name: values[-1] for name, values in call.query.items()}
        filters = {name: given[name] for name in ("name", "status") if name in given}
        limit = given.get("limit", "1000")
        if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= 1000:
            raise errors.InvalidInput(f"limit is {limit!r}, and must be a number from 1 to 1000.", path="limit")
        rows = self._storage.page(kind, _project(call), after=given.get("marker", ""), limit=int(limit), **filters)
        return Answer(200, {_PLURAL[kind]: [self._shown(kind, row) for row in rows]})

    def show(self, call: Call, kind: str) -> Answer:
        """One."""
        return Answer(200, {kind: self._shown(kind, self._get(call, kind))})

    def delete(self, call: Call, kind: str) -> Answer:
        """Begin to delete; 204 of an image, which is gone at once."""
        uuid = self._get(call, kind).uuid
        if kind == IMAGE:
            self._storage.delete_image(uuid)
            return Answer(204)
        self._delete(kind, uuid)
        return Answer(202)

    def restore(self, call: Call) -> Answer:
        """Begin to restore a backup."""
        backup = self._get(call, BACKUP)
        target = call.body["restore"].get("volume_id")
        if target:
            self._storage.get(VOLUME, target, _project(call))
        volume = self._storage.restore(backup.uuid, target)
        shown = {"backup_id": backup.uuid, "volume_id": volume.uuid, "volume_name": volume.name}
        return Answer(202, {"restore": shown})

    def action(self, call: Call, kind: str) -> Answer:
        """One of Cinder's actions."""
        row = self._get(call, kind)
        ((name, given),) = call.body.items()
        given = given if isinstance(given, Mapping) else {}
        if name == "os-reset_status":
            self._check(_ADMIN, call.context)
            self._storage.reset(kind, row.uuid, str(given.get("status", "")))
        elif name == "os-force_delete":
            self._check(_ADMIN, call.context)
            self._delete(kind, row.uuid, force=True)
        elif kind == VOLUME and name == "os-attach":
            self._storage.attach(row.uuid, str(given.get("instance_uuid") or given.get("host_name") or UNKNOWN)[:255])
        elif kind == VOLUME and name == "os-detach":
            self._storage.detach(row.uuid)
        elif kind == VOLUME and name == "os-volume_upload_image":
            image = self._storage.upload(row.uuid, str(given.get("image_name") or "")[:255])
            shown = {"id": row.uuid, "image_id": image.uuid, "image_name": image.name, "status": "uploading"}
            return Answer(202, {"os-volume_upload_image": shown})
        else:
            raise errors.InvalidInput(f"There is no action {name} of a {kind}.", path="body")
        return Answer(202)

    def _delete(self, kind: str, uuid: str, *, force: bool = False) -> None:
        if kind == VOLUME:
            self._storage.delete_volume(uuid, force=force)
        else:
            self._storage.delete(kind, uuid, force=force)

    def _get(self, call: Call, kind: str) -> Any:
        return self._storage.get(kind, call.parts["uuid"], _project(call))

    def _shown(self, kind: str, row: Any) -> dict[str, Any]:
        size = -(-row.size_bytes // self._gigabyte)
        shown = {
            "id": row.uuid,
            "name": row.name,
            "status": row.status,
            "size": size,
            "created_at": _time(row.created_at),
            "updated_at": _time(row.updated_at),
            "fail_reason": row.fault,
        }
        if kind == IMAGE:
            return shown
        if kind != VOLUME:
            return {**shown, "volume_id": row.volume_uuid}
        attached = [{"server_id": row.attached_to, "volume_id": row.uuid}] if row.attached_to else []
        return {
            **shown,
            "attachments": attached,
            "bootable": "true" if row.image else "false",
            "metadata": {},
            "os-vol-host-attr:host": row.location,
        }


def operations(
    storage: BlockStorage, check: Callable[..., None], gigabyte: int, prefixes: Sequence[str]
) -> list[Operation]:
    """The rows of the table.

    :param gigabyte: bytes of a GB of the API.
    """
    resources = _Resources(storage, check, gigabyte)
    return [operation for prefix in prefixes for operation in resources.operations(prefix)]


def _project(call: Call) -> str | None:
    """Whose resources the caller sees; None: everybody's."""
    return None if call.context.system_scope else (call.context.project_id or "")


def _time(microseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(microseconds / 1_000_000, tz=datetime.UTC)
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds")
