# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the block storage service."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage_plugins.block_storage.options",
    commands={
        "volume create": "moorage_plugins.block_storage.commands:VolumeCreate",
        "volume list": "moorage_plugins.block_storage.commands:VolumeList",
        "volume show": "moorage_plugins.block_storage.commands:VolumeShow",
        "volume delete": "moorage_plugins.block_storage.commands:VolumeDelete",
        "volume reset-state": "moorage_plugins.block_storage.commands:VolumeReset",
        "volume upload": "moorage_plugins.block_storage.commands:VolumeUpload",
        "image list": "moorage_plugins.block_storage.commands:ImageList",
        "image show": "moorage_plugins.block_storage.commands:ImageShow",
        "image delete": "moorage_plugins.block_storage.commands:ImageDelete",
        "snapshot create": "moorage_plugins.block_storage.commands:SnapshotCreate",
        "snapshot list": "moorage_plugins.block_storage.commands:SnapshotList",
        "snapshot show": "moorage_plugins.block_storage.commands:SnapshotShow",
        "snapshot delete": "moorage_plugins.block_storage.commands:SnapshotDelete",
        "snapshot reset-state": "moorage_plugins.block_storage.commands:SnapshotReset",
        "backup create": "moorage_plugins.block_storage.commands:BackupCreate",
        "backup list": "moorage_plugins.block_storage.commands:BackupList",
        "backup show": "moorage_plugins.block_storage.commands:BackupShow",
        "backup delete": "moorage_plugins.block_storage.commands:BackupDelete",
        "backup reset-state": "moorage_plugins.block_storage.commands:BackupReset",
        "backup restore": "moorage_plugins.block_storage.commands:BackupRestore",
    },
)
