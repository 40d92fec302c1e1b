# SPDX-License-Identifier: Apache-2.0
"""Volumes, snapshots and backups in Cinder's shape: what is needed to drive the block storage service.

Beside them the images that volumes were uploaded to, which Cinder leaves to Glance.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from moorage import errors
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage_plugins.api.volume import schemas
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, SNAPSHOT, VOLUME
from moorage_plugins.block_storage.service import UNKNOWN, BlockStorage

__all__ = ["POLICIES", "routes"]

_MEMBER = "rule:system_member or rule:project_member"
POLICIES = (
    PolicyRule("volume:get", "rule:system_reader or rule:project_reader", "See volumes, snapshots and backups."),
    PolicyRule("volume:change", _MEMBER, "Create, change and delete volumes, snapshots and backups."),
    PolicyRule(
        "volume:admin", "rule:system_admin", "Reset a status, or delete whatever is being done to it.", ("system",)
    ),
)
_SEE, _CHANGE, _ADMIN = (rule.name for rule in POLICIES)
_DELETE = {VOLUME: schemas.DELETE_VOLUME}
_PLURAL = {VOLUME: "volumes", SNAPSHOT: "snapshots", BACKUP: "backups", IMAGE: "images"}


class _Resources:
    def __init__(self, storage: BlockStorage, gigabyte: int) -> None:
        self._storage = storage
        self._gigabyte = gigabyte

    def routes(self, prefix: str) -> list[Route]:
        """Returns all rows of the table below a prefix."""
        restore = f"{prefix}/backups/{{uuid}}/restore"
        found = [Route("POST", restore, self.restore, policy=_CHANGE, body=schemas.RESTORE)]
        for kind, plural in _PLURAL.items():
            one = f"{prefix}/{plural}/{{uuid}}"
            found += [
                Route("GET", f"{prefix}/{plural}", self._bound(self.list, kind), _SEE, query=schemas.LIST),
                Route("GET", f"{prefix}/{plural}/detail", self._bound(self.list, kind), _SEE, query=schemas.LIST),
                Route("GET", one, self._bound(self.show, kind), _SEE),
                Route("DELETE", one, self._bound(self.delete, kind), _CHANGE, query=_DELETE.get(kind)),
            ]
        for kind, body in schemas.CREATE.items():
            every, one = f"{prefix}/{_PLURAL[kind]}", f"{prefix}/{_PLURAL[kind]}/{{uuid}}"
            found += [
                Route("POST", every, self._bound(self.create, kind), _CHANGE, body=body),
                Route("POST", f"{one}/action", self._bound(self.action, kind), _CHANGE, body=schemas.action(kind)),
            ]
        return found

    @staticmethod
    def _bound(handler: Callable[[Request, str], Response], kind: str) -> Callable[[Request], Response]:
        return lambda request: handler(request, kind)

    def create(self, request: Request, kind: str) -> Response:
        """Requests a new resource. 202: an agent makes it later."""
        body = request.body[kind]
        common = {"name": body.get("name") or "", "project_id": request.context.project_id or ""}
        if kind == VOLUME:
            size = int(body["size"])
            if not 1 <= size <= schemas.LARGEST_GB:
                raise errors.InvalidInput(f"The size must be from 1 to {schemas.LARGEST_GB}.", path="volume.size")
            row = self._storage.create_volume(size * self._gigabyte, image=body.get("imageRef") or "", **common)
        else:
            self._storage.get(VOLUME, body["volume_id"], _project(request))
            make = self._storage.create_snapshot if kind == SNAPSHOT else self._storage.create_backup
            row = make(body["volume_id"], **common)
        return Response(202, {kind: self._shown(kind, row)})

    def list(self, request: Request, kind: str) -> Response:
        """Lists a page, ordered by uuid, and links to the next page when the page is full."""
        given = request.query
        filters = {name: given[name] for name in ("name", "status") if name in given}
        limit = given.get("limit", schemas.LARGEST_PAGE)
        rows = self._storage.page(kind, _project(request), after=given.get("marker", ""), limit=limit, **filters)
        plural = _PLURAL[kind]
        shown: dict[str, Any] = {plural: [self._shown(kind, row) for row in rows]}
        if len(rows) == limit:
            following = urlencode({**given, "limit": limit, "marker": rows[-1].uuid})
            shown[f"{plural}_links"] = [{"rel": "next", "href": f"{request.base_url}{request.path}?{following}"}]
        return Response(200, shown)

    def show(self, request: Request, kind: str) -> Response:
        """One."""
        return Response(200, {kind: self._shown(kind, self._get(request, kind))})

    def delete(self, request: Request, kind: str) -> Response:
        """Requests the deletion. 202: an agent deletes it later; 204: the image is gone."""
        uuid = self._get(request, kind).uuid
        if kind == IMAGE:
            self._storage.delete_image(uuid)
            return Response(204)
        force = schemas.is_true(request.query.get("force", "false"))
        if force:
            request.check_policy(_ADMIN)
        self._delete(kind, uuid, force=force)
        return Response(202)

    def restore(self, request: Request) -> Response:
        """Requests the restoration of a backup: to the volume that the body names, otherwise to a new volume."""
        backup, given = self._get(request, BACKUP), request.body["restore"]
        target, name = given.get("volume_id"), given.get("name") or ""
        if target is not None:
            if name:
                raise errors.InvalidInput(
                    "body/restore has a volume_id and a name. The name is for a new volume; give one of the two.",
                    path="body/restore/name",
                )
            self._storage.get(VOLUME, target, _project(request))
        volume = self._storage.restore(backup.uuid, target, name=name)
        shown = {"backup_id": backup.uuid, "volume_id": volume.uuid, "volume_name": volume.name}
        return Response(202, {"restore": shown})

    def action(self, request: Request, kind: str) -> Response:
        """Does one of Cinder's actions; the schema has refused every other one."""
        row = self._get(request, kind)
        ((name, given),) = request.body.items()
        given = given or {}
        if name == "os-reset_status":
            request.check_policy(_ADMIN)
            self._storage.reset(kind, row.uuid, given["status"])
        elif name == "os-force_delete":
            request.check_policy(_ADMIN)
            self._delete(kind, row.uuid, force=True)
        elif name == "os-attach":
            self._attach(row.uuid, given)
        elif name == "os-detach":
            self._detach(row.uuid, given)
        else:
            image = self._storage.upload(row.uuid, given.get("image_name") or "")
            shown = {"id": row.uuid, "image_id": image.uuid, "image_name": image.name, "status": "uploading"}
            return Response(202, {"os-volume_upload_image": shown})
        return Response(202)

    def _attach(self, uuid: str, given: Mapping[str, Any]) -> None:
        instance, host = given.get("instance_uuid"), given.get("host_name")
        if instance and host:
            raise errors.InvalidInput(
                "os-attach names an instance_uuid and a host_name. Attach the volume to one of them.", path="os-attach"
            )
        self._storage.attach(uuid, instance or host or UNKNOWN, given.get("mountpoint") or "")

    def _detach(self, uuid: str, given: Mapping[str, Any]) -> None:
        attachment = given.get("attachment_id")
        if attachment not in (None, uuid):
            raise errors.InvalidInput(
                f"The volume {uuid} has no attachment {attachment}. A volume has one attachment at most, with the volume's id.",
                path="os-detach/attachment_id",
            )
        self._storage.detach(uuid)

    def _delete(self, kind: str, uuid: str, *, force: bool = False) -> None:
        if kind == VOLUME:
            self._storage.delete_volume(uuid, force=force)
        else:
            self._storage.delete(kind, uuid, force=force)

    def _get(self, request: Request, kind: str) -> Any:
        return self._storage.get(kind, request.path_params["uuid"], _project(request))

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
        return {
            **shown,
            "attachments": [_attachment(row)] if row.attached_to else [],
            "bootable": "true" if row.image else "false",
            "metadata": {},
            "os-vol-host-attr:host": row.location,
        }


def routes(storage: BlockStorage, gigabyte: int, prefixes: Sequence[str]) -> list[Route]:
    """Returns the rows of the table.

    :param gigabyte: bytes of a GB of the API.
    """
    resources = _Resources(storage, gigabyte)
    return [route for prefix in prefixes for route in resources.routes(prefix)]


def _attachment(row: Any) -> dict[str, Any]:
    """Returns the only attachment of a volume; it has the volume's id."""
    return {
        "id": row.uuid,
        "attachment_id": row.uuid,
        "volume_id": row.uuid,
        "server_id": row.attached_to,
        "device": row.mountpoint,
    }


def _project(request: Request) -> str | None:
    """Returns the project whose resources the caller sees; None: all projects."""
    return None if request.context.system_scope else (request.context.project_id or "")


def _time(microseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(microseconds / 1_000_000, tz=datetime.UTC)
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds")
