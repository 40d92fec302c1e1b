# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the backend and the folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moorage import errors
from moorage_plugins.block_storage.backend import DirectoryBackend

__all__ = ["image_file", "open_backend"]


def open_backend(conf: Any) -> DirectoryBackend:
    """Returns the backend of ``[block_storage]``.

    :raises ConfigError: its folder cannot be made.
    """
    section = conf.block_storage
    folder = Path(section.backend_dir or Path(conf.control_plane.state_dir) / "block_storage")
    return DirectoryBackend(folder, chunk_bytes=int(section.chunk_bytes))


def image_file(conf: Any, name: str) -> Path | None:
    """Returns the path of an image file; None: there is no image with the name.

    :raises InvalidInput: the name is no plain name.
    """
    folder = conf.block_storage.images_dir
    if "/" in name or name.startswith(".") or "\0" in name:
        raise errors.InvalidInput(f"The image {name!r} is no plain name.", path="image")
    path = Path(folder) / name if folder else None
    return path if path is not None and path.is_file() else None
