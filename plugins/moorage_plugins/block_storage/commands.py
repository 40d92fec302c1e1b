# SPDX-License-Identifier: Apache-2.0
"""moorage volume|snapshot|backup|image ..., over the volume dialect."""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

from moorage import errors
from moorage.cli import base
from moorage.clock import SystemClock

__all__ = [
    "BackupCreate",
    "BackupDelete",
    "BackupList",
    "BackupReset",
    "BackupRestore",
    "BackupShow",
    "ImageDelete",
    "ImageList",
    "ImageShow",
    "SnapshotCreate",
    "SnapshotDelete",
    "SnapshotList",
    "SnapshotReset",
    "SnapshotShow",
    "VolumeCreate",
    "VolumeDelete",
    "VolumeList",
    "VolumeReset",
    "VolumeShow",
    "VolumeUpload",
]

_CLOCK = SystemClock()

_PREFIX = "/volume/v3"
_PAUSE = 0.1
_COLUMNS = ("id", "name", "status", "size", "fail_reason")
_BUSY = ("creating", "downloading", "uploading", "deleting", "backing-up", "restoring-backup", "restoring")


class _Show(base.ApiShow):
    kind: ClassVar[str]

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(self.kind, help="uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(_get(base.connection(parsed_args), self.kind, getattr(parsed_args, self.kind)))


class _List(base.ApiLister):
    kind: ClassVar[str]

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--status")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args)
        rows: list[dict[str, Any]] = []
        query: dict[str, Any] = {"status": parsed_args.status, "limit": 1000}
        while True:
            page = api.request("GET", f"/{self.kind}s", query=query, prefix=_PREFIX)[f"{self.kind}s"]
            rows += page
            if len(page) < query["limit"]:
                return base.table(_COLUMNS, rows)
            query["marker"] = page[-1]["id"]


class _Create(base.ApiShow):
    kind: ClassVar[str]

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--name", default="")
        _wait_argument(parser)
        return parser

    def body(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """What is asked for."""
        return {"volume_id": arguments.volume}

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object, waits for it if asked to, and prints it."""
        api = base.connection(parsed_args)
        body = {self.kind: {"name": parsed_args.name, **self.body(parsed_args)}}
        made = api.request("POST", f"/{self.kind}s", body=body, prefix=_PREFIX)[self.kind]
        return base.one(_await(api, self.kind, made["id"]) if parsed_args.wait else made)


class _OfVolume(_Create):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("volume", help="uuid")
        return parser


class _Delete(base.ApiCommand):
    kind: ClassVar[str]
    can_force: ClassVar[bool] = True

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(self.kind, help="uuid")
        if self.can_force:
            parser.add_argument("--force", action="store_true", help="whatever is being done to it")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        api, path = base.connection(parsed_args), f"/{self.kind}s/{getattr(parsed_args, self.kind)}"
        if self.can_force and parsed_args.force:
            api.request("POST", f"{path}/action", body={"os-force_delete": {}}, prefix=_PREFIX)
        else:
            api.request("DELETE", path, prefix=_PREFIX)


class _Reset(base.ApiCommand):
    kind: ClassVar[str]

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(self.kind, help="uuid")
        parser.add_argument("--status", default="available", help="available where it is not said")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        path = f"/{self.kind}s/{getattr(parsed_args, self.kind)}/action"
        body = {"os-reset_status": {"status": parsed_args.status}}
        base.connection(parsed_args).request("POST", path, body=body, prefix=_PREFIX)


class VolumeCreate(_Create):
    """Create a volume."""

    kind = "volume"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--size", type=int, required=True, metavar="GB")
        parser.add_argument("--image", help="uuid of an uploaded image, or a file of [block_storage] images_dir")
        return parser

    def body(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """What is asked for."""
        image = {"imageRef": arguments.image} if arguments.image else {}
        return {"size": arguments.size, **image}


class VolumeUpload(base.ApiShow):
    """Upload a volume to a new image."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("volume", help="uuid")
        parser.add_argument("image_name")
        _wait_argument(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request, waits for its end if asked to, and prints the result."""
        api, body = base.connection(parsed_args), {"os-volume_upload_image": {"image_name": parsed_args.image_name}}
        found = api.request("POST", f"/volumes/{parsed_args.volume}/action", body=body, prefix=_PREFIX)
        if parsed_args.wait:
            _await(api, "volume", parsed_args.volume)
        return base.one(found["os-volume_upload_image"])


class BackupRestore(base.ApiShow):
    """Restore a backup to a new volume, or to an existing one, whose data it replaces."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the backup and the volume."""
        parser = super().get_parser(prog_name)
        parser.add_argument("backup", help="uuid")
        target = parser.add_mutually_exclusive_group()
        target.add_argument("--volume", help="uuid of an existing volume, whose data the backup replaces")
        target.add_argument("--name", help="name of the new volume; restore_backup_<uuid> unless given")
        _wait_argument(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request, waits for its end if asked to, and prints the result."""
        api = base.connection(parsed_args)
        body = {"restore": {"volume_id": parsed_args.volume, "name": parsed_args.name}}
        found = api.request("POST", f"/backups/{parsed_args.backup}/restore", body=body, prefix=_PREFIX)["restore"]
        return base.one(_await(api, "volume", found["volume_id"]) if parsed_args.wait else found)


class ImageList(_List):
    """List images that volumes were uploaded to."""

    kind = "image"


class ImageShow(_Show):
    """Show an image that a volume was uploaded to."""

    kind = "image"


class ImageDelete(_Delete):
    """Delete an image that a volume was uploaded to."""

    kind = "image"
    can_force = False


class VolumeList(_List):
    """List volumes."""

    kind = "volume"


class VolumeShow(_Show):
    """Show a volume."""

    kind = "volume"


class VolumeDelete(_Delete):
    """Delete a volume."""

    kind = "volume"


class VolumeReset(_Reset):
    """Set the status of a volume. The operation in progress on it ends."""

    kind = "volume"


class SnapshotCreate(_OfVolume):
    """Create a snapshot of a volume."""

    kind = "snapshot"


class SnapshotList(_List):
    """List snapshots."""

    kind = "snapshot"


class SnapshotShow(_Show):
    """Show a snapshot."""

    kind = "snapshot"


class SnapshotDelete(_Delete):
    """Delete a snapshot."""

    kind = "snapshot"


class SnapshotReset(_Reset):
    """Set the status of a snapshot. The operation in progress on it ends."""

    kind = "snapshot"


class BackupCreate(_OfVolume):
    """Back a volume up."""

    kind = "backup"


class BackupList(_List):
    """List backups."""

    kind = "backup"


class BackupShow(_Show):
    """Show a backup."""

    kind = "backup"


class BackupDelete(_Delete):
    """Delete a backup."""

    kind = "backup"


class BackupReset(_Reset):
    """Set the status of a backup. The operation in progress on it ends."""

    kind = "backup"


def _wait_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait", action="store_true", help="until it is done; exit status 1 and the reason where that fails"
    )


def _get(api: Any, kind: str, uuid: str) -> dict[str, Any]:
    return dict(api.request("GET", f"/{kind}s/{uuid}", prefix=_PREFIX)[kind])


def _await(api: Any, kind: str, uuid: str, timeout: float = 600.0) -> dict[str, Any]:
    """Returns the resource, when nothing is being done to it any more.

    :raises Conflict: what was done failed.
    """
    deadline = _CLOCK.monotonic() + timeout
    while True:
        found = _get(api, kind, uuid)
        if found["status"] not in _BUSY:
            # What succeeds leaves no reason behind, even where the status is that of before.
            if found["fail_reason"] or found["status"].startswith("error"):
                raise errors.Conflict(f"The {kind} {uuid} is {found['status']}: {found['fail_reason']}")
            return found
        if _CLOCK.monotonic() > deadline:
            raise errors.Unavailable(f"{kind} {uuid} is still {found['status']} after {timeout:g} seconds.")
        _CLOCK.sleep(_PAUSE)
